"""From the streams of a context block to changes, tile by tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, uint64

from ...change import Change
from ...dtypes import Bits, lookup
from ...errors import CorruptStream, CountMismatch
from ...ulps import take_steps
from ..base import BaseBits, BlockRecord, CountedRegions, check_names, exactly
from .classes import CHUNK, CLASSES, SPARE, classify_tile, place_tile
from .encoder import shifted
from .entropy import MODELS, coarse, joined
from .head import COLUMN_LEVELS, ROW_LEVELS, SIZE_PLANES, head_limit, parse_head, unpack_sizes
from .levels import HEAD as LEVEL_HEAD
from .levels import unpack
from .runs import PROBLEMS, decode_tile
from .tiles import LevelBytes, Matrix, padded, walked, widest

Ranked = tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32], npt.NDArray[np.uint32]]
"""Changes per tile and class, and of each change its rank and zigzagged step: tile after tile, class by class."""

Found = tuple[npt.NDArray[np.uint32], Bits, Bits]
"""Positions, old and new bits."""


@dataclass(frozen=True, slots=True)
class TileSpan:
    """Whole tiles of a region, as a matrix that is walked row by row: what a device needs to count classes in them."""

    region: int
    """Number of the region in its block."""
    rows: tuple[int, int]
    """First tile row and the one behind the last."""
    columns: tuple[int, int]
    """First tile column and the one behind the last."""
    row_cuts: npt.NDArray[np.int64]
    """Lines between tile rows, counted from the first."""
    column_cuts: npt.NDArray[np.int64]
    """Lines between tile columns, counted from the first."""
    rule: npt.NDArray[np.int64]
    """How old units get their class, as kernels take it."""
    row_levels: LevelBytes
    """Level of each row; neutral where the block has none."""
    column_levels: LevelBytes
    """Level of each column; neutral where the block has none."""
    leveled: bool
    """Whether any level may differ from the neutral one."""

    @property
    def tiles(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


class TiledBlock:
    """A context block whose small streams are parsed and checked; its tiles decode from their own old weights."""

    def __init__(self, record: BlockRecord, regions: CountedRegions, streams: dict[str, bytes]) -> None:
        self.regions = tuple(regions)
        self._dtype = lookup(regions[0][0].tensor.dtype)
        self._shapes = [walked(region.rows, region.columns) for region, _ in regions]
        check_names(record, ("head", "levels", "sizes", "tiles"))
        total, units = sum(count for _, count in regions), sum(region.units for region, _ in regions)
        data = exactly(record, streams, "head", (0, head_limit(len(regions))))
        self._head = head = parse_head(self._dtype, data, self._shapes)
        tiles = sum(grid.tiles for grid in head.grids)
        self._first = np.concatenate([[0], np.cumsum([grid.tiles for grid in head.grids])]).astype(np.int64)
        # a change costs at most a gap of 4 bytes and a step of 6, a count 4, an escape 2 for 63 weights
        most = 10 * total + (4 * CLASSES + 8) * tiles + units // 16
        self._data = exactly(record, streams, "tiles", (0, most))
        sizes = exactly(record, streams, "sizes", (tiles, SIZE_PLANES * tiles))
        self._starts = unpack_sizes(sizes, tiles, self._data.size)
        most = sum(2 * (LEVEL_HEAD + rows + columns + 8) for rows, columns in self._shapes)
        self._levels = self._read_levels(exactly(record, streams, "levels", (0, most)))
        tables = head.step_tables()
        self._step_tables, self._step_coarse = joined(tables), coarse(tables)

    def _read_levels(self, data: npt.NDArray[np.uint8]) -> list[tuple[LevelBytes, LevelBytes]]:
        result, at = [], 0
        for shape, grid in zip(self._shapes, self._head.grids, strict=True):
            pair: list[LevelBytes | None] = [None, None]
            for axis, flag in enumerate((ROW_LEVELS, COLUMN_LEVELS)):
                if grid.flags & flag:
                    read = unpack(data[at:], shape[axis])
                    if read is None:
                        raise CorruptStream("stream 'levels' does not hold the levels its head names")
                    pair[axis] = read[0]
                    at += read[1]
            result.append(padded(pair[0], pair[1], shape))
        if at != data.size:
            raise CountMismatch("stream 'levels' goes on after its last level")
        return result

    def lines(self, number: int) -> tuple[list[int], list[int]]:
        """Rows and columns of a region at which its tiles begin and end.

        A region of few columns is walked as one row: all of its columns belong together, and its rows are cut only
        where a tile begins with one.
        """
        region = self.regions[number][0]
        rows, columns = self._head.grids[number].cuts(self._shapes[number])
        if self._shapes[number][1] != region.columns:
            whole = columns[columns % region.columns == 0] // region.columns
            return whole.tolist(), [0, region.columns]
        return rows.tolist(), columns.tolist()

    def around(self, number: int, rows: slice, columns: slice) -> tuple[slice, slice]:
        """The smallest rectangle on tile lines that holds these rows and columns of a region."""
        row_lines, column_lines = self.lines(number)
        return _snapped(row_lines, rows), _snapped(column_lines, columns)

    def shard(self, number: int, rows: slice, columns: slice, old: Bits) -> Found:
        """What changes within a rectangle of a region, from the old weights of that rectangle alone.

        The rectangle must lie on tile lines. For one that does not, gather the old weights of the rectangle `around`
        it, decode that and keep what is wanted.
        """
        region = self.regions[number][0]
        snapped = self.around(number, rows, columns)
        if snapped != (rows, columns):
            raise ValueError(
                f"rows {rows.start}:{rows.stop}, columns {columns.start}:{columns.stop} of {region.tensor.name!r} are "
                f"not on the lines of its tiles; decode rows {snapped[0].start}:{snapped[0].stop}, columns "
                f"{snapped[1].start}:{snapped[1].stop} and cut"
            )
        if old.shape != (rows.stop - rows.start, columns.stop - columns.start):
            raise ValueError(f"old weights of shape {old.shape} for rows {rows}, columns {columns}")
        if self._shapes[number][1] != region.columns:
            # a narrow region: whole rows are a part of the one row it is walked as
            rows, columns = slice(0, 1), slice(rows.start * region.columns, rows.stop * region.columns)
            old = np.ascontiguousarray(old).reshape(1, -1)
        return self._tiles(number, rows, columns, old)

    def span(self, number: int, rows: slice, columns: slice) -> TileSpan:
        """The tiles of a rectangle of a region, which must lie on tile lines (see `around`)."""
        region, grid = self.regions[number][0], self._head.grids[number]
        if self._shapes[number][1] != region.columns:
            rows, columns = slice(0, 1), slice(rows.start * region.columns, rows.stop * region.columns)
        row_cuts, column_cuts = grid.cuts(self._shapes[number])
        i0, i1 = np.searchsorted(row_cuts, (rows.start, rows.stop)).tolist()
        j0, j1 = np.searchsorted(column_cuts, (columns.start, columns.stop)).tolist()
        row_levels, column_levels = self._levels[number]
        return TileSpan(
            number, (i0, i1), (j0, j1),
            row_cuts[i0 : i1 + 1] - row_cuts[i0], column_cuts[j0 : j1 + 1] - column_cuts[j0],
            self._head.rule.table(self._head.classes), row_levels[rows], column_levels[columns],
            bool(grid.flags & (ROW_LEVELS | COLUMN_LEVELS)),
        )  # fmt: skip

    def ranks(self, span: TileSpan, sizes: npt.NDArray[np.int32]) -> Ranked:
        """Entropy-decode tiles whose classes were counted where the weights are; `sizes` is [tiles, CLASSES]."""
        head, grid = self._head, self._head.grids[span.region]
        region, count = self.regions[span.region]
        counts = np.zeros((span.tiles, CLASSES), np.int64)
        ranks, steps = np.empty(count, np.uint32), np.empty(count, np.uint32)
        kernel: Any = _decode_ranks
        error, found = kernel(
            self._data, self._starts[int(self._first[span.region]) :], *span.rows, *span.columns, grid.across,
            sizes.astype(np.int64), shifted(head.rates, head.inverse, grid.offset), head.inverse, head.spread,
            self._step_tables, self._step_coarse, head.step_table, (1 << 8 * region.tensor.unit_size) - 1, MODELS,
            counts, ranks, steps,
        )  # fmt: skip
        if error:
            kind, what = PROBLEMS[error]
            raise kind(f"{region.tensor.name!r}: {what}")
        if span.tiles == grid.tiles and found != count:
            raise CountMismatch(f"a region of {region.tensor.name!r} has {found} changes, its count is {count}")
        return counts, ranks[:found], steps[:found]

    def decode(self, base: BaseBits) -> list[Change]:
        """All changes of the block, given the base version's flat bits of its tensors."""
        return [self._change(i, region.matrix(base(region.tensor.name))) for i, (region, _) in enumerate(self.regions)]

    def _change(self, number: int, old: Bits) -> Change:
        region, count = self.regions[number]
        positions, was, now = self.shard(number, slice(0, region.rows), slice(0, region.columns), old)
        if positions.size != count:
            raise CountMismatch(
                f"a region of {region.tensor.name!r} has {positions.size} changes, its count is {count}"
            )
        return Change(region, positions, was, now)

    def _tiles(self, number: int, rows: slice, columns: slice, bits: Bits) -> Found:
        head, grid = self._head, self._head.grids[number]
        row_cuts, column_cuts = grid.cuts(self._shapes[number])
        old = Matrix.over(bits)
        room = min(self.regions[number][1], bits.size)
        positions, zigzags = np.empty(room, np.uint32), np.empty(room, np.uint32)
        was = np.empty(room * old.size, np.uint8)
        first, last = np.searchsorted(row_cuts, (rows.start, rows.stop)).tolist()
        left, right = np.searchsorted(column_cuts, (columns.start, columns.stop)).tolist()
        kernel: Any = _decode_tiles
        error, found = kernel(
            old.units, old.size, old.stride, head.rule.table(head.classes), *self._levels[number],
            row_cuts, column_cuts, first, last, left, right,
            self._data, self._starts[int(self._first[number]) :], shifted(head.rates, head.inverse, grid.offset),
            head.inverse, head.spread, self._step_tables, self._step_coarse, head.step_table, MODELS,
            positions, was, zigzags,
        )  # fmt: skip
        if error:
            kind, what = PROBLEMS[error]
            raise kind(f"{self.regions[number][0].tensor.name!r}: {what}")
        was = was[: found * old.size].view(bits.dtype)
        now = np.empty_like(was)
        take_steps(zigzags[:found], was, self._dtype.steps_are_signed, now)
        return positions[:found], was, now


@njit(nogil=True, cache=True, error_model="numpy")
def _decode_ranks(
    data: Any, starts: Any, i0: Any, i1: Any, j0: Any, j1: Any, across: Any, n: Any, rates: Any, inverse: Any,
    spread: Any, step_tables: Any, step_coarse: Any, step_table: Any, step_limit: Any, models: Any, k: Any, ranks: Any,
    steps: Any,
) -> Any:  # fmt: skip
    """Ranks and steps of tiles [i0:i1, j0:j1], tile after tile; returns (error, how many)."""
    done, at = 0, 0
    for i in range(i0, i1):
        for j in range(j0, j1):
            t = i * across + j
            error, count = decode_tile(
                data, starts[t], starts[t + 1], n[at], rates, inverse, spread, step_tables, step_coarse, step_table,
                uint64(step_limit), models, k[at], ranks[done:], steps[done:],
            )  # fmt: skip
            if error:
                return error, 0
            done += count
            at += 1
    return 0, done


def _snapped(lines: list[int], span: slice) -> slice:
    if not 0 <= span.start < span.stop <= lines[-1]:
        raise ValueError(f"{span.start}:{span.stop} is no part of 0:{lines[-1]}")
    return slice(max(line for line in lines if line <= span.start), min(line for line in lines if line >= span.stop))


@njit(nogil=True, cache=True, error_model="numpy")
def _decode_tiles(
    units: Any, size: Any, stride: Any, rule: Any, row_levels: Any, column_levels: Any, row_cuts: Any,
    column_cuts: Any, i0: Any, i1: Any, j0: Any, j1: Any, data: Any, starts: Any, rates: Any, inverse: Any,
    spread: Any, step_tables: Any, step_coarse: Any, step_table: Any, models: Any, positions: Any, was: Any,
    zigzags: Any,
) -> Any:  # fmt: skip
    """Tiles [i0:i1, j0:j1] of a segment; units and what comes out count from the first of them, levels and cuts do not.

    A band of tiles is decoded into scratch memory and then put in the order of its rows.
    """
    r0, c0, width, done = row_cuts[i0], column_cuts[j0], column_cuts[j1] - column_cuts[j0], 0
    step_limit = (uint64(1) << uint64(8 * size)) - uint64(1)
    height, across = widest(row_cuts), (widest(column_cuts) + CHUNK - 1) // CHUNK
    cls, hist = np.empty(height * across * CHUNK + SPARE, np.uint8), np.empty((height * across, CLASSES), np.uint8)
    fill, start = np.empty(height * across + 1, np.int64), np.empty(height + 1, np.int64)
    n, k = np.zeros(CLASSES, np.int64), np.zeros(CLASSES, np.int64)
    most = min(height * width, positions.size)
    row, column, steps = np.empty(most, np.uint32), np.empty(most, np.uint32), np.empty(most, np.uint32)
    ranks, run, source = np.empty(most, np.uint32), np.empty(most, np.uint32), np.empty(most, np.uint32)
    for i in range(i0, i1):
        a, b, found = row_cuts[i] - r0, row_cuts[i + 1] - r0, 0
        left = min(most, positions.size - done)
        for j in range(j0, j1):
            c, d = column_cuts[j] - c0, column_cuts[j + 1] - c0
            across = (d - c + CHUNK - 1) // CHUNK
            classify_tile(units, size, stride, rule, row_levels[r0:], column_levels[c0:], a, b, c, d, cls, hist, n)
            t = i * (column_cuts.size - 1) + j
            error, count = decode_tile(
                data, starts[t], starts[t + 1], n, rates, inverse, spread, step_tables, step_coarse, step_table,
                step_limit, models, k, ranks[: left - found], run[: left - found],
            )  # fmt: skip
            if error:
                return error, 0
            if count:
                place_tile(
                    rule[5], 0, c, across, (b - a) * across, cls, hist, k, ranks, fill, row[found:], column[found:],
                    source,
                )  # fmt: skip
            for p in range(count):
                steps[found + p] = run[source[p]]
            found += count
        # tiles follow each other left to right, so filling each row in order sorts it
        start[:] = 0
        for p in range(found):
            start[row[p] + 1] += 1
        for r in range(b - a):
            start[r + 1] += start[r]
        for p in range(found):
            to = done + start[row[p]]
            start[row[p]] += 1
            at = (a + np.int64(row[p])) * stride + np.int64(column[p])
            positions[to] = (a + np.int64(row[p])) * width + np.int64(column[p])
            zigzags[to] = steps[p]
            for byte in range(size):
                was[to * size + byte] = units[at * size + byte]
        done += found
    return 0, done
