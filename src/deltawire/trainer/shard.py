"""Parts of tensors that one rank holds: `Shard`, as the user hands them in, and `Pieces`, by tensor."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from ..core.errors import SchemaMismatch, UnsafeName, UnsupportedTensor
from ..models import identity, is_module, is_torch

Where = tuple[slice, ...] | range


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A part of a tensor that this rank holds, to be published as it lies: `publisher.publish([shard, …])`.

        dw.Shard("mlp.down_proj.weight", part, (4096, 1024), (slice(None), slice(256, 512)))   # columns 256 to 511
        dw.Shard("mlp.up_proj.weight", flat, (1024, 4096), range(7000, 7000 + flat.numel()))   # ZeRO-3, FSDP1
        dw.Shard("norm.weight", norm, norm.shape)                                              # all of it

    Every rank of torch.distributed publishes a list of what it holds, which may be empty, always cut in the same way.
    Nothing is gathered. Together they must hold every element; what several ranks hold must have equal bits, which the
    first publish checks, and one of them writes it. A gap or a contradiction raises SchemaMismatch on all ranks with
    the name of the tensor, and nothing is published.

    name        name of the tensor in the checkpoint
    tensor      the torch tensor that is held, without padding, on any device. It is published in its own dtype, unless
                the publisher has a `wire_dtype` such as "bf16"
    full_shape  shape of the tensor in the checkpoint
    where       what `tensor` is of the full one. A rectangle, by a slice for each dimension (those left out are whole),
                or a flat range of its elements in row-major order. A flat range is at most three rectangles of the
                matrix that the tensor is in the format: part of a row, rows, part of a row.
    """

    name: str
    tensor: Any
    full_shape: tuple[int, ...]
    where: Where = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise UnsafeName(f"tensors are named by strings, not by {self.name!r:.80}, a {type(self.name).__name__}")
        name = self.name[:80]
        if not is_torch(self.tensor):
            raise UnsupportedTensor(f"the shard of {name!r} is a {type(self.tensor).__name__}: pass a torch tensor")
        if hasattr(self.tensor, "to_local"):
            raise UnsupportedTensor(f"the shard of {name!r} is a DTensor: pass its to_local(), or publish the model")
        object.__setattr__(self, "full_shape", tuple(map(int, self.full_shape)))
        where = (self.where,) if isinstance(self.where, slice) else self.where
        found: tuple[int, ...] = tuple(self.tensor.shape)
        if isinstance(where, range):
            elements = math.prod(self.full_shape)
            if where.step != 1 or not 0 <= where.start <= max(where.start, where.stop) <= elements:
                raise SchemaMismatch(f"the shard of {name!r} is {where} of {elements} elements: pass range(first, end)")
            expected: tuple[int, ...] = (len(where),)
            found = (self.tensor.numel(),)
        else:
            if len(where) > len(self.full_shape) or any(
                not isinstance(w, slice) or w.step not in (None, 1) for w in where
            ):
                raise SchemaMismatch(
                    f"the shard of {name!r} of shape {list(self.full_shape)} lies at {where}: pass a slice(first, end) "
                    "for each dimension, or a range of its elements"
                )
            whole = (slice(None),) * (len(self.full_shape) - len(where))
            ends = [w.indices(side)[:2] for w, side in zip((*where, *whole), self.full_shape, strict=True)]
            where = tuple(slice(first, max(first, end)) for first, end in ends)
            expected = tuple(w.stop - w.start for w in where)
        if found != expected:
            raise SchemaMismatch(
                f"the shard of {name!r} has {list(found)} elements, and at {_shown(where)} of {list(self.full_shape)} "
                f"there are {list(expected)}; padding is not part of it"
            )
        object.__setattr__(self, "where", where)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The pieces of one tensor that this rank holds, wherever they lie in it; there may be none."""

    shape: tuple[int, ...]
    dtype: Any
    mark: Any
    """A tensor of that dtype. That of tied tensors is the same, which empty pieces could not show."""
    pieces: tuple[tuple[Any, Where], ...]

    @classmethod
    def of(cls, shape: Iterable[int], like: Any, *pieces: tuple[Any, Where]) -> Pieces:
        return cls(tuple(shape), like.dtype, like.new_empty(1), pieces)

    def stride(self) -> tuple[int, ...]:
        """Of the whole tensor, which is stored row by row."""
        return tuple(accumulate(reversed(self.shape[1:]), lambda a, b: a * b, initial=1))[::-1] if self.shape else ()


class HeldShards:
    """The shards that this rank publishes, by tensor. `Publisher` makes it from a list of them."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        self._shards = shards

    @cached_property
    def tensors(self) -> dict[str, Pieces]:
        """What this rank holds, by tensor. Read where all ranks take part: an error of one is raised on all."""
        by_name: dict[str, list[Shard]] = {}
        for shard in self._shards:
            if not isinstance(shard, Shard):
                raise UnsupportedTensor(f"a list of shards has a {type(shard).__name__} in it: pass Shard objects only")
            by_name.setdefault(shard.name, []).append(shard)
        found: dict[str, Pieces] = {}
        marks: dict[Any, Any] = {}
        for name, parts in by_name.items():
            first = parts[0]
            for part in parts[1:]:
                if (part.full_shape, part.tensor.dtype) != (first.full_shape, first.tensor.dtype):
                    raise SchemaMismatch(
                        f"{name[:80]!r} is {first.tensor.dtype} {list(first.full_shape)} and "
                        f"{part.tensor.dtype} {list(part.full_shape)} in two shards of one rank"
                    )
            # one memory under two names is tied, unless there is none
            memory = tuple((identity(p.tensor), _shown(p.where)) for p in parts if p.tensor.numel())
            mark = marks.setdefault((memory or name, first.full_shape), first.tensor.new_empty(1))
            pieces = tuple((part.tensor.detach(), part.where) for part in parts)
            found[name] = Pieces(first.full_shape, first.tensor.dtype, mark, pieces)
        return found


def as_held(model: Any, *, nothing: bool) -> Any:
    """Shards, where a list or another collection has them; anything else as it is. `nothing`: whether an empty one is
    one of shards."""
    apart = is_module(model) or isinstance(model, (Mapping, str, bytes)) or hasattr(model, "shape")
    if apart or not isinstance(model, Collection):
        return model
    first = next(iter(model), None)
    return HeldShards(model) if isinstance(first, Shard) or (nothing and not model) else model


def _shown(where: Where) -> str:
    if isinstance(where, range):
        return f"range({where.start}, {where.stop})"
    return f"[{', '.join(f'{w.start}:{w.stop}' for w in where)}]"
