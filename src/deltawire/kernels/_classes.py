"""Triton kernels that count within classes of the old bits: ranks from positions, and positions from ranks.

Ranking every unit of a tile would be a scan per class. Only a hundredth of the units changed, so a program counts the
classes of each chunk of its tile (a byte per class: a chunk has 128 units), sums the counts up along the tile, and then
looks into single chunks: of a change, how many of its class stand before it there; of a rank, which one it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._tiles import chunk_offsets, tile_pointer, tile_shape


@triton.jit
def tile_rule(table, tile):
    """Shift, mask, top, low, leveled and the last class of a tile's rule."""
    row = table + tile * 6
    shift, mask, top = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    return shift, mask, top, tl.load(row + 3), tl.load(row + 4), tl.load(row + 5) - 1


@triton.jit
def to_class(bits, row_level, column_level, rule, LEVELED: tl.constexpr):
    shift, mask, top, low, leveled, last = rule
    exponent = (bits >> shift.to(tl.uint32)).to(tl.int32) & mask
    result = top + 1 - tl.minimum(tl.maximum(exponent, low), top)
    if LEVELED:
        dead = (leveled != 0) & (row_level == 0)
        level = tl.where(leveled != 0, (row_level + column_level) >> 1, 0)
        result = tl.where(dead, 0, tl.minimum(result + level, last))
    return result


@triton.jit
def chunk_classes(
    at,
    chunk,
    shape,
    rule,
    levels,
    level_at,
    NONE: tl.constexpr,
    LEVELED: tl.constexpr,
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Classes of these chunks, NONE where there is no unit."""
    rows, width, stride = shape
    row, column, offset, valid = chunk_offsets(chunk, rows, width, stride, CHUNK, UNIT, ALIGNED)
    bits = tl.load(at + offset, mask=valid, other=0).to(tl.uint32)
    if LEVELED:
        row_at, column_at = level_at
        row_level = tl.load(levels + row_at + row, mask=row < rows, other=0).to(tl.int32)[:, None]
        column_level = tl.load(levels + column_at + column, mask=valid, other=0).to(tl.int32)
    else:
        row_level, column_level = 0, 0
    return tl.where(valid, to_class(bits, row_level, column_level, rule, LEVELED), NONE)


@triton.jit
def level_offsets(level_at, tile, LEVELED: tl.constexpr):
    if LEVELED:
        return tl.load(level_at + 2 * tile), tl.load(level_at + 2 * tile + 1)
    else:
        return 0, 0


@triton.jit
def class_counts_kernel(
    tiles,
    addresses,
    geometry,
    table,
    levels,
    level_at,
    sizes,
    LEVELED: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    tile = tl.load(tiles + tl.program_id(0))
    shape = tile_shape(geometry, tile)
    at = tile_pointer(addresses, tile, UNIT, ALIGNED)
    rule = tile_rule(table, tile)
    where = level_offsets(level_at, tile, LEVELED)
    rows, width, _ = shape
    number = tl.arange(0, CLASSES)
    total = tl.zeros([CLASSES], tl.int32)
    seen = 0
    for first in range(0, rows * tl.cdiv(width, CHUNK), CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        found = chunk_classes(at, chunk, shape, rule, levels, where, 0, LEVELED, CHUNK, UNIT, ALIGNED)
        total += tl.histogram(tl.reshape(found, [CHUNKS * CHUNK]), CLASSES)
        seen += CHUNKS * CHUNK
    # what is not there was counted as class 0
    total -= tl.where(number == 0, seen - rows * width, 0)
    tl.store(sizes + tile * CLASSES + number, total)


@triton.jit
def sum_chunks(
    at,
    shape,
    rule,
    levels,
    where,
    scratch,
    chunks_at_most,
    LEVELED: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CLASSES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Of every chunk and class, how many units of the class the tile has before the chunk; and how many in all.

    The sums come first in the scratch memory, [chunk, class]; the counts, packed four to a word, behind them.
    """
    rows, width, _ = shape
    chunks = rows * tl.cdiv(width, CHUNK)
    packed = (scratch + chunks_at_most * CLASSES).to(tl.pointer_type(tl.uint32), bitcast=True)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        found = chunk_classes(at, chunk, shape, rule, levels, where, CLASSES, LEVELED, CHUNK, UNIT, ALIGNED)
        one = (1 << ((found & 3) * 8)).to(tl.uint32)
        for word in tl.static_range(WORDS):
            count = tl.sum(tl.where((found >> 2) == word, one, 0), 1)
            tl.store(packed + chunk * WORDS + word, count, mask=chunk < chunks)
    # what other threads of this program stored is read next
    tl.debug_barrier()
    single = packed.to(tl.pointer_type(tl.uint8), bitcast=True)
    number = tl.arange(0, CLASSES)[None, :]
    total = tl.zeros([CLASSES], tl.int32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)[:, None]
        there = (chunk < chunks) & (number < 4 * WORDS)
        count = tl.load(single + chunk * (4 * WORDS) + number, mask=there, other=0).to(tl.int32)
        before = total[None, :] + tl.cumsum(count, 0) - count
        tl.store(scratch + chunk * CLASSES + number, before, mask=chunk < chunks)
        total += tl.sum(count, 0)
    tl.debug_barrier()
    return total


@triton.jit
def to_key(bits, is_float, UNIT: tl.constexpr):
    """Bits of a float in the order of the numbers they stand for."""
    sign: tl.constexpr = 1 << (8 * UNIT - 1)
    every: tl.constexpr = (1 << (8 * UNIT)) - 1
    return tl.where(is_float, tl.where((bits & sign) != 0, bits ^ every, bits | sign), bits)


@triton.jit
def from_key(key, is_float, UNIT: tl.constexpr):
    sign: tl.constexpr = 1 << (8 * UNIT - 1)
    every: tl.constexpr = (1 << (8 * UNIT)) - 1
    return tl.where(is_float, tl.where((key & sign) != 0, key ^ sign, key ^ every), key)


@triton.jit
def class_ranks_kernel(
    tiles,
    count,
    addresses,
    geometry,
    table,
    levels,
    level_at,
    starts,
    positions,
    old,
    new,
    sizes,
    counts,
    ranks,
    steps,
    scratch,
    chunks_at_most,
    LEVELED: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CLASSES: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    every: tl.constexpr = (1 << (8 * UNIT)) - 1
    sign: tl.constexpr = 1 << (8 * UNIT - 1)
    scratch += tl.program_id(0).to(tl.int64) * chunks_at_most * (CLASSES + WORDS)
    number = tl.arange(0, CLASSES)
    for turn in range(tl.program_id(0), count, tl.num_programs(0)):
        tile = tl.load(tiles + turn)
        shape = tile_shape(geometry, tile)
        rows, width, _ = shape
        at = tile_pointer(addresses, tile, UNIT, ALIGNED)
        rule = tile_rule(table, tile)
        is_float = rule[1] != 0
        where = level_offsets(level_at, tile, LEVELED)
        total = sum_chunks(
            at, shape, rule, levels, where, scratch, chunks_at_most, LEVELED, UNIT, ALIGNED, CHUNK, CHUNKS, CLASSES, WORDS
        )
        tl.store(sizes + tile * CLASSES + number, total)

        start, end = tl.load(starts + tile), tl.load(starts + tile + 1)
        changed = tl.zeros([CLASSES], tl.int32)
        i = start
        while i < end:
            at_i = i + tl.arange(0, BLOCK)
            mine, _, _, _ = changed_class(
                at_i, end, positions, old, width, rule, levels, where, LEVELED, CLASSES
            )
            changed += tl.histogram(mine, 2 * CLASSES)
            i += BLOCK
        tl.store(counts + tile * CLASSES + number, changed)
        tl.debug_barrier()
