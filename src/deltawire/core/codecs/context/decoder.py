"""From the streams of a context block to changes, tile by tile.

Where the old weights are in host memory, `TiledBlock` decodes all of it. Where they are on a device, the work is split:

    make_sheet     geometry, rules and levels of tiles ──▶ the device counts classes (`kernels.class_counts`)
    decode_ranks   its counts, and the streams         ──▶ ranks within classes
    join_ranks     all ranks as arrays                 ──▶ the device finds their places (`kernels.place`)

All that passes between the two is plain arrays: the process that decodes needs no torch and may be another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...change import Change
from ...compiled import njit
from ...dtypes import Bits, lookup
from ...errors import CorruptStream, CountMismatch
from ...parallel import ordered_map
from ...ulps import take_steps
from ..base import BaseBits, BlockRecord, CountedRegions, check_names, exactly
from .classes import CHUNK, CLASSES, SPARE, classify_tile, place_tile
from .entropy import SYMBOLS, coarse, models, unscale_all
from .head import (
    COLUMN_LEVELS,
    LEVEL_HEAD,
    ROW_LEVELS,
    SIZE_PLANES,
    head_limit,
    parse_head,
    shift_rates,
    unpack_levels,
    unpack_sizes,
)
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
        self._step_tables = unscale_all(head.steps)
        self._step_coarse = coarse(self._step_tables.reshape(-1, SYMBOLS + 1))

    def _read_levels(self, data: npt.NDArray[np.uint8]) -> list[tuple[LevelBytes, LevelBytes]]:
        result, at = [], 0
        for shape, grid in zip(self._shapes, self._head.grids, strict=True):
            pair: list[LevelBytes | None] = [None, None]
            for axis, flag in enumerate((ROW_LEVELS, COLUMN_LEVELS)):
                if grid.flags & flag:
                    read = unpack_levels(data[at:], shape[axis])
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

    def span(self, number: int, rows: slice, columns: slice) -> TileSpan:
        """The tiles of a rectangle of a region, which must lie on tile lines (see `around`)."""
        region, grid = self.regions[number][0], self._head.grids[number]
        if self._shapes[number][1] != region.columns:
            # a narrow region: whole rows are a part of the one row it is walked as
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

    def decode(self, base: BaseBits) -> list[Change]:
        """All changes of the block, given the base version's flat bits of its tensors."""
        changes = []
        for number, (region, _) in enumerate(self.regions):
            rows, columns = slice(0, region.rows), slice(0, region.columns)
            found = self.shard(number, rows, columns, region.matrix(base(region.tensor.name)))
            changes.append(Change(region, *found))
        return changes

    def shard(self, number: int, rows: slice, columns: slice, old: Bits) -> Found:
        """The changes within a rectangle of a region, from the old weights of that rectangle alone.

        The rectangle must lie on tile lines. For one that does not, gather the old weights of the rectangle `around`
        it, decode that and keep what is wanted.
        """
        region, count = self.regions[number]
        snapped = self.around(number, rows, columns)
        if snapped != (rows, columns):
            raise ValueError(
                f"rows {rows.start}:{rows.stop}, columns {columns.start}:{columns.stop} of {region.tensor.name!r} are "
                f"not on the lines of its tiles; decode rows {snapped[0].start}:{snapped[0].stop}, columns "
                f"{snapped[1].start}:{snapped[1].stop} and cut"
            )
        if old.shape != (rows.stop - rows.start, columns.stop - columns.start):
            raise ValueError(f"old weights of shape {old.shape} for rows {rows}, columns {columns}")
        span = self.span(number, rows, columns)
        if self._shapes[number][1] != region.columns:
            old = np.ascontiguousarray(old).reshape(1, -1)
        matrix, room = Matrix.over(old), min(count, old.size)
        positions, zigzags = np.empty(room, np.uint32), np.empty(room, np.uint32)
        was = np.empty(room * matrix.size, np.uint8)
        kernel: Any = _decode_tiles
        error, found = kernel(
            matrix.units, matrix.size, matrix.stride, span.rule, span.row_levels, span.column_levels, span.row_cuts,
            span.column_cuts, self._starts_of(span), self._coding(number), positions, was, zigzags,
        )  # fmt: skip
        self._check(span, error, found)
        was = was[: found * matrix.size].view(old.dtype)
        now = np.empty_like(was)
        take_steps(zigzags[:found], was, self._dtype.steps_are_signed, now)
        return positions[:found], was, now

    def ranks(self, span: TileSpan, sizes: npt.NDArray[np.int32]) -> Ranked:
        """Entropy-decode tiles whose classes were counted where the weights are; `sizes` is [tiles, CLASSES]."""
        room = self.regions[span.region][1]
        counts = np.zeros((span.tiles, CLASSES), np.int64)
        ranks, steps = np.empty(room, np.uint32), np.empty(room, np.uint32)
        kernel: Any = _decode_ranks
        coding = self._coding(span.region)
        error, found = kernel(self._starts_of(span), sizes.astype(np.int64), coding, counts, ranks, steps)
        self._check(span, error, found)
        return counts, ranks[:found], steps[:found]

    def _starts_of(self, span: TileSpan) -> npt.NDArray[np.int64]:
        """[tile rows, tile columns, 2]: where the string of each tile begins and ends."""
        grid, first = self._head.grids[span.region], int(self._first[span.region])
        numbers = first + np.arange(grid.tiles).reshape(grid.down, grid.across)
        numbers = numbers[slice(*span.rows), slice(*span.columns)]
        return np.stack([self._starts[numbers], self._starts[numbers + 1]], axis=-1)

    def _coding(self, number: int) -> tuple[Any, ...]:
        """The decoder of a region's strings, as `decode_tile` takes it."""
        head, rates = self._head, np.empty(CLASSES, np.uint8)
        shift_rates(head.rates, head.inverse, head.grids[number].offset, rates)
        return (
            self._data, rates, head.inverse, head.spread,
            self._step_tables, self._step_coarse, head.step_table, np.uint64((1 << 8 * self._dtype.unit_size) - 1),
            *models(),
        )  # fmt: skip

    def _check(self, span: TileSpan, error: int, found: int) -> None:
        region, count = self.regions[span.region]
        if error:
            kind, what = PROBLEMS[error]
            raise kind(f"{region.tensor.name!r}: {what}")
        if span.tiles == self._head.grids[span.region].tiles and found != count:
            raise CountMismatch(f"a region of {region.tensor.name!r} has {found} changes, its count is {count}")


def _snapped(lines: list[int], span: slice) -> slice:
    if not 0 <= span.start < span.stop <= lines[-1]:
        raise ValueError(f"{span.start}:{span.stop} is no part of 0:{lines[-1]}")
    return slice(max(line for line in lines if line <= span.start), min(line for line in lines if line >= span.stop))


@njit(nogil=True, cache=True, error_model="numpy")
def _decode_ranks(starts: Any, n: Any, coding: Any, k: Any, ranks: Any, steps: Any) -> Any:
    """Ranks and steps of tiles, one after the other; returns (error, how many)."""
    done, at = 0, 0
    for i in range(starts.shape[0]):
        for j in range(starts.shape[1]):
            error, count = decode_tile(
                coding, starts[i, j, 0], starts[i, j, 1], n[at], k[at], ranks[done:], steps[done:]
            )
            if error:
                return error, 0
            done += count
            at += 1
    return 0, done


@njit(nogil=True, cache=True, error_model="numpy")
def _decode_tiles(
    units: Any, size: Any, stride: Any, rule: Any, row_levels: Any, column_levels: Any, row_cuts: Any,
    column_cuts: Any, starts: Any, coding: Any, positions: Any, was: Any, zigzags: Any,
) -> Any:  # fmt: skip
    """Positions, old bytes and steps of tiles; returns (error, how many).

    A band of tiles is decoded into scratch memory and then put in the order of its rows.
    """
    width, done = column_cuts[-1], 0
    height, across = widest(row_cuts), (widest(column_cuts) + CHUNK - 1) // CHUNK
    cls, hist = np.empty(height * across * CHUNK + SPARE, np.uint8), np.empty((height * across, CLASSES), np.uint8)
    fill, start = np.empty(height * across + 1, np.int64), np.empty(height + 1, np.int64)
    n, k = np.zeros(CLASSES, np.int64), np.zeros(CLASSES, np.int64)
    most = min(height * width, positions.size)
    row, column, steps = np.empty(most, np.uint32), np.empty(most, np.uint32), np.empty(most, np.uint32)
    ranks, run, source = np.empty(most, np.uint32), np.empty(most, np.uint32), np.empty(most, np.uint32)
    for i in range(row_cuts.size - 1):
        a, b, found = row_cuts[i], row_cuts[i + 1], 0
        left = min(most, positions.size - done)
        for j in range(column_cuts.size - 1):
            c, d = column_cuts[j], column_cuts[j + 1]
            across = (d - c + CHUNK - 1) // CHUNK
            classify_tile(units, size, stride, rule, row_levels, column_levels, a, b, c, d, cls, hist, n)
            error, count = decode_tile(
                coding, starts[i, j, 0], starts[i, j, 1], n, k, ranks[: left - found], run[: left - found]
            )
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


# ── weights on a device ──

SMALL_TILE = 1 << 16
"""Units of a tile whose ranks fit two bytes."""

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of a block that lie in one tensor of those that are counted."""

    tensor: int
    """Number of the tensor."""
    offset: int
    """Units of the tensor before the first tile."""
    stride: int
    """Units from one row of the tiles to the next."""
    block: TiledBlock
    span: TileSpan


def make_sheet(tiles: Sequence[Tiles]) -> Arrays:
    spans = [item.span for item in tiles]
    return {
        "segments": np.array([[t.tensor, t.offset, t.stride, t.span.leveled] for t in tiles], np.int64),
        "lengths": np.array([[s.row_cuts.size, s.column_cuts.size] for s in spans], np.int64),
        "row_cuts": np.concatenate([s.row_cuts for s in spans]),
        "column_cuts": np.concatenate([s.column_cuts for s in spans]),
        "rules": np.stack([s.rule for s in spans]),
        "row_levels": np.concatenate([s.row_levels for s in spans]),
        "column_levels": np.concatenate([s.column_levels for s in spans]),
    }


def decode_ranks(tiles: Sequence[Tiles], sizes: npt.NDArray[np.int32], threads: int | None = None) -> list[Ranked]:
    """Entropy-decode tiles. `sizes` is what the device counted: [tiles, CLASSES], one of `tiles` after the other."""
    ends = np.cumsum([0, *(item.span.tiles for item in tiles)]).tolist()

    def one(number: int) -> Ranked:
        item = tiles[number]
        return item.block.ranks(item.span, sizes[ends[number] : ends[number + 1]])

    return list(ordered_map(one, range(len(tiles)), threads))


def join_ranks(tiles: Sequence[Tiles], found: Sequence[Ranked]) -> Arrays:
    """Counts, ranks and steps of all tiles, in the order and as wide as `kernels.place` takes them."""
    small = all(_largest(item.span) <= SMALL_TILE for item in tiles)
    width = max(item.block.regions[item.span.region][0].tensor.unit_size for item in tiles)
    return {
        "counts": np.concatenate([counts for counts, _, _ in found]).astype(np.int32),
        "ranks": np.concatenate([ranks for _, ranks, _ in found]).astype(np.uint16 if small else np.uint32),
        "steps": np.concatenate([steps for _, _, steps in found]).astype(f"<u{width}"),
    }


def _largest(span: TileSpan) -> int:
    return int(np.diff(span.row_cuts).max(initial=1) * np.diff(span.column_cuts).max(initial=1))
