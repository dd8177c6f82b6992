"""A model with the layouts of an inference engine, in plain torch: fused, padded, sharded, with a loader of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from deltawire.core.schema import Schema, TensorSpec
from deltawire.engines.live.learn import Layer, without_data

Hook = Callable[[nn.Module], object]
"""Processes the parameters of a module after they are loaded."""


class Fused(nn.Module):
    """One rank of `world`: qkv and gate_up fused, rows or columns sharded, a vocabulary padded to a multiple of 64.
    With `fp8`, units of one, two and four bytes."""

    def __init__(
        self, hidden: int = 64, heads: int = 4, kv: int = 2, ffn: int = 192, vocab: int = 100, layers: int = 2,
        rank: int = 0, world: int = 1, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", bias: bool = True,
        fp8: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.hidden, self.ffn, self.vocab, self.layers, self.rank, self.world = hidden, ffn, vocab, layers, rank, world
        self.size = hidden // heads
        self.kv = max(kv // world, 1)
        self.kv_rank = rank * kv // world
        self.heads, self.all_kv = heads // world, kv
        self.padded = -(-vocab // 64) * 64 // world

        self.fp8 = fp8
        narrow = torch.float8_e4m3fn if fp8 else dtype

        def weights(*shape: int, dtype: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)

        self.embed = weights(self.padded, hidden)
        self.norm = weights(hidden, dtype=torch.float32 if fp8 else dtype)
        self.qkv = nn.ParameterList(weights((self.heads + 2 * self.kv) * self.size, hidden) for _ in range(layers))
        self.qkv_bias = nn.ParameterList(
            weights((self.heads + 2 * self.kv) * self.size) for _ in range(layers if bias else 0)
        )
        self.out = nn.ParameterList(weights(hidden, hidden // world) for _ in range(layers))
        self.gate_up = nn.ParameterList(weights(2 * ffn // world, hidden, dtype=narrow) for _ in range(layers))
        self.down = nn.ParameterList(weights(hidden, ffn // world, dtype=narrow) for _ in range(layers))

    def schema(self) -> Schema:
        """The checkpoint's side: one tensor per projection, whole."""
        heads, dtype, narrow = self.heads * self.world, "BF16", "F8_E4M3" if self.fp8 else "BF16"
        specs = [
            TensorSpec("embed.weight", dtype, (self.vocab, self.hidden)),
            TensorSpec("norm.weight", "F32" if self.fp8 else dtype, (self.hidden,)),
        ]
        for i in range(self.layers):
            for name, count in (("q", heads), ("k", self.all_kv), ("v", self.all_kv)):
                specs.append(TensorSpec(f"{i}.{name}.weight", dtype, (count * self.size, self.hidden)))
                if len(self.qkv_bias):
                    specs.append(TensorSpec(f"{i}.{name}.bias", dtype, (count * self.size,)))
            specs.append(TensorSpec(f"{i}.out.weight", dtype, (self.hidden, heads * self.size)))
            specs.append(TensorSpec(f"{i}.gate.weight", narrow, (self.ffn, self.hidden)))
            specs.append(TensorSpec(f"{i}.up.weight", narrow, (self.ffn, self.hidden)))
            specs.append(TensorSpec(f"{i}.down.weight", narrow, (self.hidden, self.ffn)))
        return Schema.build(specs)

    def load(self, weights: Iterable[tuple[str, Tensor]], hook: Hook | None = None) -> None:
        """Load weights, then have the hook process those of each feed-forward layer."""
        self.load_weights(weights)
        for module in (self.gate_up, self.down) if hook else ():
            hook(module)

    def hooked(self, hook: Hook | None) -> list[Layer]:
        """The layers with that hook, as they are before it was run."""
        found = []
        for name in ("gate_up", "down") if hook else ():
            module = getattr(self, name)
            loaded = {key: without_data(tensor) for key, tensor in module._parameters.items()}
            found.append(Layer(name, module, loaded, hook))
        return found

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            parts = name.split(".")
            if parts[0] == "next":
                # a draft's
                continue
            if name == "norm.weight":
                self.norm.data.copy_(tensor)
            elif name == "embed.weight":
                first = self.padded * self.rank
                mine = tensor[first : first + self.padded]
                self.embed.data[: mine.shape[0]].copy_(mine)
                self.embed.data[mine.shape[0] :].fill_(0)
            else:
                self._layer(int(parts[0]), parts[1], parts[2], tensor)

    def _layer(self, i: int, name: str, kind: str, tensor: Tensor) -> None:
        if name in ("q", "k", "v"):
            to = (self.qkv if kind == "weight" else self.qkv_bias)[i].data
            q, kv = self.heads * self.size, self.kv * self.size
            start, count = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[name]
            first = self.rank * q if name == "q" else self.kv_rank * self.size
            to.narrow(0, start, count).copy_(tensor.narrow(0, first, count))
        elif name in ("gate", "up"):
            rows = self.ffn // self.world
            first = rows if name == "up" else 0
            self.gate_up[i].data.narrow(0, first, rows).copy_(tensor.narrow(0, self.rank * rows, rows))
        else:
            to = (self.out if name == "out" else self.down)[i].data
            to.copy_(tensor.narrow(1, self.rank * to.shape[1], to.shape[1]))


class Drafting(nn.Module):
    """A layer that predicts the token after the next one, with the embedding of its model, in one rank."""

    def __init__(self, model: Fused) -> None:
        super().__init__()
        self.model, self.embed = [model], model.embed
        self.out = nn.Parameter(torch.zeros(model.hidden, 2 * model.hidden, dtype=model.embed.dtype), False)

    def schema(self) -> Schema:
        """Of the checkpoint of both, which has the embedding once more."""
        model = self.model[0]
        more = [
            TensorSpec("next.embed.weight", "BF16", (model.vocab, model.hidden)),
            TensorSpec("next.out.weight", "BF16", tuple(self.out.shape)),
        ]
        return Schema.build([*model.schema().tensors, *more])

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "next.out.weight":
                self.out.data.copy_(tensor)
            elif name in ("embed.weight", "next.embed.weight"):
                self.embed.data[: tensor.shape[0]].copy_(tensor)
