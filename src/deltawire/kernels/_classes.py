"""Triton kernels that count within classes of the old bits: ranks from positions, and positions from ranks.

Ranking every unit of a tile would be a scan per class. Only a hundredth of the units changed, so a program counts the
classes of each chunk of its tile (a byte per class: a chunk has 128 units), sums the counts up along the tile, and then
looks into single chunks: of a change, how many of its class stand before it there; of a rank, which one it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._steps import step_between, take_step
from ._tiles import chunk_offsets, tile_pointer, tile_shape
from .results import COLUMN_NEUTRAL, ROW_NEUTRAL

NEUTRAL_ROW, NEUTRAL_COLUMN = tl.constexpr(ROW_NEUTRAL), tl.constexpr(COLUMN_NEUTRAL)


@triton.jit
def tile_rule(table, tile):
    """Shift, mask, low, top, offset and classes of a tile's rule."""
    row = table + tile * 6
    shift, mask, low = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    return shift, mask, low, tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)


@triton.jit
def to_class(bits, row_level, column_level, rule, LEVELED: tl.constexpr):
    shift, mask, low, top, offset, classes = rule
    exponent = (bits >> shift.to(tl.uint32)).to(tl.int32) & mask
    result = offset - tl.minimum(tl.maximum(exponent, low), top) + row_level + column_level
    result = tl.minimum(result & 255, classes - 1)
    if LEVELED:
        result = tl.where(row_level == 0, 0, result)
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
        row_level, column_level = NEUTRAL_ROW, NEUTRAL_COLUMN
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
def changed_class(i, end, positions, old, shape, rule, levels, where, LEVELED: tl.constexpr, CLASSES: tl.constexpr):
    """Class (CLASSES past the end), row, column and old bits of changes."""
    _, width, _ = shape
    here = i < end
    position = tl.load(positions + i, mask=here, other=0).to(tl.int32)
    was = tl.load(old + i, mask=here, other=0).to(tl.uint32)
    row = position // width
    column = position - row * width
    if LEVELED:
        row_at, column_at = where
        row_level = tl.load(levels + row_at + row, mask=here, other=0).to(tl.int32)
        column_level = tl.load(levels + column_at + column, mask=here, other=0).to(tl.int32)
    else:
        row_level, column_level = NEUTRAL_ROW, NEUTRAL_COLUMN
    return tl.where(here, to_class(was, row_level, column_level, rule, LEVELED), CLASSES), row, column, was


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
    scratch += tl.program_id(0).to(tl.int64) * chunks_at_most * (CLASSES + WORDS)
    number = tl.arange(0, CLASSES)
    for turn in range(tl.program_id(0), count, tl.num_programs(0)):
        tile = tl.load(tiles + turn)
        shape = tile_shape(geometry, tile)
        at = tile_pointer(addresses, tile, UNIT, ALIGNED)
        rule = tile_rule(table, tile)
        where = level_offsets(level_at, tile, LEVELED)
        total = sum_chunks(
            at,
            shape,
            rule,
            levels,
            where,
            scratch,
            chunks_at_most,
            LEVELED,
            UNIT,
            ALIGNED,
            CHUNK,
            CHUNKS,
            CLASSES,
            WORDS,
        )
        tl.store(sizes + tile * CLASSES + number, total)

        # how many changed in each class says where each class begins in the output
        start = tl.load(starts + tile)
        end = tl.load(starts + tile + 1)
        changed = tl.zeros([CLASSES], tl.int32)
        first = start
        while first < end:
            i = first + tl.arange(0, BLOCK)
            mine, _, _, _ = changed_class(i, end, positions, old, shape, rule, levels, where, LEVELED, CLASSES)
            changed += tl.sum((mine[:, None] == number[None, :]).to(tl.int32), 0)
            first += BLOCK
        tl.store(counts + tile * CLASSES + number, changed)

        filled = tl.cumsum(changed, 0) - changed
        per_row = tl.cdiv(shape[1], CHUNK)
        first = start
        while first < end:
            i = first + tl.arange(0, BLOCK)
            here = i < end
            mine, row, column, was = changed_class(i, end, positions, old, shape, rule, levels, where, LEVELED, CLASSES)
            own = (mine[:, None] == number[None, :]).to(tl.int32)
            order = tl.sum((filled[None, :] + tl.cumsum(own, 0) - own) * own, 1)
            filled += tl.sum(own, 0)
            chunk = row * per_row + column // CHUNK
            lane = column % CHUNK
            others = chunk_classes(at, chunk, shape, rule, levels, where, CLASSES + 1, LEVELED, CHUNK, UNIT, ALIGNED)
            earlier = (others == mine[:, None]) & (tl.arange(0, CHUNK)[None, :] < lane[:, None])
            rank = tl.load(scratch + chunk * CLASSES + mine, mask=here, other=0) + tl.sum(earlier.to(tl.int32), 1)
            now = tl.load(new + i, mask=here, other=0).to(tl.uint32)
            tl.store(ranks + start + order, rank, mask=here)
            tl.store(steps + start + order, step_between(was, now, rule[1] != 0, UNIT), mask=here)
            first += BLOCK
        # the next tile overwrites the sums
        tl.debug_barrier()


@triton.jit
def place_kernel(
    tiles,
    count,
    addresses,
    geometry,
    table,
    levels,
    level_at,
    starts,
    counts,
    ranks,
    steps,
    positions,
    old,
    new,
    bad,
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
    scratch += tl.program_id(0).to(tl.int64) * chunks_at_most * (CLASSES + WORDS)
    number = tl.arange(0, CLASSES)
    lanes = tl.arange(0, CHUNK)[None, :]
    missed = tl.zeros([BLOCK], tl.int32)
    for turn in range(tl.program_id(0), count, tl.num_programs(0)):
        tile = tl.load(tiles + turn)
        shape = tile_shape(geometry, tile)
        rows, width, stride = shape
        at = tile_pointer(addresses, tile, UNIT, ALIGNED)
        rule = tile_rule(table, tile)
        where = level_offsets(level_at, tile, LEVELED)
        sum_chunks(
            at,
            shape,
            rule,
            levels,
            where,
            scratch,
            chunks_at_most,
            LEVELED,
            UNIT,
            ALIGNED,
            CHUNK,
            CHUNKS,
            CLASSES,
            WORDS,
        )
        class_end = tl.cumsum(tl.load(counts + tile * CLASSES + number), 0)
        per_row = tl.cdiv(width, CHUNK)
        chunks = rows * per_row
        start = tl.load(starts + tile)
        end = tl.load(starts + tile + 1)
        first = start
        while first < end:
            i = first + tl.arange(0, BLOCK)
            here = i < end
            rank = tl.load(ranks + i, mask=here, other=0).to(tl.int32)
            # counts that say less than there are ranks lead past the last class, where nothing is found
            mine = tl.sum((class_end[None, :] <= (i - start)[:, None]).to(tl.int32), 1)
            sums = scratch + tl.minimum(mine, CLASSES - 1)
            # the last chunk with no more of the class before it than the rank says
            chunk = tl.zeros([BLOCK], tl.int32)
            stride_chunks = chunks_at_most
            while stride_chunks > 0:
                probe = chunk + stride_chunks
                further = here & (probe < chunks)
                before = tl.load(sums + probe * CLASSES, mask=further, other=0)
                chunk = tl.where(further & (before <= rank), probe, chunk)
                stride_chunks = stride_chunks // 2
            left = rank - tl.load(sums + chunk * CLASSES, mask=here, other=0)
            found = chunk_classes(at, chunk, shape, rule, levels, where, CLASSES + 1, LEVELED, CHUNK, UNIT, ALIGNED)
            equal = (found == mine[:, None]).to(tl.int32)
            this = equal * (tl.cumsum(equal, 1) - 1 == left[:, None]).to(tl.int32)
            missed += (here & (tl.sum(this, 1) == 0)).to(tl.int32)
            row = chunk // per_row
            column = (chunk - row * per_row) * CHUNK + tl.sum(this * lanes, 1)
            was = tl.load(at + row.to(tl.int64) * stride + column, mask=here, other=0).to(tl.uint32)
            step = tl.load(steps + i, mask=here, other=0).to(tl.uint32)
            tl.store(positions + i, row * width + column, mask=here)
            tl.store(old + i, was, mask=here)
            tl.store(new + i, take_step(was, step, rule[1] != 0, UNIT), mask=here)
            first += BLOCK
        tl.debug_barrier()
    tl.atomic_add(bad, tl.sum(missed, 0))
