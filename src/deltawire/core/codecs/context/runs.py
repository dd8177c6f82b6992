"""A tile's changes as bytes: for each class the count, then the gaps, then the steps, in one range-coded string.

Both directions take the class counts n of the tile's old weights (from classes.py, or from a GPU), so this part runs on
the host while ranks and positions stay on the device. All input of decode_tile is hostile: it returns an error code
instead of following a count past its class, a rank past its run or a read past its string.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint64

from ...compiled import njit
from ...errors import CorruptStream, CountMismatch, FormatError, PositionError
from ...simd import LEAN
from .classes import CLASSES
from .entropy import (
    COUNT_BITS,
    COUNT_LEVELS,
    DIRECT,
    ESCAPE,
    MAX_TILE,
    NEAR,
    count_model,
    encode_ops,
    gap_model,
    get_bits,
    get_symbol,
    put_bits,
    put_symbol,
    start_decode,
)
from .head import NEVER

OK, OVERRUN, BAD_COUNT, BAD_GAP, BAD_STEP, TOO_MANY, LEFT_OVER = range(7)
PROBLEMS: dict[int, tuple[type[FormatError], str]] = {
    OVERRUN: (CorruptStream, "a tile's bytes end before its changes do"),
    BAD_COUNT: (CountMismatch, "a tile has more changes of a class than weights"),
    BAD_GAP: (PositionError, "a rank lies outside its class"),
    BAD_STEP: (CorruptStream, "a step is wider than its dtype"),
    TOO_MANY: (CountMismatch, "a region has more changes than its count"),
    LEFT_OVER: (CorruptStream, "a tile's bytes go on after its changes"),
}

_MAX_ESCAPES = MAX_TILE // ESCAPE + 1
"""An escape skips at least ESCAPE elements of the tile."""

_TAIL = 4
"""The decoder reads so many bytes ahead; what it reads past the end is zero."""


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def step_symbol(zigzag: Any) -> Any:
    """Symbol of a zigzagged step, its raw bits and how many."""
    z = uint64(zigzag)
    if z < uint64(DIRECT):
        return np.int64(z), uint64(0), 0
    z -= uint64(DIRECT - 1)
    bits = 0
    while z >> uint64(bits + 1):
        bits += 1
    return DIRECT + bits, z - (uint64(1) << uint64(bits)), bits


@njit(**LEAN)
def _put_count(ops: Any, at: Any, sent: Any, expected: Any, spread: Any, tables: Any, shifts: Any) -> Any:
    level, extra = count_model(expected)
    level += spread * COUNT_LEVELS
    shift = int(shifts[level]) + extra
    q = sent >> shift
    if q >= ESCAPE:
        q, shift = ESCAPE, COUNT_BITS
    at = put_symbol(ops, at, tables, level, q)
    return put_bits(ops, at, uint64(sent & ((1 << shift) - 1)), shift)


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _put_gap(ops: Any, at: Any, n: Any, k: Any, gap: Any, tables: Any) -> Any:
    # n == k: all that is left changed, nothing to say
    while n > k:
        table, shift = gap_model(n, k)
        q = gap >> shift
        if table < NEAR and q >= ESCAPE:
            at = put_symbol(ops, at, tables, table, ESCAPE)
            gap -= ESCAPE << shift
            n -= ESCAPE << shift
            continue
        at = put_symbol(ops, at, tables, table, q)
        return put_bits(ops, at, uint64(gap & ((1 << shift) - 1)), shift)
    return at


@njit(**LEAN)
def _tile_operations(
    n: Any, k: Any, ranks: Any, zigzags: Any, rates: Any, inverse: Any, spread: Any, step_tables: Any,
    step_table: Any, models: Any, at: Any, ops: Any,
) -> Any:  # fmt: skip
    """What one tile is coded by, into ops; returns how many operations, and where the next tile's changes begin."""
    gap_tables, _, count_tables, _, shifts, rate_of = models
    count = np.int64(0)
    for c in range(1, CLASSES):
        left, kc = n[c], k[c]
        if left == 0:
            continue
        if rates[c] != NEVER:
            sent = left - kc if inverse[c] else kc
            count = _put_count(ops, count, sent, left * rate_of[rates[c]], spread, count_tables, shifts)
        # a run codes whichever is rarer, the changed or the others
        if 2 * kc <= left:
            todo, previous = kc, -1
            for i in range(at, at + kc):
                gap = np.int64(ranks[i]) - previous - 1
                count = _put_gap(ops, count, left, todo, gap, gap_tables)
                left -= gap + 1
                todo -= 1
                previous = np.int64(ranks[i])
        else:
            size, i, todo, previous = left, at, left - kc, -1
            for rank in range(size):
                if i < at + kc and ranks[i] == rank:
                    i += 1
                    continue
                gap = rank - previous - 1
                count = _put_gap(ops, count, left, todo, gap, gap_tables)
                left -= gap + 1
                todo -= 1
                previous = rank
        for i in range(at, at + kc):
            symbol, raw, bits = step_symbol(zigzags[i])
            count = put_symbol(ops, count, step_tables, step_table[c], symbol)
            count = put_bits(ops, count, raw, bits)
        at += kc
    return count, at


@njit(nogil=True, cache=True, error_model="numpy")
def encode_tiles(
    n: Any, k: Any, ranks: Any, zigzags: Any, rates: Any, inverse: Any, spread: Any, step_tables: Any,
    step_table: Any, models: Any, out: Any, sizes: Any,
) -> Any:  # fmt: skip
    """Bytes of all tiles into out, their sizes into sizes; returns the length, or −1 where out is too small."""
    most = 0
    for t in range(n.shape[0]):
        total = _MAX_ESCAPES
        for c in range(CLASSES):
            total += 3 * min(k[t, c], n[t, c] - k[t, c]) + 5 * k[t, c] + 4
        most = max(most, total)
    ops = np.empty(most, np.uint64)
    # for a plain 0, numba compiles what it is passed to twice
    at, end = np.int64(0), np.int64(0)
    for t in range(n.shape[0]):
        count, at = _tile_operations(
            n[t], k[t], ranks, zigzags, rates[t], inverse, spread, step_tables, step_table, models, at, ops
        )
        if end + 3 * count + 8 > out.size:
            return -1
        start = end
        end = encode_ops(ops, count, out, start)
        sizes[t] = end - start
    return end


@njit(**LEAN)
def decode_tile(coding: Any, start: Any, end: Any, n: Any, k: Any, ranks: Any, zigzags: Any) -> Any:
    """Counts k, ranks and zigzagged steps of the tile whose string is data[start:end]; returns (error, how many)."""
    (
        data, rates, inverse, spread, step_tables, step_coarse, step_table, step_limit,
        gap_tables, gap_coarse, count_tables, count_coarse, shifts, rate_of,
    ) = coding  # fmt: skip
    code, span, pos = start_decode(data, start, end)
    at = 0
    k[0] = 0
    for c in range(1, CLASSES):
        size = n[c]
        k[c] = 0
        if size == 0:
            continue
        if rates[c] == NEVER:
            kc = size if inverse[c] else 0
        else:
            level, extra = count_model(size * rate_of[rates[c]])
            level += spread * COUNT_LEVELS
            shift = int(shifts[level]) + extra
            code, span, pos, q = get_symbol(code, span, pos, data, end, count_tables, count_coarse, level)
            if q == ESCAPE:
                q, shift = 0, COUNT_BITS
            code, span, pos, low = get_bits(code, span, pos, data, end, shift)
            kc = (q << shift) + np.int64(low)
            if kc > size:
                return BAD_COUNT, 0
            if inverse[c]:
                kc = size - kc
        if at + kc > ranks.size:
            return TOO_MANY, 0
        if pos > end + _TAIL:
            return OVERRUN, 0
        k[c] = kc
        changed = 2 * kc <= size
        todo = kc if changed else size - kc
        left, rank, to = size, 0, at
        while todo > 0:
            gap, room = 0, left - todo
            while left > todo:
                table, shift = gap_model(left, todo)
                code, span, pos, q = get_symbol(code, span, pos, data, end, gap_tables, gap_coarse, table)
                if table < NEAR and q == ESCAPE:
                    gap += ESCAPE << shift
                    left -= ESCAPE << shift
                    if gap > room:
                        return BAD_GAP, 0
                    continue
                code, span, pos, low = get_bits(code, span, pos, data, end, shift)
                q = (q << shift) + np.int64(low)
                gap += q
                left -= q
                break
            if gap > room:
                return BAD_GAP, 0
            if pos > end + _TAIL:
                return OVERRUN, 0
            if changed:
                rank += gap
                ranks[to] = rank
                to += 1
            else:
                for _ in range(gap):
                    ranks[to] = rank
                    to += 1
                    rank += 1
            rank += 1
            left -= 1
            todo -= 1
        if not changed:
            while rank < size:
                ranks[to] = rank
                to += 1
                rank += 1
        for i in range(at, at + kc):
            code, span, pos, symbol = get_symbol(code, span, pos, data, end, step_tables, step_coarse, step_table[c])
            z = uint64(symbol)
            if symbol >= DIRECT:
                bits = symbol - DIRECT
                if bits > 31:
                    return BAD_STEP, 0
                code, span, pos, low = get_bits(code, span, pos, data, end, bits)
                z = (uint64(1) << uint64(bits)) + low + uint64(DIRECT - 1)
            if z >= step_limit:
                return BAD_STEP, 0
            if pos > end + _TAIL:
                return OVERRUN, 0
            zigzags[i] = z
        at += kc
    if pos > end + _TAIL:
        return OVERRUN, 0
    if pos < end:
        return LEFT_OVER, 0
    return OK, at
