"""Range coder and its tables: how a tile's counts, gaps and steps become bytes.

One tile is one byte string, so a tile can be decoded alone, by any core or GPU thread, with no neighbour's old weights.
That is why this is a range coder and not rANS: it ends within a byte of the entropy where an rANS state costs three to
four, and a tile is only about 500 bytes.

Gaps need no table in the file. Within a (tile, class) run the decoder knows n elements are left of which k changed, so
the gap to the next one is geometric with mean n/k, and for the last few exactly hypergeometric: both are formulas.
Knowing n and k also pays back what sending k costs, so small tiles are nearly free. The tables are made from integers
and from float64 +, −, ×, / and sqrt only, which IEEE 754 rounds the same way everywhere: two machines must agree on
every bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import uint64

from ...compiled import njit
from ...simd import LEAN, leading_zeros

PRECISION = 14
TOTAL = 1 << PRECISION
"""Sum of the frequencies of a table."""

SYMBOLS = 64
ESCAPE = SYMBOLS - 1
"""Every table has 64 symbols; the last one of a gap or count table is the escape."""

COUNT_BITS = 18
MAX_TILE = (1 << COUNT_BITS) - 1
"""Elements a tile may have: a count that escapes is sent in COUNT_BITS."""

FEW = 7
"""The last FEW changes of a run have tables of their own (hypergeometric)."""

DIRECT = 16
"""Steps up to ±8 ulps are symbols; larger ones a bit length and raw bits."""

SPREADS = (0.1, 0.35, 1.0)
"""How much counts of equal tiles may differ, relative; a block chooses one."""

LEVEL_MIN, LEVEL_OCTAVES = -6, 16
COUNT_LEVELS = LEVEL_OCTAVES * 4
"""Count tables exist for expected counts from 2^−6 to 2^10, four an octave."""

NEAR = 32
"""Gap tables before the hypergeometric ones."""

Cumulative = npt.NDArray[np.uint16]


def quantise(weights: Iterable[float]) -> Cumulative:
    """Cumulative frequencies (65, the last is TOTAL) of 64 weights; a positive weight keeps at least 1."""
    out = np.empty(SYMBOLS + 1, np.uint16)
    _quantise(np.array([float(w) for w in weights]), np.empty(SYMBOLS, np.int64), out, np.int64(0))
    return out


@njit(**LEAN)
def _quantise(weights: Any, freq: Any, out: Any, at: Any) -> None:
    """`quantise` to the table that begins at a place of `out`; `freq` is scratch."""
    total, spare = 0.0, np.int64(TOTAL)
    for w in weights:
        total += w
    for i in range(SYMBOLS):
        freq[i] = max(1, int(weights[i] / total * TOTAL)) if weights[i] > 0 else 0
        spare -= freq[i]
    # what rounding left over goes to (or comes from) the largest
    taken = uint64(0)
    while spare != 0:
        largest = -1
        for i in range(SYMBOLS):
            if not (taken >> uint64(i)) & uint64(1) and (largest < 0 or freq[i] > freq[largest]):
                largest = i
        taken |= uint64(1) << uint64(largest)
        take = spare if spare > 0 else -min(-spare, freq[largest] // 2)
        freq[largest] += take
        spare -= take
    below = np.int64(0)
    for i in range(SYMBOLS):
        out[at + i] = below
        below += freq[i]
    out[at + SYMBOLS] = below


def coarse(tables: Iterable[Cumulative]) -> npt.NDArray[np.uint8]:
    """Where the decoder's search starts: the first symbol possible for each table and top 6 bits of a value."""
    tops = np.arange(64) << (PRECISION - 6)
    return np.concatenate([np.searchsorted(table[1:], tops, side="right") for table in tables]).astype(np.uint8)


def scale(counts: npt.NDArray[np.int64]) -> bytes:
    """Counts as bytes of a small float, the largest near 255; 0 is absent.

    Eight steps an octave: coarse by 3 %, which costs 0.0005 bits a symbol.
    """
    out = np.empty(counts.size, np.uint8)
    scale_counts(counts, counts.size, out)
    return out.tobytes()


@njit(**LEAN)
def scale_counts(counts: Any, size: Any, out: Any) -> None:
    """`scale` of the first counts."""
    largest = np.int64(1)
    for i in range(size):
        largest = max(largest, counts[i])
    for i in range(size):
        # as (8 + m) << e
        x = counts[i] / largest * (15 << 31)
        e = max(int(np.log2(max(x, 1.0) / 8)), 0)
        out[i] = min(max(1 + 8 * e + int(np.rint(x / 2.0**e)) - 8, 1), 255) if counts[i] > 0 else 0


def unscale(table: bytes) -> Cumulative:
    """The frequencies that scaled bytes stand for, as a cumulative table."""
    return unscale_all([table])


def unscale_all(tables: Sequence[bytes]) -> Cumulative:
    """Unscale several tables, one behind the other."""
    scaled = np.frombuffer(b"".join(table.ljust(SYMBOLS, b"\0") for table in tables), np.uint8).copy()
    out = np.empty(len(tables) * (SYMBOLS + 1), np.uint16)
    unscale_tables(scaled.reshape(-1, SYMBOLS), len(tables), np.empty(SYMBOLS), np.empty(SYMBOLS, np.int64), out)
    return out


@njit(**LEAN)
def unscale_tables(scaled: Any, count: Any, weights: Any, freq: Any, out: Any) -> None:
    """`unscale_all` of so many rows; `weights` and `freq` are scratch."""
    for t in range(count):
        for i in range(SYMBOLS):
            v = np.int64(scaled[t, i])
            weights[i] = float((8 + (v - 1) % 8) << ((v - 1) // 8)) if v else 0.0
        _quantise(weights, freq, out, np.int64(t * (SYMBOLS + 1)))


def _gap_tables() -> list[Cumulative]:
    tables = []
    # 0..23: means 1 to 8, exact gaps; 24..31: means 4 to 8 in units of 2^s, s > 0
    for i in range(NEAR):
        octave, eighth = (i // 8, i % 8) if i < 24 else (2, i % 8)
        mean = (1 << octave) * (8 + eighth + 0.5) / 8
        if i < 24:
            stay = 1.0 - 1.0 / mean
        else:
            stay = 1.0 - 1.0 / (mean * 1024)
            for _ in range(10):
                stay *= stay
        w, weights = 1.0 - stay, []
        for _ in range(ESCAPE):
            weights.append(max(w, 1e-9))
            w *= stay
        tables.append(quantise([*weights, max(w / (1.0 - stay), 1e-9)]))
    for k in range(1, FEW + 1):
        for last in range(1, ESCAPE + 1):
            # exact for short runs: ways to place the other k − 1 behind; else the same as a density over buckets
            if last < 32:
                ways = [math.comb(last - q + k - 1, k - 1) for q in range(last + 1)]
            else:
                ways = [(last + 1 - q) ** k - (last - q) ** k for q in range(last + 1)]
            tables.append(quantise(ways + [0] * (SYMBOLS - len(ways))))
    return tables


def _count_tables() -> tuple[list[Cumulative], npt.NDArray[np.uint8]]:
    """Negative binomial in buckets of 2^shift: cumulative tables of all spreads and levels, and the shifts."""
    tables, shifts = [], []
    for spread in SPREADS:
        for level in range(COUNT_LEVELS):
            mean = 2.0 ** (level // 4 + LEVEL_MIN) * (4 + level % 4 + 0.5) / 4
            r, mode, scatter = 1.0 / (spread * spread), int(mean), spread * mean
            top = int(mean + 7.0 * float(np.sqrt(mean + scatter * scatter))) + 2
            # P(k + 1) / P(k)
            ratio = (np.arange(top) + r) / (np.arange(top) + 1.0) * (mean / (mean + r))
            chance = np.ones(top + 1)
            chance[mode + 1 :] = np.cumprod(ratio[mode:])
            chance[:mode] = np.cumprod(1.0 / ratio[:mode][::-1])[::-1]
            shift = 0
            while (top >> shift) >= ESCAPE:
                shift += 1
            weights = [1e-7] * SYMBOLS
            for k in range(top + 1):
                weights[k >> shift] += float(chance[k])
            tables.append(quantise(weights))
            shifts.append(shift)
    return tables, np.array(shifts, np.uint8)


_EIGHTH = np.sqrt(np.sqrt(np.sqrt(np.float64(0.5))))
RATE = np.cumprod(np.concatenate([[1.0], np.full(255, _EIGHTH)]))
"""RATE[b] = 2^(−b/8): how often a class changes, in one byte."""


@cache
def models() -> tuple[npt.NDArray[Any], ...]:
    """Return the tables as kernels take them: one behind the other.

    A row of a matrix would be an object with a reference count. As globals they would be compiled into every kernel
    that uses them and stay in its cache. They are made on first use, which is a tenth of the start of a command that
    codes nothing.
    """
    gaps, (counts, shifts) = _gap_tables(), _count_tables()
    return np.concatenate(gaps), coarse(gaps), np.concatenate(counts), coarse(counts), shifts, RATE


# ── encoder: a tile is first a list of operations (start, frequency, bits), then one tight loop makes bytes of them ──


@njit(nogil=True, cache=True, inline="always")
def _operation(start: Any, frequency: Any, bits: Any) -> Any:
    return uint64(start) | (uint64(frequency) << uint64(20)) | (uint64(bits) << uint64(40))


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def put_symbol(ops: Any, at: Any, tables: Any, table: Any, symbol: Any) -> Any:
    # unsigned: a signed index would be checked for counting from the end
    i = uint64(table) * uint64(SYMBOLS + 1) + uint64(symbol)
    low, high = uint64(tables[i]), uint64(tables[i + uint64(1)])
    ops[at] = _operation(low, high - low, PRECISION)
    return at + 1


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def put_bits(ops: Any, at: Any, value: Any, bits: Any) -> Any:
    # the range is at least 2^24: twelve bits at a time leave 2^12, enough to stay exact
    while bits > 12:
        ops[at] = _operation(value & uint64(4095), 1, 12)
        at += 1
        value >>= uint64(12)
        bits -= 12
    if bits > 0:
        ops[at] = _operation(value, 1, bits)
        at += 1
    return at


@njit(**LEAN)
def encode_ops(ops: Any, count: Any, out: Any, at: Any) -> Any:
    """Append the bytes of ops[:count] to out (room: 3 bytes per operation and 8 more); returns where they end."""
    first = at
    low, span = uint64(0), uint64(0xFFFFFFFF)
    for i in range(count):
        op = ops[i]
        part = span >> (op >> uint64(40))
        low += part * (op & uint64(0xFFFFF))
        span = part * ((op >> uint64(20)) & uint64(0xFFFFF))
        if low >> uint64(32):
            _carry(out, first, at)
            low &= uint64(0xFFFFFFFF)
        while span < uint64(1 << 24):
            out[at] = low >> uint64(24)
            at += 1
            low = (low << uint64(8)) & uint64(0xFFFFFFFF)
            span <<= uint64(8)
    # the shortest tail whose value, padded with zeros, lies in [low, low + span)
    for size in range(5):
        mask = (uint64(1) << uint64(32 - 8 * size)) - uint64(1)
        value = (low + mask) & ~mask
        if value < low + span:
            if value >> uint64(32):
                _carry(out, first, at)
            for b in range(size):
                out[at] = (value >> uint64(24 - 8 * b)) & uint64(255)
                at += 1
            return at
    return at


@njit(**LEAN)
def _carry(out: Any, first: Any, at: Any) -> None:
    p = at - 1
    while p >= first and out[p] == 255:
        out[p] = 0
        p -= 1
    if p >= first:
        out[p] += 1


# ── decoder: state is (code, span, at); bytes past the end read as zero, and `at` tells how far past they were read ──


@njit(**LEAN)
def start_decode(data: Any, at: Any, end: Any) -> Any:
    code = uint64(0)
    for _ in range(4):
        code = (code << uint64(8)) | (uint64(data[at]) if at < end else uint64(0))
        at += 1
    return code, uint64(0xFFFFFFFF), at


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def get_symbol(code: Any, span: Any, at: Any, data: Any, end: Any, tables: Any, first: Any, table: Any) -> Any:
    part = span >> uint64(PRECISION)
    v = code // part
    # only a damaged stream gets here; clamped, it stays inside the table
    if v >= uint64(TOTAL):
        v = uint64(TOTAL - 1)
    row = uint64(table) * uint64(SYMBOLS + 1)
    i = row + uint64(first[uint64(table) * uint64(64) + (v >> uint64(PRECISION - 6))])
    while uint64(tables[i + uint64(1)]) <= v:
        i += uint64(1)
    low, high = uint64(tables[i]), uint64(tables[i + uint64(1)])
    code -= part * low
    span = part * (high - low)
    while span < uint64(1 << 24):
        code = ((code << uint64(8)) | (uint64(data[at]) if at < end else uint64(0))) & uint64(0xFFFFFFFF)
        at += 1
        span <<= uint64(8)
    return code, span, at, np.int64(i - row)


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def get_bits(code: Any, span: Any, at: Any, data: Any, end: Any, bits: Any) -> Any:
    value, done = uint64(0), 0
    while bits > 0:
        b = min(bits, 12)
        span >>= uint64(b)
        v = code // span
        if v >> uint64(b):
            v = (uint64(1) << uint64(b)) - uint64(1)
        code -= span * v
        while span < uint64(1 << 24):
            code = ((code << uint64(8)) | (uint64(data[at]) if at < end else uint64(0))) & uint64(0xFFFFFFFF)
            at += 1
            span <<= uint64(8)
        value |= v << uint64(done)
        done += b
        bits -= b
    return code, span, at, value


# ── the models: which table a gap or a count uses ──


@njit(nogil=True, cache=True, error_model="numpy")
def _log2(x: Any) -> Any:
    return 63 - leading_zeros(uint64(x))


@njit(nogil=True, cache=True, error_model="numpy")
def gap_model(n: Any, k: Any) -> Any:
    """Table and bucket shift for the gap before the next of k among n left (0 < k < n)."""
    if k <= FEW:
        shift = max(_log2(n - k) - 5, 0)
        return NEAR + (k - 1) * ESCAPE + ((n - k) >> shift) - 1, shift
    eighths = (n * 8) // k
    octave = _log2(eighths) - 3
    eighth = (eighths >> octave) - 8
    if octave <= 2:
        return octave * 8 + eighth, 0
    return 24 + eighth, octave - 2


@njit(nogil=True, cache=True, error_model="numpy")
def count_model(expected: Any) -> Any:
    """Table (within a spread) for an expected count, and the extra shift beyond the largest one."""
    extra = 0
    while expected >= 2.0 ** (LEVEL_MIN + LEVEL_OCTAVES):
        expected *= 0.5
        extra += 1
    scaled, octave = max(expected * 2.0**-LEVEL_MIN, 1.0), 0
    while scaled >= 2.0:
        scaled *= 0.5
        octave += 1
    return octave * 4 + int((scaled - 1.0) * 4.0), extra
