"""Describe weights tensor by tensor: what a safetensors file contains, and how two versions differ.

A file may be of deltawire or of another tool. Its reader is tolerant where the readers of a run are strict: metadata
may be missing or odd, indices in any order. Versions are compared a few megabytes at a time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from . import container
from .change import pieces, whole
from .codecs import packed, raw
from .container import Read
from .dtypes import Bits, lookup, numbers
from .full import Source
from .schema import TensorSpec
from .sparse import INDEX, DeltaFile
from .ulps import Histogram, in_ulps, unzigzag

_INDEX_TYPES = {"I32": np.int32, "I64": np.int64, "U32": np.uint32, "U64": np.uint64}
_PIECE = 1 << 20
"""Units compared at a time."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A tensor of the model, as far as a file holds it. See `tensor_changes` and `FileContents`.

    {part.name: part.changed for part in parts}
    """

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


class FileContents:
    """An opened safetensors file, of deltawire or another tool. Only its header is read until more is asked for.

    for part in dw.FileContents.open("model.safetensors").parts():
        print(part.name, part.dtype, part.shape)
    """

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

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> FileContents:
        """Open a file on this machine."""
        return cls(*container.open_file(path))

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

    def steps(self) -> Histogram | None:
        """Step sizes; None where they need the base version: only blocks in `packed` store them. Reads all of it."""
        histogram = Histogram()
        delta = self._delta
        if delta is None:
            return None if self._pairs else histogram
        for block in delta.blocks:
            stored = block.record is not None and block.record.encoding == packed.name
            found = delta.read(block) if stored else None
            if not isinstance(found, list):
                return None
            for moves in found:
                histogram.add(unzigzag(moves.values))
        return histogram

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
            nbytes[tensor] = (
                known + (sum(item.nbytes for item in block.items) if number == 0 else 0)
                if alone and known is not None
                else None
            )
    return [TensorPart(t.name, t.dtype, t.shape, count, nbytes[t]) for t, count in changed.items()]


def _stats(indices: npt.NDArray[Any], values: Bits, dtype: str) -> IndexStats:
    found = numbers(values, lookup(dtype))
    finite = found[np.isfinite(found)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
    ascending = bool(np.all(indices[1:] > indices[:-1]))
    return IndexStats(int(indices.min()), int(indices.max()), ascending, low, high)


@dataclass(slots=True)
class TensorDifference:
    """The changes in one tensor, as `difference` finds it.

    print(found.name, found.changed, found.max_ulps, found.norm)
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    changed: int = 0
    """Elements with other bits."""
    max_ulps: int | None = None
    """The largest step, in representable values; None where steps cannot be counted (8-byte dtypes) or none was."""
    mean_ulps: float | None = None
    """The mean size of a step, of those that changed."""
    norm: float = 0.0
    """Euclidean norm of new − old, over the elements that are finite in both."""
    old_norm: float = 0.0
    """Euclidean norm of old, over its finite elements."""
    not_finite: int = 0
    """Changed elements that are NaN or infinite on either side."""
    histogram: Histogram = field(default_factory=Histogram)

    @property
    def relative(self) -> float | None:
        """The norm of the difference as a share of the old one's; None where that is zero."""
        return self.norm / self.old_norm if self.old_norm else None


def difference(tensor: TensorSpec, old: Source, new: Source) -> TensorDifference:
    """Compare the bits of a tensor that both have with this dtype and shape.

    old, new = dw.checkout(run, 40), dw.Checkpoint("step-100")
    found = dw.difference(run.schema.tensors[0], old, new)
    print(found.name, found.changed, found.norm)
    """
    dtype = lookup(tensor.dtype)
    result = TensorDifference(tensor.name, tensor.dtype, tensor.shape, tensor.elements)
    squares = before = ulps = 0.0
    for region in pieces(whole(tensor), _PIECE):
        was, now = (np.ascontiguousarray(source.region(region)).reshape(-1) for source in (old, new))
        values = numbers(was, dtype)
        before += _squares(values)
        differ = (was != now).reshape(-1, dtype.units_per_element).any(axis=1)
        if not differ.any():
            continue
        result.changed += int(differ.sum())
        # infinities and NaNs of weights that went wrong
        with np.errstate(invalid="ignore", over="ignore"):
            moved = numbers(now, dtype)[differ] - values[differ]
        finite = np.isfinite(moved)
        result.not_finite += int(moved.size - finite.sum())
        squares += _squares(moved[finite])
        if dtype.units_per_element == 1:
            steps = in_ulps(was[differ], now[differ], dtype)
            sizes = np.abs(steps)
            result.histogram.add(steps)
            result.max_ulps = max(result.max_ulps or 0, int(sizes.max()))
            ulps += float(sizes.sum(dtype=np.float64))
    result.norm, result.old_norm = squares**0.5, before**0.5
    result.mean_ulps = ulps / result.changed if result.max_ulps is not None else None
    return result


def _squares(values: npt.NDArray[Any]) -> float:
    size = np.abs(values[np.isfinite(values)]).astype(np.float64)
    return float(np.dot(size, size))
