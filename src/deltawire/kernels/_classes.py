"""Triton helpers for classes of old bits: the class of every unit of a tile, counted chunk by chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from ..core.codecs.context.classes import COLUMN_NEUTRAL, ROW_NEUTRAL
from ._tiles import chunk_offsets, tile_pointer, tile_shape

NEUTRAL = tl.constexpr(ROW_NEUTRAL + COLUMN_NEUTRAL)
NO_LEVELS, LEVELS, ALIGNED_LEVELS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def tile_rule(table, tile):
    """Shift, mask, low, top, the class of exponents from top up at levels of zero, and the last class."""
    row = table + tile * 6
    shift, mask, low, top = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    return shift, mask, low, top, (tl.load(row + 4) - top) & 255, tl.load(row + 5) - 1


@triton.jit
def level_offsets(level_at, tile, LEVELED: tl.constexpr):
    """Where the levels of a tile's rows and columns begin."""
    if LEVELED == NO_LEVELS:
        return 0, 0
    else:
        return tl.load(level_at + 2 * tile), tl.load(level_at + 2 * tile + 1)


@triton.jit
def to_class(bits, rule):
    """The class of old bits, short of their levels."""
    exponent = (bits >> rule[0].to(tl.uint32)).to(tl.int32) & rule[1]
    return rule[4] + tl.minimum(tl.maximum(rule[3] - exponent, 0), rule[3] - rule[2])


@triton.jit
def add_levels(found, row_level, column_level, rule):
    return tl.where(row_level == 0, 0, tl.minimum((found + row_level + column_level) & 255, rule[5]))


@triton.jit
def add_neutral(found, rule):
    return tl.minimum((found + NEUTRAL) & 255, rule[5])


@triton.jit
def chunk_classes(
    at, chunk, shape, rule, levels, where,
    NONE: tl.constexpr, LEVELED: tl.constexpr, CHUNK: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Classes of these chunks, NONE where there is no unit."""
    rows, width, stride = shape
    row, column, offset, valid = chunk_offsets(chunk, rows, width, stride, CHUNK, UNIT, ALIGNED)
    bits = tl.load(at + offset, mask=valid, other=0).to(tl.uint32)
    found = to_class(bits, rule)
    if LEVELED == NO_LEVELS:
        found = add_neutral(found, rule)
    else:
        row_at, column_at = where
        row_level = tl.load(levels + row_at + row, mask=row < rows, other=0).to(tl.int32)[:, None]
        place = column_at + column
        if LEVELED == ALIGNED_LEVELS:
            place = tl.multiple_of(tl.max_contiguous(place, [1, 8]), [1, 8])
        column_level = tl.load(levels + place, mask=valid, other=0).to(tl.int32)
        found = add_levels(found, row_level, column_level, rule)
    return tl.where(valid, found, NONE)


@triton.jit
def exponents_kernel(units, work, out, shift, mask, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """A program takes rows [1:2] of those that are looked at in a sample: number, rows, then start, rows and columns of
    the matrix, and how many rows are passed over for each."""
    row = work + tl.program_id(0) * 7
    number, first, last = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    start, columns, every = tl.load(row + 3), tl.load(row + 5), tl.load(row + 6)
    total = tl.zeros([256], tl.int32)
    if UNIT == 1:
        keep = 0xFF
    elif UNIT == 2:
        keep = 0xFFFF
    else:
        keep = 0xFFFFFFFF
    # what is past the end counts as exponent 0, and is taken back
    past = 0
    count = (last - first) * columns
    for at in range(0, count, BLOCK):
        i = at + tl.arange(0, BLOCK)
        here = i < count
        line = i // columns
        offset = start + (first + line) * every * columns + (i - line * columns)
        bits = tl.load(units + offset, mask=here, other=0).to(tl.int64) & keep
        total += tl.histogram(((bits >> shift) & mask).to(tl.int32), 256)
        past += tl.sum((i >= count).to(tl.int32), 0)
    value = tl.arange(0, 256)
    total -= tl.where(value == 0, past, 0)
    tl.atomic_add(out + number * 256 + value, total)


@triton.jit
def class_counts_kernel(
    tiles, addresses, geometry, table, levels, level_at, sizes,
    LEVELED: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    CLASSES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tile = tl.load(tiles + tl.program_id(0))
    shape = tile_shape(geometry, tile)
    at = tile_pointer(addresses, tile, UNIT, ALIGNED)
    rule = tile_rule(table, tile)
    where = level_offsets(level_at, tile, LEVELED)
    rows, width = shape[0], shape[1]
    number = tl.arange(0, WIDE)
    total = tl.zeros([WIDE], tl.int32)
    for first in range(0, rows * tl.cdiv(width, CHUNK), CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        found = chunk_classes(at, chunk, shape, rule, levels, where, 0, LEVELED, CHUNK, UNIT, ALIGNED)
        # what is not there counts as class 0, which is not kept
        total += tl.histogram(tl.reshape(found, [CHUNKS * CHUNK]), WIDE)
    tl.store(sizes + tile * CLASSES + number, total, mask=number > 0)


@triton.jit
def sum_chunks(
    at, shape, rule, levels, where, packed, sums,
    LEVELED: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    WORDS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """How many units of each class a tile has; and into sums, [chunk, class], how many before each chunk.

    On the way a chunk's counts are bytes, packed four to a word: one addition counts four classes.
    """
    rows, width = shape[0], shape[1]
    chunks = rows * tl.cdiv(width, CHUNK)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        found = chunk_classes(at, chunk, shape, rule, levels, where, 4 * WORDS, LEVELED, CHUNK, UNIT, ALIGNED)
        one = (1 << ((found & 3) * 8)).to(tl.uint32)
        for word in tl.static_range(WORDS):
            count = tl.sum(tl.where((found >> 2) == word, one, 0), 1)
            tl.store(packed + chunk * WORDS + word, count, mask=chunk < chunks)
    # what other threads of this program stored is read next
    tl.debug_barrier()
    single = packed.to(tl.pointer_type(tl.uint8), bitcast=True)
    number = tl.arange(0, WIDE)[None, :]
    total = tl.zeros([WIDE], tl.int32)
    for first in range(0, chunks, 2 * CHUNKS):
        chunk = first + tl.arange(0, 2 * CHUNKS)[:, None]
        there = (chunk < chunks) & (number < 4 * WORDS)
        count = tl.load(single + chunk * (4 * WORDS) + number, mask=there, other=0).to(tl.int32)
        before = total[None, :] + tl.cumsum(count, 0) - count
        tl.store(sums + chunk * WIDE + number, before, mask=chunk < chunks)
        total += tl.sum(count, 0)
    tl.debug_barrier()
    return total
