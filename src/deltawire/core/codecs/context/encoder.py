"""From changes to the streams of a context block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...change import Change, Region, Units
from ...compiled import njit
from ...dtypes import lookup
from ...errors import PositionError
from ...simd import LEAN
from ...ulps import zigzags_of
from ..base import Before, Coded, Parts
from . import runs
from .classes import CLASSES, COLUMN_NEUTRAL, LEVELS, ROW_NEUTRAL, Rule
from .cuts import UNCUT, BlockCut, Cut, cut_of, cut_within, part_of
from .entropy import SPREADS, SYMBOLS, models, scale_counts, unscale_tables
from .head import (
    COLUMN_LEVELS,
    NEVER,
    ROW_LEVELS,
    BlockHead,
    RegionGrid,
    exponent,
    pack_head,
    pack_levels,
    pack_sizes,
    shift_rates,
)
from .levels import Floats, choose_levels, scatters
from .old_weights import CountedBefore, Counts, HostBlock, OldBlock, RankedChanges, RegionChanges
from .tiles import TILE, LevelBytes, grid_of, walked

FEW_CHANGES = 200
"""Regions with fewer changes have too few to choose levels from."""


Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""`map`, or the same on several threads."""


def rank_together(blocks: Sequence[BlockEncoder], before: Before, each: Each = map) -> Iterator[RankedChanges]:
    """Choose the classes of several blocks of one dtype, and rank their changes.

    Their old weights are counted at once, and not needed any more then: what they take is free for other blocks.
    """
    first = np.cumsum([0, *(len(block.regions) for block in blocks)]).tolist()
    regions = [region for block in blocks for region in block.regions]
    changes = [region.change for region in regions]
    counted = before.block([change.region for change in changes]) if isinstance(before, CountedBefore) else None
    old: OldBlock = counted or HostBlock(changes, before)
    seen = old.exponents(*blocks[0].exponent, [region.every for region in regions])

    def choose(number: int) -> None:
        blocks[number].choose(old, first[number], seen[first[number] : first[number + 1]])

    # all of them, before anything is ranked; without levels threads would take longer to start than to finish
    leveled = any(block.scatters for block in blocks)
    list((each if leveled else map)(choose, range(len(blocks))))
    rules = [block.rule.table(block.classes) for block in blocks for _ in block.regions]
    n, k, ranks, steps = old.ranks(regions, rules)
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

    def __init__(self, changes: Sequence[Change], units: Units) -> None:
        dtype = lookup(changes[0].region.tensor.dtype)
        self.exponent = shift, mask = exponent(dtype)
        """Lowest bit and mask of the exponent."""
        # all regions at once: each call releases the interpreter's lock, which other blocks are waiting for
        positions, old, new = units
        positions = positions.astype(np.uint32, copy=False)
        shapes = np.array([walked(change.region.rows, change.region.columns) for change in changes], np.int64)
        counts = np.array([change.count for change in changes], np.int64)
        zigzags, exponents = np.empty(positions.size, np.uint32), np.empty(positions.size, np.uint8)
        lines = np.zeros(shapes.sum(), np.int64)
        self._hits = np.zeros((len(changes), mask + 1), np.int64)
        """Changes of each region by their old exponent."""
        self._steps = np.zeros((mask + 1, SYMBOLS), np.int64)
        """Changes by old exponent and step."""
        scatter = np.empty(shapes.shape, np.bool_)
        good = _survey(
            positions, old, new, dtype.steps_are_signed, shift, mask, counts, shapes, zigzags, exponents, lines,
            scatter, self._hits, self._steps,
        )  # fmt: skip
        if good < len(changes):
            name = changes[good].region.tensor.name
            raise PositionError(f"the changed positions of {name!r} are not ascending in their region")
        self.regions: list[RegionChanges] = []
        at = 0
        for change, (rows, columns), (of_rows, of_columns) in zip(
            changes, shapes.tolist(), scatter.tolist(), strict=True
        ):
            here = slice(at, at + change.count)
            changed = positions[here], zigzags[here], exponents[here]
            grid = grid_of(rows, columns, TILE)
            self.regions.append(RegionChanges(change, rows, columns, *changed, grid, (of_rows, of_columns)))
            at = here.stop

    @property
    def scatters(self) -> bool:
        """Whether any region may have levels, which take long to choose."""
        return any(True in s.scatter for s in self.regions)

    def choose(self, old: OldBlock, first: int, seen: Counts) -> None:
        """Choose classes and levels. The regions are those of `old` from `first` on; `seen` are their exponents."""
        shift, mask = self.exponent
        # from a sample of rows
        scale = np.array([s.rows / -(-s.rows // s.every) for s in self.regions])[:, None]
        total, changed = np.maximum(seen[:, : mask + 1] * scale, self._hits).sum(0), self._steps
        self.rule = _choose_rule(total, changed, shift, mask, False)
        self._choose_levels(old, first, total, changed)
        if any(s.flags for s in self.regions):
            self.rule = _choose_rule(total, changed, shift, mask, True)
        self.classes = min(CLASSES, self.rule.span + 1 + (2 * LEVELS - 3 if self.rule.leveled else 0))

    def _choose_levels(self, old: OldBlock, first: int, total: Floats, changed: Floats) -> None:
        rule = self.rule
        x = rule.top - np.clip(np.arange(rule.mask + 1), rule.top - rule.span + 1, rule.top)
        rate = np.bincount(x, changed.sum(1)) / np.maximum(np.bincount(x, total), 1)
        for number, s in enumerate(self.regions, first):
            if s.positions.size > FEW_CHANGES and s.rows > 1 and True in s.scatter:
                s.row_levels, s.column_levels = choose_levels(old, number, s, rule.table(CLASSES), rate)

    def code(self, ranked: RankedChanges) -> Parts:
        """Code the block, in the parts that it is cut into."""
        cut = cut_of([region.change.region for region in self.regions])
        units, before = sum(region.change.region.units for region in self.regions), 0
        if cut == BlockCut(1, UNCUT):
            everything = [_whole(region) for region in self.regions]
            return [([(region.region, region.changed) for region in everything], self._code(everything, ranked))]
        n, k, ranks, zigzags = ranked
        changed = k.sum(1)
        coded: list[CodedRegion] = []
        # which of these each tile belongs to
        owner, first = np.empty(len(n), np.int64), 0
        for region in self.regions:
            at = np.empty(region.grid, np.int64)
            group = cut.group(before, units)
            before += region.change.region.units
            for tiles, part in _parts(region, cut.cut, group):
                at[tiles] = len(coded)
                coded.append(part)
            owner[first : first + region.tiles] = at.reshape(-1)
            first += region.tiles
        for part, count in zip(coded, np.bincount(owner, changed, len(coded)).astype(np.int64).tolist(), strict=True):
            part.changed = count
        result = []
        for where in np.ndindex(cut.groups, *cut.cut):
            here = [i for i, part in enumerate(coded) if part.part == where and part.changed]
            if here:
                mine, tile = [coded[i] for i in here], np.isin(owner, here)
                change = np.repeat(tile, changed)
                streams = self._code(mine, (n[tile], k[tile], ranks[change], zigzags[change]))
                result.append(([(part.region, part.changed) for part in mine], streams))
        return result

    def _code(self, regions: Sequence[CodedRegion], ranked: RankedChanges) -> Coded:
        rule, classes = self.rule, self.classes
        n, k, ranks, zigzags = ranked
        tiles = np.array([s.tiles for s in regions], np.int64)
        rates, inverse, offsets = np.empty(CLASSES, np.uint8), np.empty(CLASSES, np.bool_), np.empty_like(tiles)
        scaled, table = np.zeros((CLASSES, SYMBOLS), np.uint8), np.empty(CLASSES, np.uint8)
        lengths, sizes = np.empty(CLASSES, np.int64), np.empty(len(n), np.int64)
        room, size = 2 * ranks.size + 64 * len(n), -1
        while size < 0:
            room *= 4
            out, per_tile = np.empty(room, np.uint8), np.empty((len(n), CLASSES), np.uint8)
            weights, changed = (np.zeros((len(regions), CLASSES), np.int64) for _ in range(2))
            histogram, groups = (np.zeros((CLASSES, SYMBOLS), np.int64) for _ in range(2))
            tables = np.empty(CLASSES * (SYMBOLS + 1), np.uint16)
            floats, counts = np.empty(SYMBOLS), np.empty(SYMBOLS, np.int64)
            # one call: each releases the interpreter's lock, and waits behind all other threads to get it back
            size, spread, count = _code_tiles(
                n, k, ranks, zigzags, tiles, models(), SPREADS, weights, changed, histogram, groups, per_tile, tables,
                floats, counts, rates, inverse, offsets, scaled, lengths, table, out, sizes,
            )  # fmt: skip
        steps = [scaled[t, :length].tobytes() for t, length in enumerate(lengths[:count].tolist())]
        grids = [RegionGrid(*s.grid, s.flags, offset) for s, offset in zip(regions, offsets.tolist(), strict=True)]
        levels = [line for s in regions for line in (s.row_levels, s.column_levels) if line is not None]
        return Coded(
            {
                "head": pack_head(BlockHead(rule, classes, spread, rates, inverse, steps, table, grids)),
                "levels": b"".join(pack_levels(line) for line in levels),
                "sizes": pack_sizes(sizes),
                "tiles": out[:size].tobytes(),
            }
        )


@dataclass(slots=True)
class CodedRegion:
    """A region, or a part of one, whose tiles are coded together."""

    region: Region
    grid: tuple[int, int]
    row_levels: LevelBytes | None
    column_levels: LevelBytes | None
    changed: int
    part: tuple[int, int, int] = (0, 0, 0)
    """Group, row and column of the part of the block that it is in."""

    @property
    def tiles(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def flags(self) -> int:
        return ROW_LEVELS * (self.row_levels is not None) + COLUMN_LEVELS * (self.column_levels is not None)


def _whole(region: RegionChanges) -> CodedRegion:
    changed = region.change.count
    return CodedRegion(region.change.region, region.grid, region.row_levels, region.column_levels, changed)


def _parts(region: RegionChanges, cut: Cut, group: int) -> Iterator[tuple[tuple[slice, slice], CodedRegion]]:
    """The parts of a region, row by row, and which of its tiles they have. Their changes are not counted yet."""
    of_block, cut = cut, cut_within(region.change.region, region.grid, cut)
    down, across = region.grid[0] // cut[0], region.grid[1] // cut[1]
    for i, j in np.ndindex(cut):
        part, rows, columns = part_of(region.change.region, cut, i, j), region.row_levels, region.column_levels
        if cut != UNCUT:
            rows = None if rows is None else rows[i * part.rows : (i + 1) * part.rows]
            columns = None if columns is None else columns[j * part.columns : (j + 1) * part.columns]
        tiles = slice(i * down, (i + 1) * down), slice(j * across, (j + 1) * across)
        # with what is at the same place in other regions
        place = group, i * of_block[0] // cut[0], j * of_block[1] // cut[1]
        yield tiles, CodedRegion(part, (down, across), rows, columns, 0, place)


# ── what the head says ──


def _choose_rule(total: Floats, changed: Floats, shift: int, mask: int, leveled: bool) -> Rule:
    """The exponents worth telling apart."""
    most = CLASSES - ROW_NEUTRAL - COLUMN_NEUTRAL if leveled else CLASSES - 1
    low, high = _merge_ends(total.copy(), changed.copy(), most)
    return Rule(high, high - low + 1, leveled, shift, mask)


# ── kernels ──


@njit(nogil=True, cache=True, error_model="numpy")
def _code_tiles(
    n: Any, k: Any, ranks: Any, zigzags: Any, tiles: Any, models: Any, spreads: Any, weights: Any, changed: Any,
    histogram: Any, groups: Any, per_tile: Any, tables: Any, floats: Any, counts: Any, rates: Any, inverse: Any,
    offsets: Any, scaled: Any, lengths: Any, table: Any, out: Any, sizes: Any,
) -> Any:  # fmt: skip
    """Write the head into its arrays, and all tiles of regions with so many tiles each.

    Returns the length of the tiles (−1 where `out` is too small), which spread, and how many step tables. Sums and
    `groups` are zero before.
    """
    rate_of, first = models[5], np.int64(0)
    _sums(n, k, zigzags, tiles, weights, changed, histogram)
    _class_rates(weights, changed, rates, inverse)
    for region in range(tiles.size):
        offsets[region] = _offset(weights, changed, region, rates, inverse, rate_of)
        for t in range(first, first + tiles[region]):
            shift_rates(rates, inverse, offsets[region], per_tile[t])
        first += tiles[region]
    count = _group_steps(histogram, groups, counts, table)
    for t in range(count):
        lengths[t] = 0
        for i in range(SYMBOLS):
            if groups[t, i]:
                lengths[t] = i + 1
        scale_counts(groups[t], lengths[t], scaled[t])
    unscale_tables(scaled, count, floats, counts, tables)
    spread = _choose_spread(n, k, per_tile, inverse, rate_of, spreads)
    size = runs.encode_tiles(n, k, ranks, zigzags, per_tile, inverse, spread, tables, table, models, out, sizes)
    return size, spread, count


@njit(**LEAN)
def _class_rates(n: Any, k: Any, rates: Any, inverse: Any) -> None:
    """A byte per class, 8 per octave, for the rarer of changed and unchanged; and which of the two it is."""
    for c in range(CLASSES):
        total, changed = np.int64(0), np.int64(0)
        for region in range(n.shape[0]):
            total += n[region, c]
            changed += k[region, c]
        inverse[c] = 2 * changed > total
        rare = total - changed if inverse[c] else changed
        rates[c] = NEVER if rare <= 0 else min(max(np.rint(-8 * np.log2(rare / max(total, 1))), 0), NEVER - 1)


@njit(**LEAN)
def _offset(n: Any, k: Any, region: Any, rates: Any, inverse: Any, rate_of: Any) -> Any:
    """How far a region as a whole is from the block's rates, in the same eighths of an octave."""
    expected, seen = 0.0, np.int64(0)
    for c in range(CLASSES):
        if rates[c] != NEVER and not inverse[c]:
            expected += n[region, c] * rate_of[rates[c]]
            seen += k[region, c]
    return np.int64(min(max(np.rint(-8 * np.log2((seen + 0.5) / (expected + 0.5))), -127), 127))


@njit(**LEAN)
def _choose_spread(n: Any, k: Any, rates: Any, inverse: Any, rate_of: Any, spreads: Any) -> Any:
    """The table set nearest to how much counts really scatter around what the rates expect."""
    excess, total = 0.0, 0.0
    for t in range(n.shape[0]):
        for c in range(n.shape[1]):
            expected = n[t, c] * rate_of[rates[t, c]]
            if rates[t, c] != NEVER and expected > 4:
                seen = n[t, c] - k[t, c] if inverse[c] else k[t, c]
                excess += ((seen - expected) ** 2 - expected) / expected
                total += expected
    if total == 0:
        return 1
    best, least = 0, np.inf
    for number in range(len(spreads)):
        distance = abs(np.log(np.sqrt(max(excess / total, 1e-6)) / spreads[number]))
        if distance < least:
            best, least = number, distance
    return best


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
    """Bits of positions and steps if n weights, steps.sum() of which changed, share a class."""
    k = steps.sum()
    p = min(max(k / max(n, 1e-9), 1e-12), 1 - 1e-12)
    return _entropy(steps) - (k * np.log2(p) + max(n - k, 0.0) * np.log2(1 - p))


@njit(nogil=True, cache=True, error_model="numpy")
def _merge_ends(total: Any, changed: Any, most: Any) -> Any:
    """Return the lowest and highest exponent left after merging both ends.

    Ends are merged while that costs next to nothing, and until there are at most so many. Writes to its arguments.
    """
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
    """Sum weights and changes by [region, class], and steps by [class, symbol]; a region has so many tiles."""
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
def _survey(
    positions: Any, old: Any, new: Any, signed: Any, shift: Any, mask: Any, counts: Any, shapes: Any, zigzags: Any,
    exponents: Any, lines: Any, scatter: Any, hits: Any, steps: Any,
) -> Any:  # fmt: skip
    """All about the changes of each region that needs no other weights.

    `lines` is scratch: changes per row, then per column, region by region. Returns the number of the first region whose
    positions do not ascend or leave it; all: none.
    """
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
        scatter[number, 0] = scatters(lines, line, line + rows)
        scatter[number, 1] = scatters(lines, line + rows, line + rows + columns)
        line += rows + columns
    return counts.size
