"""How a model is cut into tiles, so that a kernel covers hundreds of tensors in one launch.

A program of a kernel owns a *tile*: some rows of some columns of one tensor, which it addresses from the tile's first
unit. The cut depends on shapes alone and is made once; where the tensors lie in memory is looked up per call and
remembered, because a model rarely moves.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..core.codecs.context.tiles import cuts

TILE = 1 << 16
"""Units of a flat tile: positions in it fit 16 bits, and a model of any size makes enough of them to fill a GPU."""

VECTOR_BYTES = 16
"""Bytes that a thread of a GPU reads at once where addresses allow."""

_UNITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_REMEMBERED = 8

Ints = npt.NDArray[np.int64]
T = TypeVar("T")


def unit_bytes(tensor: Tensor) -> int:
    """Bytes of the integers a tensor is compared in: an 8-byte dtype is pairs of 4-byte units."""
    return min(tensor.dtype.itemsize, 4)


def units(tensor: Tensor, size: int | None = None) -> Tensor:
    """The flat bits of a contiguous tensor. Signed where torch can do little with the unsigned dtype of that width."""
    flat = tensor.detach().reshape(-1)
    # a single element is contiguous whatever its stride, and torch views only strides of 1 in another width
    return flat.as_strided(flat.shape, (1,)).view(_SIGNED[size or unit_bytes(tensor)])


def widen(bits: Tensor) -> Tensor:
    """Units of any width, whose bits are those of unsigned numbers, as plain integers to compute with."""
    size = bits.dtype.itemsize
    return bits.view(_SIGNED[size]).to(torch.int64) & ((1 << 8 * size) - 1)


def narrow(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The low bits of integers, as unsigned units."""
    return values.to(_SIGNED[dtype.itemsize]).view(dtype)


@dataclass(frozen=True, slots=True)
class Segment:
    """A rectangle of one tensor and the lines along which it is cut into tiles."""

    tensor: int
    """Its place in the list of tensors."""
    offset: int
    """Units of the tensor before the rectangle's first."""
    stride: int
    """Units from one of its rows to the next."""
    row_cuts: Ints
    """Row numbers: 0, …, rows."""
    column_cuts: Ints
    """Column numbers: 0, …, columns."""

    @property
    def rows(self) -> int:
        return int(self.row_cuts[-1])

    @property
    def columns(self) -> int:
        return int(self.column_cuts[-1])

    @property
    def tiles(self) -> int:
        return (len(self.row_cuts) - 1) * (len(self.column_cuts) - 1) if self.rows * self.columns else 0


def flat(tensors: Sequence[Tensor], tile: int = TILE, unit: int = 4) -> tuple[Segment, ...]:
    """One segment per tensor that is not empty, cut along its memory; units of at most `unit` bytes."""
    result = []
    for number, tensor in enumerate(tensors):
        total = tensor.numel() * tensor.dtype.itemsize // min(unit_bytes(tensor), unit)
        if total:
            lines = np.append(np.arange(0, total, tile), total)
            result.append(Segment(number, 0, total, np.array([0, 1]), lines))
    return tuple(result)


def stretch(segments: Sequence[Segment], first: int, last: int) -> tuple[Segment, ...]:
    """Tiles [first:last] of segments that `flat` has made."""
    result, at = [], 0
    for segment in segments:
        begin, end = max(first - at, 0), min(last - at, segment.tiles)
        at += segment.tiles
        if begin < end:
            lines = segment.column_cuts[begin : end + 1]
            offset = segment.offset + int(lines[0])
            result.append(Segment(segment.tensor, offset, segment.stride, segment.row_cuts, lines - lines[0]))
    return tuple(result)


def grid(tensor: int, offset: int, stride: int, shape: tuple[int, int], tiles: tuple[int, int]) -> Segment:
    """A rectangle cut evenly, where shards have their lines too."""
    return Segment(tensor, offset, stride, cuts(shape[0], tiles[0]), cuts(shape[1], tiles[1]))


class Remember:
    """The last few results of something worth making once. Any thread may ask."""

    def __init__(self, size: int = _REMEMBERED) -> None:
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._size = size
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]  # type: ignore[no-any-return]
        made = make()
        with self._lock:
            self._kept[key] = made
            if len(self._kept) > self._size:
                self._kept.popitem(last=False)
        return made


@dataclass(frozen=True, slots=True)
class Launch:
    """Tiles that one kernel launch covers: alike in unit width, and in whether wide reads are allowed."""

    tiles: Tensor
    """Their numbers in the plan."""
    count: int
    unit: int
    """Bytes of a unit."""
    aligned: bool
    addresses: tuple[Tensor, ...]
    """Per list of tensors, where every tile (of the whole plan) begins."""


class Plan:
    """The tiles of a list of tensors, in order: segment by segment, row of tiles by row of tiles."""

    def __init__(self, tensors: Sequence[Tensor], segments: Sequence[Segment], unit: int = 4) -> None:
        self.device = common_device(tensors)
        self.segments = tuple(segments)
        sizes = [min(unit_bytes(t), unit) for t in tensors]
        self.totals = [t.nbytes // size for t, size in zip(tensors, sizes, strict=True)]
        self.first_tile = np.cumsum([0, *(s.tiles for s in self.segments)])
        self._memory = Remember()
        parts = [_tiles(s) for s in self.segments if s.tiles]
        columns = np.concatenate(parts, axis=1) if parts else np.zeros((5, 0), np.int64)
        self.tensor, self.offset, self.rows, self.width, self.stride = columns
        self.unit = np.array(sizes or [1], np.int64)[self.tensor]

    @property
    def tiles(self) -> int:
        return len(self.offset)

    @cached_property
    def value_dtype(self) -> torch.dtype:
        """Holds the bits of any unit of the plan; a model of one dtype pays for nothing else."""
        return _UNITS[int(self.unit.max(initial=1))]

    @cached_property
    def position_dtype(self) -> torch.dtype:
        """Holds any position within a tile."""
        return torch.uint16 if int((self.rows * self.width).max(initial=1)) <= 1 << 16 else torch.uint32

    @cached_property
    def geometry(self) -> Tensor:
        """Rows, width, stride and offset of each tile, on the device."""
        return torch.from_numpy(np.stack([self.rows, self.width, self.stride, self.offset], axis=1)).to(self.device)

    def chunks(self, chunk: int) -> int:
        """The most pieces of `chunk` units, each within a row, that a tile has."""
        return int((self.rows * -(-self.width // chunk)).max(initial=1))

    def launches(self, *lists: Sequence[Tensor]) -> list[Launch]:
        """The launches for these tensors. The lists lie alike: a tile has the same offset, in units, in each."""
        # a model has hundreds of tensors and this runs in every call: a map takes half as long as a generator
        key = tuple(tuple(map(Tensor.data_ptr, tensors)) for tensors in lists)
        if not all(all(map(Tensor.is_contiguous, tensors)) for tensors in lists):
            common_device([t for tensors in lists for t in tensors])
        return self._memory.get(("launches", key), lambda: self._launches(lists))

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        return self._memory.get(key, make)

    def _launches(self, lists: tuple[Sequence[Tensor], ...]) -> list[Launch]:
        addresses, aligned = [], self.width * self.unit % VECTOR_BYTES == 0
        for tensors in lists:
            # bytes per unit of the plan: four in an fp32 master, two in its bf16 copy
            size = np.array(self._bytes_per_unit(tensors) or [1], np.int64)[self.tensor]
            start = np.array([t.data_ptr() for t in tensors] or [0], np.int64)[self.tensor] + self.offset * size
            aligned &= (start % VECTOR_BYTES == 0) & ((self.stride * size % VECTOR_BYTES == 0) | (self.rows == 1))
            addresses.append(torch.from_numpy(start).to(self.device))
        result = []
        for unit in np.unique(self.unit):
            for wide in (True, False):
                ids = np.flatnonzero((self.unit == unit) & (aligned == wide))
                if len(ids):
                    numbers = torch.from_numpy(ids.astype(np.int32)).to(self.device)
                    result.append(Launch(numbers, len(ids), int(unit), wide, tuple(addresses)))
        return result

    def _bytes_per_unit(self, tensors: Sequence[Tensor]) -> list[int]:
        if common_device(tensors) != self.device or len(tensors) != len(self.totals):
            raise ValueError(
                f"the plan is for {len(self.totals)} tensors on {self.device}, not for these {len(tensors)}"
            )
        for number, (tensor, total) in enumerate(zip(tensors, self.totals, strict=True)):
            if tensor.nbytes % max(total, 1) or (total == 0) != (tensor.nbytes == 0):
                raise ValueError(f"tensor {number} has {tensor.nbytes} bytes where the plan has {total} units")
        return [t.nbytes // max(total, 1) for t, total in zip(tensors, self.totals, strict=True)]


_plans = Remember()


def flat_plan(tensors: Sequence[Tensor], *, unit: int = 4) -> Plan:
    """The plan of whole tensors in the order of their memory; made once per list of shapes."""
    device = tensors[0].device if tensors else None
    key = (unit, device, tuple(map(Tensor.numel, tensors)), tuple([t.dtype for t in tensors]))
    return _plans.get(key, lambda: Plan(tensors, flat(tensors, TILE, unit), unit))


def common_device(tensors: Sequence[Tensor]) -> torch.device:
    """The device all tensors lie on; refuses what kernels cannot address."""
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        raise ValueError(f"the tensors lie on {len(devices)} devices: {', '.join(sorted(map(str, devices)))}")
    for number, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            raise ValueError(f"tensor {number} of shape {tuple(tensor.shape)} is not contiguous; pass a contiguous one")
    return devices.pop() if devices else torch.device("cpu")


def _tiles(segment: Segment) -> Ints:
    """Per tile of a segment: tensor, offset, rows, width, stride."""
    down, across = len(segment.row_cuts) - 1, len(segment.column_cuts) - 1
    row, column = (a.reshape(-1) for a in np.meshgrid(np.arange(down), np.arange(across), indexing="ij"))
    offset = segment.offset + segment.row_cuts[row] * segment.stride + segment.column_cuts[column]
    rows, widths = np.diff(segment.row_cuts)[row], np.diff(segment.column_cuts)[column]
    return np.stack([np.full_like(row, segment.tensor), offset, rows, widths, np.full_like(row, segment.stride)])
