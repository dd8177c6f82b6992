"""Row and column levels: how much likelier than its exponents say a row or a column is to change.

A level is an octave. The writer picks for every row the level that saves the most bits after paying for the level
itself, and drops the levels of a segment that do not pay as a whole. In RL most rows of an embedding may not move.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...compiled import njit
from ...simd import LEAN
from .classes import COLUMN_NEUTRAL, DEAD, LEVELS, ROW_NEUTRAL, Table, changes_by_line
from .head import LEVEL_HEAD
from .old_weights import OldBlock, RegionChanges
from .tiles import LevelBytes

MIN_GAIN = 0.03
"""Bits per change: less is noise, and more classes cost a little themselves."""

ROUNDS = 4
"""How often levels are chosen for rates, then rates for levels."""

ENOUGH = 4096
"""Lines that rates and prices are estimated from."""

MARGIN = 4
"""Likelihoods below the least likely exponent, and above the likeliest, that levels may lead to."""

Floats = npt.NDArray[Any]


def choose_levels(
    old: OldBlock, number: int, region: RegionChanges, rule: Table, rate: Floats
) -> tuple[LevelBytes | None, LevelBytes | None]:
    """Levels of a region's rows and columns, None where they do not pay.

    `number` is that of the region in its block, `rate` is how often each exponent of the rule changes, likeliest last.
    Rows come first, then columns given the rows (dead rows must not count), then rows again given the columns.
    """
    rows, columns, (rows_scatter, columns_scatter) = region.rows, region.columns, region.scatter
    below = rate[0] * 0.5 ** np.arange(MARGIN, 0, -1)
    rates = np.clip(np.concatenate([below, rate, np.full(MARGIN, rate[-1])]), 1e-7, 0.98)
    of_rows = of_columns = None

    def by_row(column_levels: LevelBytes | None) -> LevelBytes | None:
        plus = np.full(columns, MARGIN, np.uint8)
        if column_levels is not None:
            plus = column_levels + np.uint8(MARGIN - COLUMN_NEUTRAL)
        hit = np.zeros((rows, rates.size), np.float32)
        changes_by_line(columns, rule, plus.astype(np.int64), True, region.positions, region.exponents, hit)
        return _choose(old.by_row(number, rule, plus, rates.size), hit, rates, ROW_NEUTRAL, True)

    def by_column(row_levels: LevelBytes | None) -> LevelBytes | None:
        plus = np.full(rows, MARGIN, np.int64)
        if row_levels is not None:
            plus = np.where(row_levels == DEAD, -1, row_levels.astype(np.int64) + MARGIN - ROW_NEUTRAL)
        hit = np.zeros((columns, rates.size), np.float32)
        changes_by_line(columns, rule, plus, False, region.positions, region.exponents, hit)
        return _choose(old.by_column(number, rule, plus, rates.size), hit, rates, COLUMN_NEUTRAL, False)

    if rows_scatter:
        of_rows = by_row(None)
    if columns_scatter:
        of_columns = by_column(of_rows)
    if rows_scatter and of_columns is not None:
        of_rows = by_row(of_columns)
    return of_rows, of_columns


@njit(**LEAN)
def scatters(changed: Any, first: Any, last: Any) -> Any:
    """Whether counts differ by more than chance makes them, by which a variance equals the mean.

    The counts are those from `first` to before `last`.
    """
    total, squares = 0, 0.0
    for i in range(first, last):
        total += changed[i]
    mean = total / (last - first)
    for i in range(first, last):
        squares += (changed[i] - mean) ** 2
    return squares > 1.2 * (mean + 0.5) * (last - first)


def _choose(seen: Floats, hit: Floats, base: Floats, neutral: int, dead: bool) -> LevelBytes | None:
    """Levels for lines (rows or columns) with these weights and changes per likelihood; None if they do not pay.

    What a level saves is what the coder will save: the weights of a line move to the class of another likelihood.
    Levels are chosen for given rates of change and prices of levels, then both are taken from the choice, a few times.
    """
    still = np.maximum(seen - hit, 0)
    picked, cost, rate = np.empty(len(seen), np.uint8), np.full(LEVELS, 2, np.float32), base
    # rates and prices are means over all lines: some thousand lines give the same
    every = max(1, len(seen) // ENOUGH)
    some = (
        np.ascontiguousarray(still[::every]),
        np.ascontiguousarray(hit[::every]),
        np.empty(len(seen[::every]), np.uint8),
    )
    for lines in (*(ROUNDS - 1) * [some], (still, hit, picked)):
        _pick(*lines[:2], *_moves(rate, neutral, dead), cost, dead, lines[2])
        count = np.bincount(lines[2], minlength=LEVELS)
        cost = -np.log2((count + 0.5) / (count.sum() + 0.5 * LEVELS)).astype(np.float32)
        changed, total = 4.0 * base, np.full(base.size, 4.0)
        _recount(*lines, neutral, dead, changed, total)
        rate = np.clip(changed / total, 1e-7, 0.98)
    saved = _saved(still, hit, *_moves(base, neutral, dead), cost, picked) - 8 * LEVEL_HEAD
    return picked if saved > MIN_GAIN * hit.sum() else None


def _moves(rate: Floats, neutral: int, dead: bool) -> tuple[Floats, Floats]:
    """Bits that a changed and an unchanged weight of each likelihood save at each level."""
    to = np.clip(np.arange(rate.size) + np.arange(LEVELS)[:, None] - neutral, 0, rate.size - 1)
    changed, kept = np.log2(rate), np.log2(1 - rate)
    change, keep = changed[to] - changed, kept[to] - kept
    if dead:
        change[DEAD], keep[DEAD] = 0, -kept
    return change.astype(np.float32), keep.astype(np.float32)


@njit(nogil=True, cache=True, fastmath=True)
def _pick(still: Any, hit: Any, change: Any, keep: Any, cost: Any, dead: bool, picked: Any) -> None:
    """The level of each line that saves the most after its price; only a line without changes may be dead."""
    for i in range(still.shape[0]):
        changes = np.float32(0)
        for x in range(still.shape[1]):
            changes += hit[i, x]
        best = np.float32(-1e30)
        for level in range(1 if dead and changes > 0 else 0, LEVELS if dead else LEVELS - 1):
            # not two matrix products: those would start as many BLAS threads as there are cores
            gain = -cost[level]
            for x in range(still.shape[1]):
                gain += hit[i, x] * change[level, x] + still[i, x] * keep[level, x]
            if gain > best:
                best = gain
                picked[i] = level


@njit(nogil=True, cache=True, fastmath=True)
def _saved(still: Any, hit: Any, change: Any, keep: Any, cost: Any, picked: Any) -> float:
    """Bits that picked levels save in all."""
    total = 0.0
    for i in range(still.shape[0]):
        level = picked[i]
        gain = -cost[level]
        for x in range(still.shape[1]):
            gain += hit[i, x] * change[level, x] + still[i, x] * keep[level, x]
        total += gain
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def _recount(still: Any, hit: Any, picked: Any, neutral: Any, dead: Any, changed: Any, total: Any) -> None:
    """Add what each likelihood has once every line has moved to its level."""
    for i in range(still.shape[0]):
        if not (dead and picked[i] == DEAD):
            for x in range(still.shape[1]):
                to = min(max(x + picked[i] - neutral, 0), still.shape[1] - 1)
                changed[to] += hit[i, x]
                total[to] += hit[i, x] + still[i, x]
