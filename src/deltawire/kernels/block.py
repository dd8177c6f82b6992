"""Old weights of a block on a device, for an encoder on the host: counted and ranked there, and only that comes back.

The twin of `core.codecs.context.old_weights.HostBlock`: the same counts, so the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..core.change import Change, Region, join
from ..core.codecs.context.classes import Table
from ..core.codecs.context.old_weights import Counts, RankedChanges, RegionChanges
from ..core.codecs.context.tiles import LevelBytes, walked
from ..core.dtypes import Bits
from .host import fetched, wait
from .plan import Plan, Remember, grid
from .results import rules as make_rules

_APART = 16
"""Regions begin at multiples of so many units, where wide reads are allowed."""

_plans = Remember(1024)


class DeviceBlock:
    """A copy of regions on their device. `undo` takes it back to the weights that a change was taken from.

    regions   of one dtype, in one piece each
    read      the flat units of a region, on the device
    copying   entered around the copy
    counting  entered around all other work, which comes after the copy
    """

    def __init__(
        self,
        regions: Sequence[Region],
        read: Callable[[Region], Tensor],
        copying: Callable[[], AbstractContextManager[Any]] = nullcontext,
        counting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._shapes = [walked(region.rows, region.columns) for region in regions]
        sizes = np.array([region.units for region in regions], np.int64)
        spaces = -sizes % _APART
        ends = np.cumsum(sizes + spaces)
        self._starts = ends - spaces - sizes
        self._counting = counting
        self._placed: tuple[list[Change], Tensor] = [], torch.empty(0)
        with copying():
            parts = [read(region) for region in regions]
            self._units = torch.empty(int(ends[-1]), dtype=parts[0].dtype, device=parts[0].device)
            # few calls: each releases the interpreter's lock, which other encoders are waiting for
            places = self._units.split_with_sizes(np.stack([sizes, spaces], 1).reshape(-1).tolist())
            torch._foreach_copy_(places[::2], parts)

    def undo(self, changes: Sequence[Change]) -> None:
        """Put old bits back; one change per region."""
        self._put(self._units, changes, join([change.old for change in changes]))

    def exponents(self, shift: int, mask: int, every: Sequence[int]) -> Counts:
        from . import exponents

        with self._counting():
            places = zip(self._starts.tolist(), self._shapes, every, strict=True)
            samples = [(start, *shape, step) for start, shape, step in places]
            return exponents(self._units, samples, shift, mask).cpu().numpy().astype(np.int64)

    def by_row(self, number: int, rule: Table, plus: LevelBytes, kinds: int) -> npt.NDArray[np.float32]:
        with self._counting():
            found = self._likelihood(self._matrix(number), rule) + self._sent(plus.astype(np.int16))[None, :]
            return _count(found.clamp(max=kinds - 1), 1, kinds)

    def by_column(self, number: int, rule: Table, plus: Counts, kinds: int) -> npt.NDArray[np.float32]:
        every = max(1, min(8, len(plus) // 512))
        with self._counting():
            there = self._sent(plus.astype(np.int16))[::every, None]
            found = self._likelihood(self._matrix(number)[::every], rule) + there
            return every * _count(torch.where(there < 0, kinds, found.clamp(max=kinds - 1)), 0, kinds)

    def ranks(self, regions: Sequence[RegionChanges], rules: Sequence[Table]) -> RankedChanges:
        from . import class_ranks, detect

        changes, plan = [region.change for region in regions], self._plan([region.grid for region in regions])
        levels = [(region.row_levels, region.column_levels) for region in regions]
        with self._counting():
            # comparing is how positions get into the order of the tiles
            new = self._units.clone()
        self._put(new, changes, join([change.new for change in changes]))
        with self._counting():
            changed = detect([self._units], [new], plan=plan)
            if changed.count != sum(change.count for change in changes):
                raise RuntimeError("these are not the weights that the change was taken from")
            found = class_ranks([self._units], plan, make_rules(plan, rules, levels), changed)
            fetching = [fetched(part) for part in (found.sizes, found.counts, found.ranks, found.steps)]
            wait(self._units.device)
        self._units, self._placed = self._units.new_empty(0), ([], torch.empty(0))
        n, k = (counted.numpy().astype(np.int64) for counted in fetching[:2])
        ranks, steps = (each.numpy().astype(np.uint32) for each in fetching[2:])
        return n, k, ranks, steps

    def _plan(self, grids: Sequence[tuple[int, int]]) -> Plan:
        def make() -> Plan:
            places = zip(self._starts.tolist(), self._shapes, grids, strict=True)
            return Plan([self._units], [grid(0, start, shape[1], shape, cut) for start, shape, cut in places])

        return _plans.get((self._units.device, self._units.dtype, tuple(self._shapes), tuple(grids)), make)

    def _matrix(self, number: int) -> Tensor:
        rows, columns = self._shapes[number]
        start = int(self._starts[number])
        return self._units[start : start + rows * columns].view(rows, columns)

    def _likelihood(self, units: Tensor, rule: Table) -> Tensor:
        """Steps from the least likely exponent, int16."""
        shift, mask, low, top = (int(value) for value in rule[:4])
        return top - (units >> shift).bitwise_and_(mask).to(torch.int16).clamp_(low, top)

    def _put(self, units: Tensor, changes: Sequence[Change], values: Bits) -> None:
        signed = values.view(f"i{values.itemsize}") if values.itemsize > 1 else values
        with self._counting():
            units[self._places(changes)] = self._sent(signed)

    def _places(self, changes: Sequence[Change]) -> Tensor:
        """Where changes lie in the copy. Those that are undone first are ranked last: they are sent once."""
        known, where = self._placed
        if len(known) != len(changes) or any(a is not b for a, b in zip(known, changes, strict=True)):
            positions = join([change.positions for change in changes])
            first, counts = self._sent(np.stack([self._starts, [change.count for change in changes]]))
            starts = first.repeat_interleave(counts, output_size=positions.size)
            where = self._sent(positions.view(np.int32)) + starts
            self._placed = [*changes], where
        return where

    def _sent(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._units.device)


def _count(found: Tensor, axis: int, kinds: int) -> npt.NDArray[np.float32]:
    """How often each number below `kinds` occurs along an axis: [lines, kinds]."""
    found = found.to(torch.uint8)
    counts = [(found == kind).sum(axis, dtype=torch.int32) for kind in range(kinds)]
    return torch.stack(counts, 1).to(torch.float32).cpu().numpy()
