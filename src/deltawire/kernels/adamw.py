"""One AdamW step over whole models, and the log of what it changes in bf16.

The log keeps, for every element that changed since the log was last emptied, the bf16 bits it had then: each element
once, whatever it did since, in any order. What changed is then what is in the log and has other bits now: an element
that came back does not count, and several steps add up. Memory: a bit per element and 8 bytes per element that moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..core.change import Change, Region
from .host import fetched
from .plan import TILE, Ints
from .results import Changed

SCALARS = 7
"""Per tensor: lr · decay, beta1, beta2, √(bias correction 2), eps, lr / bias correction 1, sign of the gradient."""

LISTS = 4
"""Lists of tensors in a step: parameters, gradients, first and second moments."""

SPARE = 32
"""A log starts with room for one element in so many; it grows as it must."""


class Elements:
    """The elements of a list of tensors, cut into tiles along their memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        dtypes, devices = {t.dtype for t in tensors}, {t.device for t in tensors}
        if len(devices) != 1 or (dtypes - {torch.float32} and dtypes - {torch.bfloat16}):
            found = ", ".join(sorted(map(str, dtypes | devices)))
            raise ValueError(f"parameters must be all fp32 or all bf16, on one device; these are {found}")
        if not all(t.is_contiguous() for t in tensors):
            raise ValueError("parameters must be contiguous")
        self.device, self.bf16 = devices.pop(), torch.bfloat16 in dtypes
        self.sizes = [t.numel() for t in tensors]
        tiles = [-(-size // TILE) for size in self.sizes]
        self.first_tile = np.cumsum([0, *tiles])
        tensor = np.repeat(np.arange(len(tensors)), tiles)
        start = (np.arange(len(tensor)) - self.first_tile[tensor]) * TILE
        width = np.minimum(np.array(self.sizes, np.int64)[tensor] - start, TILE)
        self.tensor = tensor
        self.places = torch.from_numpy(np.stack([tensor, start, width], axis=1).astype(np.int64)).to(self.device)
        """int64 [tiles, 3]: tensor, first element, elements."""
        self._table: tuple[list[int], Tensor] = [], self.places

    def table(self, tensors: Sequence[Tensor]) -> Tensor:
        """Where tensors lie, as `Pointers.table` with nothing beside them; remembered, because they rarely move."""
        where = [*map(Tensor.data_ptr, tensors)]
        if where != self._table[0]:
            table = np.zeros((len(where), LISTS), np.int64)
            table[:, 0] = where
            self._table = where, torch.from_numpy(table).to(self.device)
        return self._table[1]

    @property
    def tiles(self) -> int:
        return len(self.tensor)

    @property
    def total(self) -> int:
        return sum(self.sizes)


class ChangeLog:
    """Changes since it was last emptied, with the bits from before. Filled by `adamw`."""

    def __init__(self, elements: Elements, ops: ModuleType) -> None:
        self.elements = elements
        self.seen: Tensor = ops.nothing_seen(elements)
        self.entries = torch.empty(max(1024, elements.total // SPARE), dtype=torch.int64, device=elements.device)
        """tile << 32 | position << 16 | old bits, in any order."""
        self.used = torch.zeros(2, dtype=torch.int64, device=elements.device)
        """Entries asked for; of those that found no room, the first."""
        self.late: Tensor | None = None
        """Which blocks wait for room, where kernels keep that."""
        self.count = 0
        self.empty()

    @property
    def nbytes(self) -> int:
        return self.seen.nbytes + self.entries.nbytes

    @property
    def has_room(self) -> bool:
        """Whether every element fits, so that no step can fill the log."""
        return self.entries.numel() >= self.elements.total

    def empty(self) -> None:
        self.seen.zero_()
        self.set_count(0)

    def set_count(self, count: int) -> None:
        self.count = count
        self.used[0] = count
        self.used[1] = 1 << 62

    def settle(self) -> bool:
        """Look how many entries there are (waits for the device). False if some found no room."""
        asked, cut = self.used.tolist()
        self.count = min(asked, cut)
        return bool(asked <= self.entries.numel())

    def grow(self, room: int) -> None:
        larger = torch.empty(min(room, self.elements.total), dtype=torch.int64, device=self.entries.device)
        larger[: self.count] = self.entries[: self.count]
        self.entries = larger
        self.set_count(self.count)

    def between(self, first: int, last: int) -> Tensor:
        """The entries of some tiles, in any order. Waits for the device."""
        self.settle()
        entries = self.entries[: self.count]
        return entries[(entries >= first << 32) & (entries < last << 32)]


class Pointers:
    """Where the tensors of a step lie: parameters, gradients, first and second moments. None is an address of 0."""

    def __init__(self, elements: Elements, lists: Sequence[Sequence[Tensor | None]]) -> None:
        columns = [[0 if t is None else t.data_ptr() for t in tensors] for tensors in lists]
        table = np.array(columns, np.int64).T.copy()
        self.table = torch.from_numpy(table).to(elements.device)
        """int64 [tensors, lists]"""
        wide = (table % 16 == 0).all(1) & (np.array(elements.sizes) % 8 == 0)
        # wide reads need aligned addresses, and tiles that end where a vector does
        numbers = ((aligned, np.flatnonzero((wide == aligned)[elements.tensor])) for aligned in (True, False))
        self.tiles = {
            aligned: torch.from_numpy(tiles.astype(np.int32)).to(elements.device)
            for aligned, tiles in numbers
            if tiles.size
        }


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step works on, one of each per tensor of the log's elements."""

    pointers: Pointers
    """Parameters, gradients (0: the parameter stays as it is), first and second moments."""
    scalars: Tensor
    """fp32 [tensors, SCALARS], on the device."""
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    """If it is not zero, the step does nothing."""


def step(elements: Elements, work: StepInputs, log: ChangeLog | None) -> None:
    """Take the step, with Triton. Waits for the device only where the log might have run out of room."""
    from . import triton_ops

    triton_ops.adamw(elements, work, log)
    while log is not None and not log.has_room and not log.settle():
        # some blocks were left alone because their changes could not be noted; they are stepped now
        log.grow(2 * int(log.used[0]))
        triton_ops.adamw(elements, work, log, again=True)


@dataclass(frozen=True, slots=True)
class Noted:
    """A moment of a log: its entries, and the bits their elements had then."""

    entries: Tensor
    new: Tensor
    """int16."""


def noted(elements: Elements, params: Sequence[Tensor], log: ChangeLog, ops: ModuleType) -> Noted:
    """All that must be seen before the next step. Waits for the device."""
    if log.has_room:
        log.settle()
    entries = log.entries[: log.count].clone()
    return Noted(entries, ops.gather_bf16(elements, params, entries))


def changes(elements: Elements, noted: Noted) -> Changed:
    """What was in the log and had other bits, tile after tile, row by row. Can take its time."""
    kept = noted.entries.to(torch.int16) != noted.new
    entries, order = torch.sort(noted.entries[kept])
    edges = torch.arange(elements.tiles + 1, device=entries.device) << 32
    parts = (entries >> 16, entries, noted.new[kept][order])
    return Changed(torch.searchsorted(entries, edges), *(part.to(torch.int16).view(torch.uint16) for part in parts))


def to_changes(
    elements: Elements, places: Mapping[str, tuple[int, int]], changed: Changed, regions: Sequence[Region]
) -> list[Change]:
    """What `changes` gave, on the host and in the core's terms, for regions (in one piece) of named tensors.

    A named tensor lies in one of the elements' tensors, its number and the element it begins with.
    """
    starts, positions, old, new = (fetched(t) for t in (changed.starts, changed.positions, changed.old, changed.new))
    if elements.device.type == "cuda":
        torch.cuda.current_stream(elements.device).synchronize()
    result = []
    edges = starts.numpy()
    for region in regions:
        number, begin = places[region.tensor.name]
        base = begin + region.start
        first, last = elements.first_tile[number : number + 2].tolist()
        tiles = slice(first + base // TILE, min(first + -(-(base + region.units) // TILE), last))
        here = slice(int(edges[tiles.start]), int(edges[tiles.stop]))
        flat = to_flat(edges[tiles.start : tiles.stop + 1] - here.start, positions.numpy()[here], tiles.start - first)
        inside = slice(*np.searchsorted(flat, (base, base + region.units)).tolist())
        at = (flat[inside] - base).astype(np.uint32)
        result.append(Change(region, at, old.numpy()[here][inside].copy(), new.numpy()[here][inside].copy()))
    return result


def to_flat(starts: Ints, positions: npt.NDArray[np.integer[Any]], first: int) -> Ints:
    """Positions in their tensor of changes in neighbouring tiles, of which the first is its tile number `first`."""
    return np.repeat((first + np.arange(starts.size - 1)) * TILE, np.diff(starts)) + positions
