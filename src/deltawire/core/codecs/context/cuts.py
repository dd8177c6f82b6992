"""Where a block is cut into parts that are coded apart, so that a reader of some rows or columns needs some of them.

Engines cut most tensors by rows, and those whose output they add up by columns. A large tensor has blocks of bands of
rows already: these are cut by columns. Blocks of whole tensors are cut into halves both ways, all their tensors at the
same place. A tensor whose tiles do not allow that stays in one piece, in the first part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...change import Change, Region
from .tiles import grid_of, walked

PART_UNITS = 1 << 21
"""Units of a part, at least: smaller ones cost more than a percent of the bytes."""

MOST_PARTS = 8
"""Parts of a block: each takes time of its own."""

Cut = tuple[int, int]
"""Number of parts down and across."""

UNCUT: Cut = (1, 1)


@dataclass(frozen=True, slots=True)
class BlockCut:
    """How a block is cut: into groups of its regions, and the regions of each group down and across."""

    groups: int
    cut: Cut

    def group(self, before: int, units: int) -> int:
        """The group of a region that begins after so many of the block's units."""
        return before * self.groups // max(units, 1)


def cut_of(regions: Sequence[Region]) -> BlockCut:
    units = sum(region.units for region in regions)
    count = min(_power_of_two(units // PART_UNITS), MOST_PARTS)
    if any(region.rows < region.tensor.rows for region in regions):
        return BlockCut(1, (1, count))
    groups = _power_of_two(min(len(regions), count // 4))
    down = min(count // groups, 4 if count // groups > 4 else 2)
    return BlockCut(groups, (down, count // groups // down))


def _power_of_two(count: int) -> int:
    """The largest that is not larger; at least 1."""
    return 1 << max(count.bit_length() - 1, 0)


def cut_within(region: Region, grid: tuple[int, int], cut: Cut) -> Cut:
    """How one region of the block, with this grid of tiles, is cut: on lines of its tiles, perhaps less often."""
    if walked(region.rows, region.columns) != (region.rows, region.columns):
        return UNCUT
    return _dividing(region.rows, grid[0], cut[0]), _dividing(region.columns, grid[1], cut[1])


def _dividing(length: int, tiles: int, count: int) -> int:
    while length % count or tiles % count:
        count //= 2
    return count


def part_of(region: Region, cut: Cut, row: int, column: int) -> Region:
    """A part of a region that is cut so."""
    rows, columns = region.rows // cut[0], region.columns // cut[1]
    return Region(region.tensor, region.row + row * rows, rows, region.column + column * columns, columns)


def counted(changes: Sequence[Change]) -> list[tuple[Region, int]]:
    """The regions of changes, and how many each has."""
    return [(change.region, change.count) for change in changes]


def by_rows(changes: Sequence[Change]) -> list[list[Change]]:
    """The changes of a block in halves of rows; parts and regions without changes are left out.

    Not by columns: whoever reads a part without the weights would have to sort the positions of all again.
    """
    down = min(cut_of([change.region for change in changes]).cut[0], 2)
    if down == 1:
        return [list(changes)]
    parts: list[list[Change]] = [[] for _ in range(down)]
    for change in changes:
        grid = grid_of(*walked(change.region.rows, change.region.columns))
        cut = cut_within(change.region, grid, (down, 1))
        units = change.region.units // cut[0]
        ends = np.searchsorted(change.positions, [units * (i + 1) for i in range(cut[0])]).tolist()
        for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if start < end:
                region, here = part_of(change.region, cut, i, 0), slice(start, end)
                positions = change.positions[here] - np.uint32(units * i)
                parts[i].append(Change(region, positions, change.old[here], change.new[here]))
    return [part for part in parts if part]
