"""A small decoder to train for real, and trainers that keep its weights in the three ways detectors are made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deltawire import Publisher
from deltawire.trainer import DeltaAdamW, FusedDetector, HostDetector, SnapshotDetector


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.gate, self.down = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(3 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        # something causal, so that there is something to learn
        x = (x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]).to(x.dtype) + x
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Decoder(nn.Module):
    """Tied head, a frozen layer, a buffer that counts: everything a schema can have."""

    def __init__(self, width: int = 48, vocabulary: int = 97, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.frozen = nn.Linear(width, width, bias=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x + self.frozen(x))


class Trainer:
    """Trains a model for real, publishes with one kind of detector, and knows the bits it should have published."""

    tied = "head.weight"

    def __init__(self, kind: str, run: Any, device: str = "cpu", **options: Any) -> None:
        torch.manual_seed(0)
        self.kind = kind
        self.model = self.make_model().to(device)
        self.device = device
        make: Callable[..., torch.optim.Optimizer] = DeltaAdamW if kind == "adamw" else torch.optim.AdamW
        decay = [p for p in self.model.parameters() if p.requires_grad and p.dim() > 1]
        rest = [p for p in self.model.parameters() if p.requires_grad and p.dim() == 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 3e-4}]
        self.optimizer = make(groups, lr=1e-4)
        self.detector: Any = {
            "host": lambda: HostDetector(),
            "pairs": lambda: HostDetector(),
            "snapshot": lambda: SnapshotDetector(),
            "streamed": lambda: SnapshotDetector(memory="host"),
            "fused": lambda: FusedDetector(self.copies),
            "adamw": lambda: self.optimizer,
        }
        if kind == "fused":
            self.copies = {name: self._wire(t).clone() for name, t in self.tensors().items()}
        self.detector = self.detector[kind]()
        self.publisher = Publisher(run, detector=self.detector, wire_dtype="bf16", **options)

    def make_model(self) -> nn.Module:
        return Decoder()

    def logits(self, ids: Tensor) -> Tensor:
        self.model.steps[1] += 1
        return self.model(ids)

    def tensors(self) -> dict[str, Tensor]:
        return {k: v for k, v in self.model.state_dict().items() if k != self.tied}

    @staticmethod
    def _wire(tensor: Tensor) -> Tensor:
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

    def step(self, lr: float | None = None) -> None:
        if lr is not None:
            self.optimizer.param_groups[0]["lr"] = lr
        ids = torch.randint(0, 97, (4, 12), device=self.device)
        ids = torch.cat([ids, ids.flip(1)], 1)
        logits = self.logits(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, 97), ids[:, 1:].reshape(-1))
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.kind == "fused":
            self.detector.cast(self.tensors())

    def publish(self, **options: Any) -> Any:
        return self.publisher.publish(self.source(), **options)

    def source(self) -> Any:
        """What is published: the model, its tensors, or each of them once and then no more."""
        if self.kind == "pairs":
            return ((name, tensor.clone()) for name, tensor in self.tensors().items())
        return self.tensors() if self.kind == "fused" else self.model

    def bits(self) -> dict[str, np.ndarray]:
        """What a replica must hold: the cast weights."""
        return {name: raw(self._wire(tensor)) for name, tensor in self.tensors().items()}


def raw(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()


def replica_model(trainer: Trainer) -> dict[str, Tensor]:
    """Somewhere to sync to: zeros in the wire dtypes."""
    return {name: torch.zeros_like(trainer._wire(t)) for name, t in trainer.tensors().items()}


def changed_elements(old: dict[str, np.ndarray], new: dict[str, np.ndarray], like: dict[str, Tensor]) -> int:
    total = 0
    for name, tensor in like.items():
        size = tensor.element_size() if not tensor.is_floating_point() else 2
        total += int((old[name].reshape(-1, size) != new[name].reshape(-1, size)).any(1).sum())
    return total
