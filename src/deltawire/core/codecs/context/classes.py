"""Classes of old weights, and ranks within them: the only work the context codec does per weight.

A weight's class says how likely it is to change, from what both sides know: its old exponent (a weight half as large
changes about twice as often: the update is the same, the ulp is half), plus a level for its row and one for its column
where the writer found they pay. A position is sent as its rank among the weights of its class in its tile, so unlikely
places cost nothing to skip.

Rows of a tile are read in chunks of 128, whose classes are computed and counted with vector instructions; a change is
then found within its chunk from a bit mask. Kernels see old weights as bytes and a unit size: compiled once, they serve
every dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import int64, uint8, uint16, uint32, uint64

from ...compiled import njit
from ...simd import LANES, LEAN, classify, equal_mask, popcount, prefetch, trailing_zeros

CHUNK = 128
"""Weights of a row whose classes are counted together: the counts fit a byte."""

CLASSES = 32
"""Room for classes. Class 0 is for rows that did not change at all: nothing of it is ever coded."""

LEVELS = 6
"""Levels of a row: DEAD and 1 to 5, of a column: 0 to 4. One up is as if the exponent were one lower."""

DEAD = 0
ROW_NEUTRAL, COLUMN_NEUTRAL = 3, 2
"""Levels that are no likelier than the exponents say."""

NONE = 255
"""Class of the padding behind a chunk that ends early."""

SPARE = 4 * CHUNK
"""Bytes of a chunk of the widest units."""

_AHEAD = 8
"""Rows fetched ahead: rows of a tile lie far apart, and the hardware does not see them coming."""

Table = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rule:
    """How a block's weights get their class: clamp(top − exponent, 0, span − 1) + row level + column level."""

    top: int
    """Exponents from here up are the least likely class."""
    span: int
    """Exponents told apart, downwards from top."""
    leveled: bool
    """Whether any segment has row or column levels."""
    shift: int
    """Lowest bit of the dtype's exponent."""
    mask: int
    """Mask of the exponent after the shift. Both are 0 for a dtype without an exponent."""

    def table(self, classes: int) -> Table:
        """Shift, mask, low, top, offset, classes: as kernels take it.

        Without levels every row and column is neutral; the offset takes that back, but for one class: 0 is taken.
        """
        offset = self.top - (0 if self.leveled else ROW_NEUTRAL + COLUMN_NEUTRAL - 1)
        return np.array([self.shift, self.mask, self.top - self.span + 1, self.top, offset % 256, classes], np.int64)


@njit(nogil=True, cache=True, error_model="numpy")
def _address(array: Any) -> Any:
    # signed: numba would make a float of unsigned plus signed
    return int64(array.ctypes.data)


@njit(**LEAN)
def _chunk_classes(
    source: Any, size: Any, levels: Any, out: Any, shift: Any, mask: Any, low: Any, top: Any, offset: Any,
    row_level: Any, limit: Any,
) -> None:  # fmt: skip
    """Classes of a whole chunk. Addresses and scalars only: handing arrays down costs more than the work."""
    if size == 2:
        for half in range(0, CHUNK, LANES):
            at = source + half * 2
            classify(at, levels + half, out + half, uint16(shift), mask, low, top, offset, row_level, limit)
    elif size == 1:
        for half in range(0, CHUNK, LANES):
            at = source + half
            classify(at, levels + half, out + half, uint8(shift), mask, low, top, offset, row_level, limit)
    else:
        for half in range(0, CHUNK, LANES):
            at = source + half * 4
            classify(at, levels + half, out + half, uint32(shift), mask, low, top, offset, row_level, limit)


@njit(**LEAN)
def _classify_rows(
    units: Any, size: Any, stride: Any, rule: Any, row_levels: Any, column_levels: Any, r0: Any, r1: Any, c0: Any,
    c1: Any, cls: Any,
) -> None:  # fmt: skip
    """Classes of [r0:r1, c0:c1], a chunk after the other, padded with NONE. Chunks of dead rows are left as they are.

    `units` are the bytes of the old weights, [r, c] being unit r · stride + c. column_levels reach CHUNK past the end,
    and cls has SPARE bytes more than chunks.
    """
    source, levels, out, edge = _address(units), _address(column_levels), _address(cls), cls.size - SPARE
    shift, mask, low, top = rule[0], uint8(rule[1]), uint8(rule[2]), uint8(rule[3])
    offset, limit, ahead = uint8(rule[4]), uint8(rule[5] - 1), _AHEAD * stride * size
    i = 0
    for r in range(r0, r1):
        for b in range(c0, c1, CHUNK):
            if row_levels[r] != DEAD:
                at = (r * stride + b) * size
                here = source + at
                if at + CHUNK * size > units.size:
                    # the end of the memory: nothing behind it may be read
                    for j in range((c1 - b) * size):
                        cls[edge + j] = units[at + j]
                    here = out + edge
                else:
                    for line in range(0, CHUNK * size, 64):
                        prefetch(here + ahead + line)
                _chunk_classes(
                    here, size, levels + b, out + i * CHUNK, shift, mask, low, top, offset, row_levels[r], limit
                )
                for j in range(c1 - b, CHUNK):
                    cls[i * CHUNK + j] = NONE
            i += 1


@njit(**LEAN)
def classify_tile(
    units: Any, size: Any, stride: Any, rule: Any, row_levels: Any, column_levels: Any, r0: Any, r1: Any, c0: Any,
    c1: Any, cls: Any, hist: Any, n: Any,
) -> None:  # fmt: skip
    """Classes `cls` and class counts `hist` of every chunk of a tile, for rank_tile or place_tile; and its counts n."""
    _classify_rows(units, size, stride, rule, row_levels, column_levels, r0, r1, c0, c1, cls)
    chunk, classes = _address(cls), rule[5]
    n[:] = 0
    i = 0
    for r in range(r0, r1):
        for _ in range(c0, c1, CHUNK):
            hist[i, :] = 0
            if row_levels[r] != DEAD:
                for c in range(1, classes):
                    count = popcount(equal_mask(chunk + i * CHUNK, uint8(c)))
                    count += popcount(equal_mask(chunk + i * CHUNK + LANES, uint8(c)))
                    hist[i, c] = count
                    n[c] += count
            i += 1


@njit(nogil=True, cache=True, error_model="numpy")
def _rank_in_chunk(chunk: Any, c: Any, column: Any) -> Any:
    """How many before this column are of class c."""
    before = (uint64(1) << uint64(column & 63)) - uint64(1)
    if column < LANES:
        return popcount(equal_mask(chunk, c) & before)
    return popcount(equal_mask(chunk, c)) + popcount(equal_mask(chunk + LANES, c) & before)


@njit(nogil=True, cache=True, error_model="numpy")
def _find_in_chunk(chunk: Any, c: Any, rank: Any) -> Any:
    """Column of the weight of class c with this rank. The caller knows from the counts that there is one."""
    mask, column, here = equal_mask(chunk, c), 0, popcount(equal_mask(chunk, c))
    if rank >= here:
        mask, column, rank = equal_mask(chunk + LANES, c), LANES, rank - here
    while rank > 0:
        mask &= mask - uint64(1)
        rank -= 1
    return column + (trailing_zeros(mask) & 63)


@njit(nogil=True, cache=True, error_model="numpy")
def rank_tile(
    classes: Any, r0: Any, r1: Any, c0: Any, c1: Any, columns: Any, cls: Any, hist: Any, positions: Any, cursor: Any,
    k: Any, found: Any, run_rank: Any, run_from: Any,
) -> Any:  # fmt: skip
    """Changed counts k, and the changed of a tile that is classified, in (class, rank) order; returns how many changed.

    cursor[r] is where row r's changes continue in positions; tiles of a band come left to right and move it on. `found`
    is scratch, three rows of it. run_rank[i] is the rank of the i-th, run_from[i] its index in positions.
    """
    chunk, before, start = _address(cls), np.zeros(CLASSES, np.int64), np.zeros(CLASSES + 1, np.int64)
    k[:] = 0
    total, i = 0, 0
    for r in range(r0, r1):
        at = cursor[r]
        for b in range(c0, c1, CHUNK):
            first = r * columns + b
            stop = first + min(CHUNK, c1 - b)
            while at < positions.size and positions[at] < stop:
                j = positions[at] - first
                c = cls[i * CHUNK + j]
                found[0, total] = c
                found[1, total] = before[c] + _rank_in_chunk(chunk + i * CHUNK, c, j)
                found[2, total] = at
                k[c] += 1
                total += 1
                at += 1
            for c in range(classes):
                before[c] += hist[i, c]
            i += 1
        cursor[r] = at
    for c in range(classes):
        start[c + 1] = start[c] + k[c]
    for i in range(total):
        c = found[0, i]
        run_rank[start[c]] = found[1, i]
        run_from[start[c]] = found[2, i]
        start[c] += 1
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def place_tile(
    classes: Any, r0: Any, c0: Any, across: Any, used: Any, cls: Any, hist: Any, k: Any, ranks: Any, fill: Any,
    out_row: Any, out_column: Any, out_from: Any,
) -> Any:  # fmt: skip
    """Rows, columns and run index of a tile's changed, row by row: the inverse of rank_tile.

    Ranks are below the class counts (decode_tile saw to it), so the walk along a class's counts ends inside the tile.
    `used` is how many chunks the tile has, `across` how many are in a row; fill is scratch with room for used + 1.
    """
    chunk, total = _address(cls), 0
    for c in range(classes):
        total += k[c]
    where, column = np.empty(total, np.uint32), np.empty(total, np.uint8)
    fill[: used + 1] = 0
    p = 0
    for c in range(1, classes):
        i, base, here = 0, 0, int64(hist[0, c])
        for _ in range(k[c]):
            rank = int64(ranks[p])
            while base + here <= rank:
                base += here
                i += 1
                here = int64(hist[i, c])
            where[p] = i
            column[p] = _find_in_chunk(chunk + i * CHUNK, uint8(c), rank - base)
            fill[i + 1] += 1
            p += 1
    for i in range(used):
        fill[i + 1] += fill[i]
    start = np.empty(used, np.int64)
    for i in range(used):
        start[i] = fill[i]
    # a bucket per chunk, and insertion by column within it: a chunk holds few
    for p in range(total):
        i = int64(where[p])
        to = fill[i]
        fill[i] += 1
        # a division costs as much as the rest
        row = i if across == 1 else i // across
        col = c0 + (i - row * across) * CHUNK + column[p]
        out_row[to] = r0 + row
        while to > start[i] and out_column[to - 1] > col:
            out_column[to], out_from[to] = out_column[to - 1], out_from[to - 1]
            to -= 1
        out_column[to], out_from[to] = col, p
    return total


# What rules and levels are chosen from: how many weights, and how many changed ones, of each likelihood x a row or a
# column has. x = clamp(top − exponent, 0, span − 1) + what the levels add.


@njit(nogil=True, cache=True, error_model="numpy")
def exponent_histogram(
    units: Any, size: Any, stride: Any, rows: Any, columns: Any, shift: Any, mask: Any, every: Any, out: Any
) -> None:
    """How many weights of every `every`-th row have each exponent."""
    levels, cls, live = (
        np.zeros(columns + CHUNK, np.uint8),
        np.empty(columns + CHUNK + SPARE, np.uint8),
        np.ones(rows, np.uint8),
    )
    # rows have level 1, so this is 255 − exponent
    rule = np.array([shift, mask, 0, 255, 254, 256], np.int64)
    # neighbours are often equal: one counter would wait for itself
    counts = np.zeros((4, 256), np.int64)
    for r in range(0, rows, every):
        _classify_rows(units, size, stride, rule, live, levels, r, r + 1, 0, columns, cls)
        for j in range(columns):
            counts[j & 3, cls[j]] += 1
    for e in range(256):
        out[e] += counts[:, 255 - e].sum()


@njit(nogil=True, cache=True, error_model="numpy")
def weights_by_row(
    units: Any, size: Any, stride: Any, rows: Any, columns: Any, rule: Any, column_plus: Any, out: Any
) -> None:
    """out[row, x] over all weights; column_plus reaches CHUNK past the end.

    A sample of the columns would do for the likelihoods, but its noise was taken for structure: up to 0.14 bits.
    """
    cls, kinds = np.empty(columns + CHUNK + SPARE, np.uint8), out.shape[1]
    flat, live = rule.copy(), np.ones(rows, np.uint8)
    # rows have level 1, so this is x
    flat[4], flat[5] = rule[3] - 1, kinds
    chunk = _address(cls)
    # no weight is less likely than the top exponent in the least likely column, or likelier than the other way round
    least, most = column_plus[:columns].min(), min(kinds, rule[3] - rule[2] + 1 + column_plus[:columns].max())
    for r in range(rows):
        _classify_rows(units, size, stride, flat, live, column_plus, r, r + 1, 0, columns, cls)
        for b in range(0, columns, CHUNK):
            for x in range(least, most):
                count = popcount(equal_mask(chunk + b, uint8(x))) + popcount(equal_mask(chunk + b + LANES, uint8(x)))
                out[r, x] += count


@njit(nogil=True, cache=True, error_model="numpy")
def weights_by_column(
    units: Any, size: Any, stride: Any, rows: Any, columns: Any, rule: Any, row_plus: Any, out: Any
) -> None:
    """out[column, x] over a sample of at least 512 rows, dead ones (row_plus < 0) left out."""
    cls, levels = np.empty(columns + CHUNK + SPARE, np.uint8), np.zeros(columns + CHUNK, np.uint8)
    flat, live = rule.copy(), np.ones(rows, np.uint8)
    flat[4], flat[5] = rule[3] - 1, 256
    last, every = out.shape[1] - 1, max(1, min(8, rows // 512))
    for r in range(0, rows, every):
        if row_plus[r] >= 0:
            _classify_rows(units, size, stride, flat, live, levels, r, r + 1, 0, columns, cls)
            for j in range(columns):
                out[j, min(cls[j] + row_plus[r], last)] += every


@njit(**LEAN)
def changes_by_line(columns: Any, rule: Any, plus: Any, by_row: Any, positions: Any, exponents: Any, out: Any) -> None:
    """out[row, x] with plus per column, or out[column, x] with plus per row, over all changes."""
    for i in range(positions.size):
        r, j = positions[i] // columns, positions[i] % columns
        line, other = (r, j) if by_row else (j, r)
        e = min(max(int64(exponents[i]), rule[2]), rule[3])
        out[line, min(max(rule[3] - e + plus[other], 0), out.shape[1] - 1)] += 1
