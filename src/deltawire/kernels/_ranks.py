"""Triton kernels that count within classes of the old bits: ranks from positions, and positions from ranks.

Ranking every unit of a tile would be a scan per class. Only a hundredth of the units changed, so a program counts the
classes of each chunk of its tile, sums the counts up along the tile, and then looks into single chunks: of a change,
how many of its class stand before it there; of a rank, which one it is.

Steps that need the whole program in step (counting, sorting, searching) take GROUP changes at a time, those that read
a chunk per change take BLOCK. Between them the outputs serve as scratch memory. A thread may read there what another
has yet to overwrite, hence the barriers between reading and writing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._classes import NO_LEVELS, add_levels, add_neutral, chunk_classes, level_offsets, sum_chunks, tile_rule, to_class
from ._steps import step_between, take_step
from ._tiles import tile_pointer, tile_shape


@triton.jit
def changed_class(i, end, positions, old, shape, rule, levels, where, LEVELED: tl.constexpr):
    """Class of changes (0 past the end), positions and old bits."""
    width = shape[1]
    here = i < end
    position = tl.load(positions + i, mask=here, other=0).to(tl.int32)
    was = tl.load(old + i, mask=here, other=0).to(tl.uint32)
    found = to_class(was, rule)
    if LEVELED == NO_LEVELS:
        found = add_neutral(found, rule)
    else:
        row_at, column_at = where
        row = position // width
        row_level = tl.load(levels + row_at + row, mask=here, other=0).to(tl.int32)
        column_level = tl.load(levels + column_at + position - row * width, mask=here, other=0).to(tl.int32)
        found = add_levels(found, row_level, column_level, rule)
    return tl.where(here, found, 0), position, was


@triton.jit(do_not_specialize=["count"])
def class_ranks_kernel(
    tiles, count, addresses, geometry, table, levels, level_at, starts, positions, old, new, sizes, counts, ranks,
    steps, packed, sums, chunks_at_most,
    LEVELED: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    CLASSES: tl.constexpr, WORDS: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    packed += tl.program_id(0).to(tl.int64) * chunks_at_most * WORDS
    sums += tl.program_id(0).to(tl.int64) * chunks_at_most * WIDE
    number = tl.arange(0, WIDE)
    quarter = tl.arange(0, WIDE // 4)[None, :]
    lanes = tl.arange(0, CHUNK)[None, :]
    for turn in range(tl.program_id(0), count, tl.num_programs(0)):
        tile = tl.load(tiles + turn)
        shape = tile_shape(geometry, tile)
        width = shape[1]
        at = tile_pointer(addresses, tile, UNIT, ALIGNED)
        rule = tile_rule(table, tile)
        where = level_offsets(level_at, tile, LEVELED)
        total = sum_chunks(
            at, shape, rule, levels, where, packed, sums, LEVELED, UNIT, ALIGNED, CHUNK, CHUNKS, WORDS, WIDE
        )
        tl.store(sizes + tile * CLASSES + number, total, mask=number > 0)

        # how many changed in each class says where each class begins in the output
        start = tl.load(starts + tile)
        end = tl.load(starts + tile + 1)
        changed = tl.zeros([WIDE], tl.int32)
        first = start
        while first < end:
            i = first + tl.arange(0, GROUP)
            found = changed_class(i, end, positions, old, shape, rule, levels, where, LEVELED)
            changed += tl.histogram(found[0], WIDE)
            first += GROUP
        # what is past the end was counted as class 0
        changed -= tl.where(number == 0, (first - end).to(tl.int32), 0)
        tl.store(counts + tile * CLASSES + number, changed)

        # sorted by class, in order within each: positions for now, in the place of ranks
        filled = tl.cumsum(changed, 0) - changed
        first = start
        while first < end:
            i = first + tl.arange(0, GROUP)
            here = i < end
            mine, position, was = changed_class(i, end, positions, old, shape, rule, levels, where, LEVELED)
            now = tl.load(new + i, mask=here, other=0).to(tl.uint32)
            # bytes count four classes at once: a group has at most 128 changes
            shift = ((mine & 3) * 8).to(tl.uint32)
            own = (mine >> 2)[:, None] == quarter
            one = tl.where(own, (tl.full([GROUP], 1, tl.uint32) << shift)[:, None], 0)
            before = (tl.sum(tl.where(own, tl.cumsum(one, 0) - one, 0), 1) >> shift) & 255
            begin = tl.sum(tl.where(mine[:, None] == number[None, :], filled[None, :], 0), 1)
            to = start + begin + before.to(tl.int32)
            tl.store(ranks + to, position, mask=here)
            tl.store(steps + to, step_between(was, now, rule[1] != 0, UNIT), mask=here)
            filled += tl.histogram(mine, WIDE)
            first += GROUP
        tl.debug_barrier()

        per_row = tl.cdiv(width, CHUNK)
        first = start
        while first < end:
            i = first + tl.arange(0, BLOCK)
            here = i < end
            position = tl.load(ranks + i, mask=here, other=0).to(tl.int32)
            tl.debug_barrier()
            row = position // width
            column = position - row * width
            chunk = row * per_row + column // CHUNK
            lane = (column % CHUNK)[:, None]
            found = chunk_classes(at, chunk, shape, rule, levels, where, WIDE, LEVELED, CHUNK, UNIT, ALIGNED)
            mine = tl.sum(tl.where(lanes == lane, found, 0), 1)
            earlier = tl.sum(((found == mine[:, None]) & (lanes < lane)).to(tl.int32), 1)
            rank = tl.load(sums + chunk * WIDE + mine, mask=here, other=0).to(tl.int32) + earlier
            tl.store(ranks + i, rank, mask=here)
            first += BLOCK
        # the next tile overwrites the sums
        tl.debug_barrier()


@triton.jit(do_not_specialize=["count"])
def place_kernel(
    tiles, count, addresses, geometry, table, levels, level_at, starts, counts, ranks, steps, positions, old, new, bad,
    packed, sums, chunks_at_most,
    LEVELED: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    CLASSES: tl.constexpr, WORDS: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    packed += tl.program_id(0).to(tl.int64) * chunks_at_most * WORDS
    sums += tl.program_id(0).to(tl.int64) * chunks_at_most * WIDE
    number = tl.arange(0, WIDE)
    lanes = tl.arange(0, CHUNK)[None, :]
    missed = tl.zeros([BLOCK], tl.int32)
    for turn in range(tl.program_id(0), count, tl.num_programs(0)):
        tile = tl.load(tiles + turn)
        shape = tile_shape(geometry, tile)
        rows, width, stride = shape
        at = tile_pointer(addresses, tile, UNIT, ALIGNED)
        rule = tile_rule(table, tile)
        where = level_offsets(level_at, tile, LEVELED)
        sum_chunks(at, shape, rule, levels, where, packed, sums, LEVELED, UNIT, ALIGNED, CHUNK, CHUNKS, WORDS, WIDE)
        class_end = tl.cumsum(tl.load(counts + tile * CLASSES + number), 0)
        per_row = tl.cdiv(width, CHUNK)
        chunks = rows * per_row
        start = tl.load(starts + tile)
        end = tl.load(starts + tile + 1)

        # the last chunk with no more of the class before it than the rank says; for now in the place of the position
        first = start
        while first < end:
            i = first + tl.arange(0, GROUP)
            here = i < end
            rank = tl.load(ranks + i, mask=here, other=0).to(tl.int32)
            # a class that the rule does not have leads past the last, where nothing is found
            mine = tl.sum((class_end[None, :] <= (i - start).to(tl.int32)[:, None]).to(tl.int32), 1)
            column = sums + tl.minimum(mine, WIDE - 1)
            chunk = tl.zeros([GROUP], tl.int32)
            leap = chunks_at_most // 2
            while leap > 0:
                probe = chunk + leap
                further = here & (probe < chunks)
                before = tl.load(column + probe * WIDE, mask=further, other=0).to(tl.int32)
                chunk = tl.where(further & (before <= rank), probe, chunk)
                leap = leap // 2
            left = rank - tl.load(column + chunk * WIDE, mask=here, other=0).to(tl.int32)
            # what is not in the chunk, a rank that wraps included, is found nowhere
            left = tl.where((left < 0) | (left > CHUNK), CHUNK, left)
            # positions may be where ranks are
            tl.debug_barrier()
            tl.store(positions + i, chunk, mask=here)
            if UNIT == 1:
                # a byte has no room for a class and a place in a chunk
                tl.store(old + i, left, mask=here)
                tl.store(new + i, mine, mask=here)
            else:
                tl.store(old + i, left | (mine << 8), mask=here)
            first += GROUP
        tl.debug_barrier()

        first = start
        while first < end:
            i = first + tl.arange(0, BLOCK)
            here = i < end
            chunk = tl.load(positions + i, mask=here, other=0).to(tl.int32)
            left = tl.load(old + i, mask=here, other=0).to(tl.int32)[:, None]
            if UNIT == 1:
                mine = tl.load(new + i, mask=here, other=0).to(tl.int32)[:, None]
            else:
                mine = left >> 8
                left = left & 255
            step = tl.load(steps + i, mask=here, other=0).to(tl.uint32)
            tl.debug_barrier()
            found = chunk_classes(at, chunk, shape, rule, levels, where, WIDE + 1, LEVELED, CHUNK, UNIT, ALIGNED)
            equal = (found == mine).to(tl.int32)
            # class 0 is of rows that did not change: nothing is to be found there
            this = (equal != 0) & (mine > 0) & (tl.cumsum(equal, 1) == left + 1)
            missed += (here & (tl.sum(this.to(tl.int32), 1) == 0)).to(tl.int32)
            row = chunk // per_row
            column = (chunk - row * per_row) * CHUNK + tl.sum(tl.where(this, lanes, 0), 1)
            was = tl.load(at + row.to(tl.int64) * stride + column, mask=here, other=0).to(tl.uint32)
            tl.store(positions + i, row * width + column, mask=here)
            tl.store(old + i, was, mask=here)
            tl.store(new + i, take_step(was, step, rule[1] != 0, UNIT), mask=here)
            first += BLOCK
        # the next tile overwrites the sums
        tl.debug_barrier()
    tl.atomic_add(bad, tl.sum(missed, 0))
