"""Describe the contents of any safetensors file, of deltawire or another tool, without its model.

Tolerant where the readers of a run are strict: metadata may be missing or odd, indices in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from . import container
from .codecs import packed, raw
from .container import Read
from .dtypes import Bits, lookup, numbers
from .errors import PositionError, SchemaMismatch
from .schema import TensorSpec
from .sparse import INDEX, DeltaFile
from .ulps import Histogram, in_ulps, unzigzag

_INDEX_TYPES = {"I32": np.int32, "I64": np.int64, "U32": np.uint32, "U64": np.uint64}


Base = Callable[[str], tuple[TensorSpec, Bits]]
"""Gives a tensor of the base version by its name."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A tensor of the model, as far as a file holds it."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    """None where the file does not say, as in `raw`."""
    changed: int | None
    """None for full weights."""
    nbytes: int | None
    """None where it is coded together with others."""

    @property
    def elements(self) -> int | None:
        return None if self.shape is None else TensorSpec(self.name, self.dtype, self.shape).elements


@dataclass(frozen=True, slots=True)
class IndexStats:
    """The positions and values of a tensor in a `raw` file."""

    first: int
    last: int
    ascending: bool
    low: float | None
    """Smallest value; None if no value is a number that can be shown."""
    high: float | None
    """Largest value."""


class Contents:
    """An opened file. Only its header is read until more is asked for."""

    def __init__(self, read: Read, size: int) -> None:
        self._read, self.size = read, size
        self.header = container.read_header(read, size)
        self.metadata = self.header.metadata
        self._pairs = _pairs(self.header)
        # a file with an index is ours, and read as strictly as a replica reads it
        ours = INDEX in self.header.items and self.metadata.get("encoding", raw.name) != raw.name
        self._delta = DeltaFile(read, size) if ours else None
        empty = not self.header.items and self.metadata.get("sparse") == "true"
        self.kind: Literal["delta", "full"] = "delta" if self._delta or self._pairs or empty else "full"
        self.encoding = self._delta.encoding if self._delta else raw.name if self.kind == "delta" else ""

    def parts(self) -> list[TensorPart]:
        """The tensors of the file. Reads no data."""
        if self._delta is not None:
            return _block_parts(self._delta)
        found = [
            TensorPart(name, values.dtype, None, indices.shape[0], indices.nbytes + values.nbytes)
            for name, (indices, values) in self._pairs.items()
        ]
        paired = {item.name for pair in self._pairs.values() for item in pair}
        return found + [
            TensorPart(item.name, item.dtype, item.shape, None, item.nbytes)
            for item in self.header.items.values()
            if item.name not in paired
        ]

    def stats(self) -> dict[str, IndexStats]:
        """Positions and values of each tensor that a `raw` file changes. Reads all of it."""
        return {
            name: _stats(*self._pair(name), values.dtype)
            for name, (indices, values) in self._pairs.items()
            if indices.nbytes
        }

    def steps(self, base: Base | None = None) -> Histogram | None:
        """Step sizes; None where they need the base version and it is not given."""
        histogram = Histogram()
        for steps in self._based_steps(base) if base is not None else self._coded_steps():
            if steps is None:
                return None
            histogram.add(steps)
        return histogram

    def _coded_steps(self) -> Iterator[npt.NDArray[np.int64] | None]:
        if self._delta is not None:
            for block in self._delta.blocks:
                steps_are_coded = block.record is not None and block.record.encoding == packed.name
                found = self._delta.read(block) if steps_are_coded else None
                if isinstance(found, list):
                    yield from (unzigzag(moves.values) for moves in found)
                else:
                    # the steps of `context` depend on the base, and `planes` has flipped bits
                    yield None
        if self._pairs:
            yield None

    def _based_steps(self, base: Base) -> Iterator[npt.NDArray[np.int64]]:
        if self._delta is not None:
            for changes in self._delta.changes(lambda name: base(name)[1]):
                for change in changes:
                    yield in_ulps(change.old, change.new, lookup(change.region.tensor.dtype))
        for name, (_, values) in self._pairs.items():
            tensor, bits = base(name)
            if values.dtype != raw.value_dtype(tensor):
                raise SchemaMismatch(f"{name!r} is {tensor.dtype} in the base but {values.dtype} in the file")
            indices, new = self._pair(name)
            if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < bits.size:
                raise PositionError(f"an index of {name!r} lies outside its {bits.size:,} units")
            yield in_ulps(bits[indices], new, lookup(tensor.dtype))

    def _pair(self, name: str) -> tuple[npt.NDArray[Any], Bits]:
        indices, values = self._pairs[name]
        positions = np.frombuffer(self._read(indices.start, indices.nbytes), _INDEX_TYPES[indices.dtype])
        return positions, np.frombuffer(self._read(values.start, values.nbytes), lookup(values.dtype).unit)


def _pairs(header: container.Header) -> dict[str, tuple[container.Item, container.Item]]:
    """Indices with their values, where they fit together; anything else is taken for a tensor of its own."""
    found = {}
    for key, indices in header.items.items():
        stem = key.removesuffix(raw.INDICES)
        values = header.items.get(stem + raw.VALUES)
        if stem != key and values is not None and indices.dtype in _INDEX_TYPES and len(indices.shape) == 1:
            if indices.shape != values.shape or lookup(values.dtype).units_per_element != 1:
                continue
            found[stem] = (indices, values)
    return found


def _block_parts(delta: DeltaFile) -> list[TensorPart]:
    changed: dict[TensorSpec, int] = {}
    nbytes: dict[TensorSpec, int | None] = {}
    for block in delta.blocks:
        alone = len({region.tensor for region, _ in block.regions}) == 1
        for number, (region, count) in enumerate(block.regions):
            tensor = region.tensor
            changed[tensor] = changed.get(tensor, 0) + count
            known = nbytes.get(tensor, 0)
            # counted once per block
            nbytes[tensor] = known + (block.nbytes if number == 0 else 0) if alone and known is not None else None
    return [TensorPart(t.name, t.dtype, t.shape, count, nbytes[t]) for t, count in changed.items()]


def _stats(indices: npt.NDArray[Any], values: Bits, dtype: str) -> IndexStats:
    found = numbers(values, lookup(dtype))
    finite = found[np.isfinite(found)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
    ascending = bool(np.all(indices[1:] > indices[:-1]))
    return IndexStats(int(indices.min()), int(indices.max()), ascending, low, high)
