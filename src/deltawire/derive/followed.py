"""A view of weights that move along deltas: only what a delta changed is converted again.

A change moves the scale of its block only if it is larger than the block's largest weight, or changes that one. Then
the block is read again, and if its scale did move, converted as a whole. All other work is per changed weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.change import Change, Region, compare, digest_shift
from ..core.compiled import njit
from ..core.digest import StateDigest
from ..core.dtypes import Bits
from ..core.full import Source
from ..core.state import State
from ..trainer.detectors import HostDetector
from ..views.blocks import SIDE, Blocks, Grid
from ..views.host import BlockView, block_maxima, geometry, to_e4m3, widened

Positions = npt.NDArray[np.int64]
"""Positions in a flattened tensor."""


class FollowedView(BlockView):
    """The view of a version in memory, which moves along deltas: `note` their changes, then `advance`."""

    source: State

    def __init__(self, source: State, blocks: Blocks) -> None:
        super().__init__(source, blocks)
        self._notes: dict[str, list[Change]] = {}
        self._stale = False
        """Whether all weights of the source were written since `advance`."""
        self._touched: dict[str, list[Positions]] = {}
        self._moved: set[int] = set()
        """Blocks whose scale moved."""
        self._everywhere = True
        """Whether anything may have changed since `changes_since`."""

    def note(self, changes: Sequence[Change] | None) -> None:
        """Note changes that were written to the source; None: everything may have changed."""
        self._stale = self._stale or changes is None
        for change in changes or ():
            if change.count:
                self._notes.setdefault(change.region.tensor.name, []).append(change)

    def advance(self) -> None:
        """Bring the scales up to date with the source."""
        notes, before, self._notes = self._notes, self.scales, {}
        if self._stale:
            self.maxima = self._find_maxima()
            self._everywhere, self._stale = True, False
        else:
            for name, changes in notes.items():
                if name in self.blocks.grids:
                    self._find_maxima_again(self.blocks.grids[name], changes)
                self._touched.setdefault(name, []).extend(map(_flat, changes))
        self.scale()
        self._moved.update(np.flatnonzero(self.scales.view(np.uint32) != before.view(np.uint32)).tolist())

    def compare_all(self) -> None:
        """Let `changes_since` return None once: what it returned last may have been lost."""
        self._everywhere = True

    def changes_since(self, before: State) -> dict[str, tuple[Positions, Bits]] | None:
        """Return where the view may differ from `before`, its state at the last call: positions and bits, by tensor.

        Positions ascend. None: it may differ anywhere.
        """
        touched, blocks, everywhere = self._touched, np.sort([*self._moved]).astype(np.int64), self._everywhere
        self._touched, self._moved, self._everywhere = {}, set(), False
        if everywhere:
            return None
        found: dict[str, tuple[Positions, Bits]] = {}
        for name, parts in touched.items():
            grid = self.blocks.grids.get(name)
            if grid is None:
                positions = _merged(parts)
                found[name] = positions, self.source.bits(name)[positions]
                continue
            first, last = np.searchsorted(blocks, (grid.span.start, grid.span.stop))
            own = blocks[first:last] - grid.first
            if own.size:
                found[grid.scales.name] = own, self.scales[grid.span].view(np.uint32)[own]
            # a scale moves only with a weight of its block
            positions = _merged([*parts, *(self._moved_in(grid, int(b), before) for b in own)])
            found[name] = positions, self._codes(grid, positions)
        return found

    def _find_maxima_again(self, grid: Grid, changes: Sequence[Change]) -> None:
        """Compute the maxima of a tensor's blocks after these changes."""
        doubtful = np.zeros(grid.span.stop - grid.span.start, np.bool_)
        for change in changes:
            (old, shift), (new, _) = (widened(bits, grid.tensor.dtype) for bits in (change.old, change.new))
            columns = grid.tensor.columns
            _doubt(_flat(change), old, new, shift, columns, *geometry(grid), self.maxima, doubtful)
        for block in np.flatnonzero(doubtful):
            region = _block(grid, int(block))
            bits, shift = self._read(region)
            self.maxima[grid.first + block] = 0
            block_maxima(bits, shift, region.columns, region.row, region.column, *geometry(grid), self.maxima)

    def _moved_in(self, grid: Grid, block: int, before: State) -> Positions:
        """Positions of the weights of a block that differ from `before`."""
        r = _block(grid, block)
        region = Region(grid.weights, r.row, r.rows, r.column, r.columns)
        return _flat(compare(region, before.region(region), self.region(region)))

    def _codes(self, grid: Grid, positions: Positions) -> Bits:
        bits, shift = widened(self.source.bits(grid.tensor.name)[positions], grid.tensor.dtype)
        codes = np.empty(positions.size, np.uint8)
        _quantize_at(positions, bits, shift, grid.tensor.columns, *geometry(grid), self.inverse, codes)
        return codes


class ViewDetector(HostDetector):
    """Asks a view what may have changed instead of comparing all of it."""

    def _differences(self, source: Source) -> Iterable[tuple[list[Change], StateDigest]]:
        found = source.changes_since(self.state) if isinstance(source, FollowedView) else None
        if found is None or not all(region.contiguous for block in self.plan for region in block):
            return super()._differences(source)
        return self._changed(found)

    def _changed(self, found: dict[str, tuple[Positions, Bits]]) -> Iterator[tuple[list[Change], StateDigest]]:
        nothing = np.empty(0, np.int64), np.empty(0, np.uint8)
        for block in self.plan:
            changes = []
            for region in block:
                positions, new = found.get(region.tensor.name, nothing)
                first, last = np.searchsorted(positions, (region.start, region.start + region.units))
                here, new = positions[first:last], new[first:last]
                old = self.state.bits(region.tensor.name)[here]
                differs = old != new
                offsets = (here[differs] - region.start).astype(np.uint32)
                changes.append(Change(region, offsets, old[differs], new[differs].astype(old.dtype)))
            yield changes, digest_shift(changes)


def _flat(change: Change) -> Positions:
    """Positions of a change in its flattened tensor."""
    base, width, stride = change.region.geometry
    local = change.positions.astype(np.int64)
    return base + local if width == stride else base + local // width * stride + local % width


def _merged(parts: Sequence[Positions]) -> Positions:
    """Positions that are in any of several ascending lists, ascending."""
    every = np.concatenate(parts)
    # as a rule nearly sorted, which a stable sort makes use of
    every.sort(kind="stable")
    first = np.ones(every.size, np.bool_)
    np.not_equal(every[1:], every[:-1], out=first[1:])
    return every[first]


def _block(grid: Grid, block: int) -> Region:
    """A block of a tensor as a region."""
    row, column = divmod(block, grid.across)
    matrix, row = divmod(row, grid.down)
    rows = min(SIDE, grid.height - row * SIDE)
    columns = min(SIDE, grid.tensor.shape[-1] - column * SIDE)
    return Region(grid.tensor, matrix * grid.height + row * SIDE, rows, column * SIDE, columns)


@njit(cache=True, nogil=True)
def _block_at(position: Any, columns: int, height: int, down: int, across: int) -> Any:
    """Number of the block of a position, within its tensor."""
    row, column = position // columns, position % columns
    return (row // height * down + row % height // SIDE) * across + column // SIDE


@njit(cache=True, nogil=True)
def _doubt(
    positions: Any, old: Any, new: Any, shift: int, columns: int, height: int, down: int, across: int, first: int,
    maxima: Any, doubtful: Any,
) -> None:  # fmt: skip
    """Mark blocks whose largest weight may be another one now."""
    size = np.uint32(0x7FFFFFFF)
    for i in range(positions.size):
        block = _block_at(positions[i], columns, height, down, across)
        largest = maxima[first + block]
        was, now = (np.uint32(old[i]) << np.uint32(shift)) & size, (np.uint32(new[i]) << np.uint32(shift)) & size
        if now > largest or (was == largest and now != was):
            doubtful[block] = True


@njit(cache=True, nogil=True)
def _quantize_at(
    positions: Any, bits: Any, shift: int, columns: int, height: int, down: int, across: int, first: int, inverse: Any,
    codes: Any,
) -> None:  # fmt: skip
    """e4m3 weights of single positions."""
    wide, shifted = np.empty(positions.size, np.uint32), np.empty(positions.size, np.float32)
    products = wide.view(np.float32)
    for i in range(positions.size):
        wide[i] = np.uint32(bits[i]) << np.uint32(shift)
        products[i] *= inverse[first + _block_at(positions[i], columns, height, down, across)]
    to_e4m3(products, shifted, codes)
