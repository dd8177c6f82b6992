"""The model of the demo: a small transformer that learns synthetic text, and how its weights are told apart."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 256, 4, 4, 64, 8
LEARNING_RATE = 1e-6

_SUBJECTS = ("the cat", "a robot", "my neighbour", "the old captain")
_VERBS = ("sees", "wants", "paints", "forgets")
_OBJECTS = ("red boxes", "small ships", "green apples", "loud clocks")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class TinyLM(nn.Module):
    """Predicts the next byte. Embedding and head are tied, as in most small models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Trainer:
    """fp32 master weights, AdamW."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        # the followers want the other cores, and threads that wait for each other on busy cores are slower than one
        torch.set_num_threads(1)
        self._words = random.Random(0)
        self.model = TinyLM()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def step(self) -> float:
        tokens = torch.tensor([self._line() for _ in range(BATCH)])
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def _line(self) -> list[int]:
        pick, text = self._words.choice, ""
        while len(text) <= CONTEXT:
            text += f"{pick(_SUBJECTS)} {pick(_VERBS)} {self._words.randint(2, 99)} {pick(_OBJECTS)}. "
        return list(text.encode()[: CONTEXT + 1])


def wire_weights(model: nn.Module) -> dict[str, Tensor]:
    """What the followers must have, by torch's own cast: nothing of deltawire is involved."""
    return {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """A hash of every bit, with nothing of deltawire in it."""
    whole = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        whole.update(name.encode() + bytes(tensor.contiguous().view(torch.int16).numpy()))
    return whole.hexdigest()


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name].view(torch.int16), other[name].view(torch.int16)) for name in one
    )
