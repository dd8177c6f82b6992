"""The old weights of a block, counted and ranked by class: in host memory here, on a device in `kernels/block.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ...change import Change, Region
from ...compiled import njit
from ..base import Before
from .classes import (
    CHUNK,
    CLASSES,
    SPARE,
    Table,
    classify_tile,
    exponent_histogram,
    rank_tile,
    weights_by_column,
    weights_by_row,
)
from .head import COLUMN_LEVELS, ROW_LEVELS
from .tiles import LevelBytes, Matrix, cuts, padded, walked, widest

Counts = npt.NDArray[np.int64]
RankedChanges = tuple[Counts, Counts, npt.NDArray[np.uint32], npt.NDArray[np.uint32]]
"""Counts of weights and of changed weights per tile and class, then the rank and the zigzagged step of each change.

Regions follow each other; changes are in order of tiles, then of classes."""


@dataclass(slots=True)
class RegionChanges:
    """The changes of one region and what the encoder chose for them, in the shape in which it is walked."""

    change: Change
    rows: int
    columns: int
    positions: npt.NDArray[np.uint32]
    zigzags: npt.NDArray[np.uint32]
    """Step of each change."""
    exponents: npt.NDArray[np.uint8]
    """Old exponent of each weight that changed."""
    grid: tuple[int, int]
    """Tiles down and across."""
    scatter: tuple[bool, bool]
    """Whether rows, and columns, change more or less often than others."""
    row_levels: LevelBytes | None = None
    """None where all rows are neutral."""
    column_levels: LevelBytes | None = None

    @property
    def tiles(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def every(self) -> int:
        """Every so many rows, one is read to estimate how many weights have each exponent."""
        return max(1, min(16, self.rows // 64))

    @property
    def flags(self) -> int:
        return ROW_LEVELS * (self.row_levels is not None) + COLUMN_LEVELS * (self.column_levels is not None)


class OldBlock(Protocol):
    """Old weights of regions, seen as matrices in the shapes they are walked in. All counts are exact."""

    def exponents(self, shift: int, mask: int, every: Sequence[int]) -> Counts:
        """[regions, 256]: weights with each exponent in every `every`-th row."""
        ...

    def by_row(self, number: int, rule: Table, plus: LevelBytes, kinds: int) -> npt.NDArray[np.float32]:
        """[rows, kinds]: weights of each likelihood in each row, where columns add `plus`."""
        ...

    def by_column(self, number: int, rule: Table, plus: Counts, kinds: int) -> npt.NDArray[np.float32]:
        """[columns, kinds]: the same of columns, from a sample of the rows; `plus` is below zero in dead ones."""
        ...

    def ranks(self, regions: Sequence[RegionChanges], rules: Sequence[Table]) -> RankedChanges:
        """Changes of all regions within their tiles, by a rule for each. The last call: memory may be given back."""
        ...


@runtime_checkable
class CountedBefore(Protocol):
    """A `Before` whose weights may be on a device, where they are counted."""

    def block(self, regions: Sequence[Region]) -> OldBlock | None:
        """None where they are in host memory, or cannot be counted where they are."""
        ...


class HostBlock:
    """Old weights in host memory."""

    def __init__(self, changes: Sequence[Change], before: Before) -> None:
        self._old = []
        for region in (change.region for change in changes):
            self._old.append(Matrix.over(before(region).reshape(walked(region.rows, region.columns))))

    def exponents(self, shift: int, mask: int, every: Sequence[int]) -> Counts:
        seen = np.zeros((len(self._old), 256), np.int64)
        for old, step, out in zip(self._old, every, seen, strict=True):
            exponent_histogram(old.units, old.size, old.stride, old.rows, old.columns, shift, mask, step, out)
        return seen

    def by_row(self, number: int, rule: Table, plus: LevelBytes, kinds: int) -> npt.NDArray[np.float32]:
        old = self._old[number]
        seen = np.zeros((old.rows, kinds), np.float32)
        reach = np.concatenate([plus, np.zeros(CHUNK, np.uint8)])
        weights_by_row(old.units, old.size, old.stride, old.rows, old.columns, rule, reach, seen)
        return seen

    def by_column(self, number: int, rule: Table, plus: Counts, kinds: int) -> npt.NDArray[np.float32]:
        old = self._old[number]
        seen = np.zeros((old.columns, kinds), np.float32)
        weights_by_column(old.units, old.size, old.stride, old.rows, old.columns, rule, plus, seen)
        return seen

    def ranks(self, regions: Sequence[RegionChanges], rules: Sequence[Table]) -> RankedChanges:
        tiles = np.cumsum([0, *(region.tiles for region in regions)]).tolist()
        ends = np.cumsum([0, *(region.positions.size for region in regions)]).tolist()
        n, k = (np.zeros((tiles[-1], CLASSES), np.int64) for _ in range(2))
        ranks, found = np.empty(ends[-1], np.uint32), np.empty(ends[-1], np.uint32)
        for number, (old, region, rule) in enumerate(zip(self._old, regions, rules, strict=True)):
            own, here = slice(*tiles[number : number + 2]), slice(*ends[number : number + 2])
            lines = cuts(old.rows, region.grid[0]), cuts(old.columns, region.grid[1])
            lined = padded(region.row_levels, region.column_levels, (old.rows, old.columns))
            source = np.empty(region.positions.size, np.uint32)
            counted = n[own], k[own], ranks[here], source
            _segment_ranks(old.units, old.size, old.stride, rule, *lined, *lines, region.positions, *counted)
            found[here] = region.zigzags[source]
        return n, k, ranks, found


@njit(nogil=True, cache=True, error_model="numpy")
def _segment_ranks(
    units: Any, size: Any, stride: Any, rule: Any, row_levels: Any, column_levels: Any, row_cuts: Any,
    column_cuts: Any, positions: Any, n: Any, k: Any, ranks: Any, source: Any,
) -> None:  # fmt: skip
    rows, columns = row_cuts[-1], column_cuts[-1]
    cursor = np.zeros(rows, np.int64)
    at = 0
    for r in range(rows):
        while at < positions.size and positions[at] < r * columns:
            at += 1
        cursor[r] = at
    height, width = widest(row_cuts), widest(column_cuts)
    chunks = height * ((width + CHUNK - 1) // CHUNK)
    cls, hist = np.empty(chunks * CHUNK + SPARE, np.uint8), np.empty((chunks, CLASSES), np.uint8)
    found = np.empty((3, min(positions.size, height * width)), np.uint32)
    done, t = 0, 0
    for i in range(row_cuts.size - 1):
        for j in range(column_cuts.size - 1):
            r0, r1, c0, c1 = row_cuts[i], row_cuts[i + 1], column_cuts[j], column_cuts[j + 1]
            classify_tile(units, size, stride, rule, row_levels, column_levels, r0, r1, c0, c1, cls, hist, n[t])
            done += rank_tile(
                rule[5], r0, r1, c0, c1, columns, cls, hist, positions, cursor, k[t], found, ranks[done:], source[done:]
            )
            t += 1
