"""From changes to the streams of a context block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from ...change import Change
from ...dtypes import lookup
from ...errors import PositionError
from ...simd import LEAN
from ...ulps import zigzags_of
from ..base import Before, Coded
from . import runs
from .classes import CLASSES, COLUMN_NEUTRAL, LEVELS, ROW_NEUTRAL, Rule
from .entropy import RATE, SPREADS, SYMBOLS, models, scale
from .head import COLUMN_LEVELS, ROW_LEVELS, BlockHead, Grid, exponent, pack_head, pack_levels, pack_sizes
from .levels import Floats, choose_levels
from .old_weights import Counts, OldBlock, RankedChanges, old_block
from .tiles import TILE, LevelBytes, grid_of, walked

FEW_CHANGES = 200
"""Regions with fewer changes have too few to choose levels from."""


@dataclass(slots=True)
class _Prepared:
    """What the encoder knows of one region, in the shape in which it is walked."""

    rows: int
    columns: int
    positions: npt.NDArray[np.uint32]
    zigzags: npt.NDArray[np.uint32]
    """Step of each change."""
    exponents: npt.NDArray[np.uint8]
    """Old exponent of each weight that changed."""
    grid: tuple[int, int]
    """Tiles down and across."""
    per_row: npt.NDArray[np.int64]
    """Changes in each row."""
    per_column: npt.NDArray[np.int64]
    """Changes in each column."""
    row_levels: LevelBytes | None = None
    column_levels: LevelBytes | None = None

    @property
    def tiles(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def every(self) -> int:
        """Of so many rows one is looked at, to see how many weights have each exponent."""
        return max(1, min(16, self.rows // 64))

    @property
    def flags(self) -> int:
        return ROW_LEVELS * (self.row_levels is not None) + COLUMN_LEVELS * (self.column_levels is not None)


Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""`map`, or the same on several threads."""


def encode_tiles(changes: Sequence[Change], before: Before, *, tile: int = TILE, use_levels: bool = True) -> Coded:
    """The block in tiles and classes, whether that pays or not."""
    block = BlockEncoder(changes, tile)
    (ranked,) = rank_together([block], before, use_levels=use_levels)
    return block.code(ranked)


def rank_together(
    blocks: Sequence[BlockEncoder], before: Before, each: Each = map, *, use_levels: bool = True
) -> Iterator[RankedChanges]:
    """Choose the classes of several blocks of one dtype, and rank their changes. Their old weights are counted at once,
    and not needed any more then: what they take is free for other blocks."""
    changes = [change for block in blocks for change in block.changes]
    first = np.cumsum([0, *(len(block.regions) for block in blocks)]).tolist()
    old, regions = old_block(changes, before), [region for block in blocks for region in block.regions]
    seen = old.exponents(*blocks[0].exponent, [region.every for region in regions])

    def choose(number: int) -> None:
        blocks[number].choose(old, first[number], seen[first[number] : first[number + 1]], use_levels)

    # all of them, before anything is ranked
    list(each(choose, range(len(blocks))))
    rules = [block.rule.table(block.classes) for block in blocks for _ in block.regions]
    levels, grids = [(s.row_levels, s.column_levels) for s in regions], [s.grid for s in regions]
    n, k, ranks, steps = old.ranks(changes, [s.zigzags for s in regions], rules, levels, grids)
    tile = change = 0
    for block in blocks:
        tiles = slice(tile, tile + sum(s.tiles for s in block.regions))
        here = slice(change, change + sum(s.positions.size for s in block.regions))
        yield n[tiles], k[tiles], ranks[here], steps[here]
        tile, change = tiles.stop, here.stop


class BlockEncoder:
    """A block on its way: `choose`, once its old weights can be counted, then `code`."""

    rule: Rule
    classes: int

    def __init__(self, changes: Sequence[Change], tile: int = TILE) -> None:
        self.changes = changes
        dtype = lookup(changes[0].region.tensor.dtype)
        self.exponent = shift, mask = exponent(dtype)
        """Lowest bit and mask of the exponent."""
        # all regions at once: each call gives up the interpreter's lock, which other blocks are waiting for
        positions, old, new = (
            np.concatenate([getattr(change, part) for change in changes]) for part in ("positions", "old", "new")
        )
        positions = positions.astype(np.uint32, copy=False)
        shapes = np.array([walked(change.region.rows, change.region.columns) for change in changes], np.int64)
        counts = np.array([change.count for change in changes], np.int64)
        zigzags, exponents = np.empty(positions.size, np.uint32), np.empty(positions.size, np.uint8)
        lines = np.zeros(shapes.sum(), np.int64)
        self._hits = np.zeros((len(changes), mask + 1), np.int64)
        """Changes of each region by their old exponent."""
        self._steps = np.zeros((mask + 1, SYMBOLS), np.int64)
        """Changes by old exponent and step."""
        good = _survey(
            positions, old, new, dtype.steps_are_signed, shift, mask, counts, shapes, zigzags, exponents, lines,
            self._hits, self._steps,
        )  # fmt: skip
        if good < len(changes):
            name = changes[good].region.tensor.name
            raise PositionError(f"the changed positions of {name!r} are not ascending in their region")
        self.regions: list[_Prepared] = []
        at = line = 0
        for (rows, columns), count in zip(shapes.tolist(), counts.tolist(), strict=True):
            here, middle, last = slice(at, at + count), line + rows, line + rows + columns
            changed = positions[here], zigzags[here], exponents[here]
            per_line = lines[line:middle], lines[middle:last]
            self.regions.append(_Prepared(rows, columns, *changed, grid_of(rows, columns, tile), *per_line))
            at, line = here.stop, last

    def choose(self, old: OldBlock, first: int, seen: Counts, use_levels: bool) -> None:
        """Choose classes and levels. The regions are those of `old` from `first` on; `seen` are their exponents."""
        shift, mask = self.exponent
        # from a sample of rows
        scale = np.array([s.rows / -(-s.rows // s.every) for s in self.regions])[:, None]
        total, changed = np.maximum(seen[:, : mask + 1] * scale, self._hits).sum(0), self._steps
        self.rule = _choose_rule(total, changed, shift, mask, False)
        if use_levels:
            self._choose_levels(old, first, total, changed)
            if any(s.flags for s in self.regions):
                self.rule = _choose_rule(total, changed, shift, mask, True)
        self.classes = min(CLASSES, self.rule.span + 1 + (2 * LEVELS - 3 if self.rule.leveled else 0))

    def _choose_levels(self, old: OldBlock, first: int, total: Floats, changed: Floats) -> None:
        rule = self.rule
        x = rule.top - np.clip(np.arange(rule.mask + 1), rule.top - rule.span + 1, rule.top)
        rate = np.bincount(x, changed.sum(1)) / np.maximum(np.bincount(x, total), 1)
        for number, s in enumerate(self.regions, first):
            if s.positions.size > FEW_CHANGES and s.rows > 1:
                counts = s.per_row, s.per_column
                s.row_levels, s.column_levels = choose_levels(
                    old, number, s.positions, s.exponents, counts, rule.table(CLASSES), rate
                )

    def code(self, ranked: RankedChanges) -> Coded:
        return _code(self.regions, ranked, self.rule, self.classes)


def _code(regions: list[_Prepared], ranked: RankedChanges, rule: Rule, classes: int) -> Coded:
    n, k, ranks, zigzags = ranked
    tiles = np.array([s.tiles for s in regions], np.int64)
    histogram = np.zeros((CLASSES, SYMBOLS), np.int64)
    weights, changed = (np.zeros((len(regions), CLASSES), np.int64) for _ in range(2))
    _sums(n, k, zigzags, tiles, weights, changed, histogram)
    rates, inverse = _class_rates(weights.sum(0), changed.sum(0))
    offsets = _offsets(weights, changed, rates, inverse)
    per_tile = np.repeat(shifted(rates, inverse, offsets[:, None]), tiles, axis=0)
    steps, step_table = _step_tables(histogram)
    grids = [Grid(*s.grid, s.flags, offset) for s, offset in zip(regions, offsets.tolist(), strict=True)]
    spread = _choose_spread(n, k, per_tile, inverse)
    head = BlockHead(rule, classes, spread, rates, inverse, steps, step_table, grids)
    tables, sizes = np.concatenate(head.step_tables()), np.zeros(len(n), np.int64)
    room, size = 2 * ranks.size + 64 * len(n), -1
    while size < 0:
        room *= 4
        out = np.empty(room, np.uint8)
        size = runs.encode_tiles(
            n, k, ranks, zigzags, per_tile, inverse, spread, tables, step_table, models(), out, sizes
        )
    levels = [line for s in regions for line in (s.row_levels, s.column_levels) if line is not None]
    return Coded(
        {
            "head": pack_head(head),
            "levels": b"".join(pack_levels(line) for line in levels),
            "sizes": pack_sizes(sizes),
            "tiles": out[:size].tobytes(),
        }
    )


# ── what the head says ──


def _choose_rule(total: Floats, changed: Floats, shift: int, mask: int, leveled: bool) -> Rule:
    """The exponents worth telling apart."""
    most = CLASSES - ROW_NEUTRAL - COLUMN_NEUTRAL if leveled else CLASSES - 1
    low, high = _merge_ends(total.copy(), changed.copy(), most)
    return Rule(high, high - low + 1, leveled, shift, mask)


def _class_rates(n: Floats, k: Floats) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    """A byte per class, 8 per octave, for the rarer of changed and unchanged; and which of the two it is."""
    inverse = 2 * k > n
    rare = np.where(inverse, n - k, k)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.clip(np.round(-8 * np.log2(rare / np.maximum(n, 1))), 0, runs.NEVER - 1)
    return np.where(rare > 0, rate, runs.NEVER).astype(np.uint8), inverse


def _offsets(
    n: Floats, k: Floats, rates: npt.NDArray[np.uint8], inverse: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """How far each segment as a whole is from the block's rates, in the same eighths of an octave."""
    usable = (rates != runs.NEVER) & ~inverse
    expected = np.ascontiguousarray((n * RATE[rates])[:, usable]).sum(1)
    seen = k[:, usable].sum(1)
    found: npt.NDArray[np.float64] = np.rint(-8 * np.log2((seen + 0.5) / (expected + 0.5)))
    return np.clip(found, -127, 127).astype(np.int64)


def shifted(rates: npt.NDArray[np.uint8], inverse: npt.NDArray[np.bool_], offset: Any) -> npt.NDArray[np.uint8]:
    """The rates of a segment: the block's moved by its offset. A column of offsets gives a row for each."""
    moved = np.clip(rates.astype(np.int64) + offset, 0, runs.NEVER - 1)
    return np.where((rates == runs.NEVER) | inverse, rates, moved).astype(np.uint8)


def _choose_spread(n: Counts, k: Counts, rates: npt.NDArray[np.uint8], inverse: npt.NDArray[np.bool_]) -> int:
    """The table set nearest to how much counts really scatter around what the rates expect."""
    excess, expected = _scatter(n, k, rates, inverse, RATE)
    if not expected:
        return 1
    spread = np.sqrt(max(excess / expected, 1e-6))
    return int(np.argmin([abs(np.log(spread / s)) for s in SPREADS]))


def _step_tables(histogram: npt.NDArray[np.int64]) -> tuple[list[list[int]], npt.NDArray[np.uint8]]:
    """Scaled step tables, and which one each class uses: neighbours share where a table of one's own does not pay."""
    groups, table = np.zeros_like(histogram), np.zeros(CLASSES, np.uint8)
    count = _group_steps(histogram, groups, np.empty(SYMBOLS, np.int64), table)
    return [scale(group[: np.flatnonzero(group)[-1] + 1]) for group in groups[:count]], table


# ── kernels ──


@njit(nogil=True, cache=True, error_model="numpy")
def _entropy(counts: Any) -> Any:
    total, bits = counts.sum(), 0.0
    for count in counts:
        if count > 0:
            bits -= count * np.log2(count / total)
    return bits


@njit(nogil=True, cache=True, error_model="numpy")
def _group_steps(histogram: Any, groups: Any, both: Any, table: Any) -> Any:
    """Sums of the rows that share a table, which one each row uses, and how many there are. `both` is scratch."""
    count = 0
    for c in range(len(histogram)):
        last = -1
        for i in range(both.size):
            both[i] = histogram[c, i]
            if both[i]:
                last = i
        if last >= 0:
            apart = _entropy(both) + 8 * (last + 2)
            if count:
                apart += _entropy(groups[count - 1])
                for i in range(both.size):
                    both[i] += groups[count - 1, i]
            if count == 0 or _entropy(both) > apart:
                groups[count] = histogram[c]
                count += 1
            else:
                groups[count - 1] = both
        table[c] = max(count - 1, 0)
    return count


@njit(nogil=True, cache=True, error_model="numpy")
def _bits(n: Any, steps: Any) -> Any:
    """What positions and steps cost if n weights, steps.sum() of which changed, share a class."""
    k = steps.sum()
    p = min(max(k / max(n, 1e-9), 1e-12), 1 - 1e-12)
    return _entropy(steps) - (k * np.log2(p) + max(n - k, 0.0) * np.log2(1 - p))


@njit(nogil=True, cache=True, error_model="numpy")
def _merge_ends(total: Any, changed: Any, most: Any) -> Any:
    """The lowest and highest exponent left when both ends were merged while that costs next to nothing, and until
    there are at most so many. Writes to its arguments."""
    used = np.flatnonzero(total)
    low, high = used[0], used[-1]
    bits = np.zeros(total.size)
    for e in range(low, high + 1):
        bits[e] = _bits(total[e], changed[e])
    limit = max(32.0, 2e-4 * bits.sum())
    # count by count: numba takes seconds to compile arithmetic on whole rows
    steps = changed.shape[1]
    lowest, highest = np.empty(steps, changed.dtype), np.empty(steps, changed.dtype)
    while low < high:
        for i in range(steps):
            lowest[i] = changed[low, i] + changed[low + 1, i]
            highest[i] = changed[high, i] + changed[high - 1, i]
        bottom = _bits(total[low] + total[low + 1], lowest)
        top = _bits(total[high] + total[high - 1], highest)
        bottom_cost, top_cost = bottom - bits[low] - bits[low + 1], top - bits[high] - bits[high - 1]
        if min(bottom_cost, top_cost) > limit and high - low < most:
            break
        if bottom_cost <= top_cost:
            end, low, merged = low, low + 1, bottom
            into = low
        else:
            end, high, merged = high, high - 1, top
            into = high
        total[into] += total[end]
        for i in range(steps):
            changed[into, i] += changed[end, i]
        bits[into] = merged
    return low, high


@njit(**LEAN)
def _sums(n: Any, k: Any, zigzags: Any, tiles: Any, weights: Any, changed: Any, steps: Any) -> None:
    """Of regions with so many tiles each, weights and changes by [region, class]; steps by [class, symbol]."""
    tile = change = 0
    for region in range(tiles.size):
        for t in range(tile, tile + tiles[region]):
            for c in range(k.shape[1]):
                weights[region, c] += n[t, c]
                changed[region, c] += k[t, c]
                for i in range(change, change + k[t, c]):
                    steps[c, runs.step_symbol(zigzags[i])[0]] += 1
                change += k[t, c]
        tile += tiles[region]


@njit(**LEAN)
def _scatter(n: Any, k: Any, rates: Any, inverse: Any, rate_of: Any) -> Any:
    """How much the variance of counts exceeds what is expected, in sum, and what is expected of those counts."""
    excess, total = 0.0, 0.0
    for t in range(n.shape[0]):
        for c in range(n.shape[1]):
            expected = n[t, c] * rate_of[rates[t, c]]
            if rates[t, c] != runs.NEVER and expected > 4:
                seen = n[t, c] - k[t, c] if inverse[c] else k[t, c]
                excess += ((seen - expected) ** 2 - expected) / expected
                total += expected
    return excess, total


@njit(**LEAN)
def _survey(
    positions: Any, old: Any, new: Any, signed: Any, shift: Any, mask: Any, counts: Any, shapes: Any, zigzags: Any,
    exponents: Any, lines: Any, hits: Any, steps: Any,
) -> Any:  # fmt: skip
    """All about the changes of each region that needs no other weights. `lines` are changes per row, then per column,
    region by region. Returns the number of the first region whose positions do not ascend or leave it; all: none."""
    zigzags_of(old, new, signed, zigzags)
    at = line = 0
    for number in range(counts.size):
        rows, columns = shapes[number, 0], shapes[number, 1]
        row, start, last = 0, 0, -1
        for i in range(at, at + counts[number]):
            p = np.int64(positions[i])
            if p <= last or p >= rows * columns:
                return number
            last = p
            if p - start >= columns:
                row = p // columns
                start = row * columns
            lines[line + row] += 1
            lines[line + rows + p - start] += 1
            exponent = (np.int64(old[i]) >> shift) & mask
            exponents[i] = exponent
            hits[number, exponent] += 1
            steps[exponent, runs.step_symbol(zigzags[i])[0]] += 1
        at += counts[number]
        line += rows + columns
    return counts.size
