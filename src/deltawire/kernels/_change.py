"""Triton kernels that find changes and write them."""

from __future__ import annotations

import triton
import triton.language as tl

from ..core import change
from ._steps import take_step
from ._tiles import chunk_offsets, tile_pointer, tile_shape

NEW_BITS: tl.constexpr = tl.constexpr(change.NEW_BITS)
NUMBER_STEPS: tl.constexpr = tl.constexpr(change.NUMBER_STEPS)
FLIPS: tl.constexpr = tl.constexpr(change.FLIPS)


@triton.jit
def round_to_bf16(bits):
    """The bf16 bits of fp32 bits: nearest, ties to even, every NaN the one a GPU makes."""
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, 0x7FFF, rounded).to(tl.uint16)


@triton.jit
def read_pair(old, new, offset, valid, CAST: tl.constexpr):
    """Old and new units; where there is none, two that are equal."""
    was = tl.load(old + offset, mask=valid, other=0)
    now = tl.load(new + offset, mask=valid, other=0)
    if CAST:
        now = round_to_bf16(now)
    return was, now


@triton.jit
def bit_count(x):
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def count_kernel(
    tiles, olds, news, geometry, counts,
    UNIT: tl.constexpr, CAST: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    tile = tl.load(tiles + tl.program_id(0))
    rows, width, stride = tile_shape(geometry, tile)
    old = tile_pointer(olds, tile, UNIT, ALIGNED)
    new = tile_pointer(news, tile, 4 if CAST else UNIT, ALIGNED)
    found = tl.zeros([CHUNKS, CHUNK], tl.int32)
    for first in range(0, rows * tl.cdiv(width, CHUNK), CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        _, _, offset, valid = chunk_offsets(chunk, rows, width, stride, CHUNK, UNIT, ALIGNED)
        was, now = read_pair(old, new, offset, valid, CAST)
        found += (was != now).to(tl.int32)
    tl.store(counts + tile, tl.sum(tl.sum(found, 1), 0))


@triton.jit
def extract_kernel(
    tiles, olds, news, geometry, starts, positions, out_old, out_new,
    UNIT: tl.constexpr, CAST: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    tile = tl.load(tiles + tl.program_id(0))
    rows, width, stride = tile_shape(geometry, tile)
    old = tile_pointer(olds, tile, UNIT, ALIGNED)
    new = tile_pointer(news, tile, 4 if CAST else UNIT, ALIGNED)
    start = tl.load(starts + tile)
    positions += start
    out_old += start
    out_new += start
    per_row = tl.cdiv(width, CHUNK)
    words: tl.constexpr = CHUNK // 32
    bit = (1 << tl.arange(0, 32)).to(tl.uint32)[None, None, :]
    done = 0
    if tl.load(starts + tile + 1) > start:
        for first in range(0, rows * per_row, CHUNKS):
            chunk = first + tl.arange(0, CHUNKS)
            _, _, offset, valid = chunk_offsets(chunk, rows, width, stride, CHUNK, UNIT, ALIGNED)
            was, now = read_pair(old, new, offset, valid, CAST)
            # few of 32 units changed: as one mask they cost little to count and to walk
            changed = tl.reshape(was != now, [CHUNKS, words, 32])
            mask = tl.reshape(tl.sum(tl.where(changed, bit, 0), 2), [CHUNKS * words])
            count = bit_count(mask)
            to = done + tl.cumsum(count, 0) - count
            done += tl.sum(count, 0)
            word = first * words + tl.arange(0, CHUNKS * words)
            row = word // (per_row * words)
            column = (word - row * (per_row * words)) * 32
            for _ in range(tl.max(count, 0)):
                here = mask != 0
                lane = column + bit_count((mask ^ (mask - 1)) >> 1)
                at = row.to(tl.int64) * stride + lane
                before, after = read_pair(old, new, at, here, CAST)
                tl.store(positions + to, row * width + lane, mask=here)
                tl.store(out_old + to, before, mask=here)
                tl.store(out_new + to, after, mask=here)
                mask &= mask - 1
                to += 1


@triton.jit
def resolve_kernel(
    tiles, addresses, geometry, starts, positions, values, kinds, out_old, out_new,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.load(tiles + tl.program_id(0))
    rows, width, stride = tile_shape(geometry, tile)
    at = tile_pointer(addresses, tile, UNIT, False)
    kind = tl.load(kinds + tile)
    start = tl.load(starts + tile)
    end = tl.load(starts + tile + 1)
    while start < end:
        i = start + tl.arange(0, BLOCK)
        here = i < end
        position = tl.load(positions + i, mask=here, other=0).to(tl.int32)
        row = position // width
        # a position past the tile would be read from a neighbour, or from nowhere
        here &= row < rows
        was = tl.load(at + row.to(tl.int64) * stride + (position - row * width), mask=here, other=0).to(tl.uint32)
        value = tl.load(values + i, mask=here, other=0).to(tl.uint32)
        now = take_step(was, value, kind == NUMBER_STEPS, UNIT)
        now = tl.where(kind == NEW_BITS, value, tl.where(kind == FLIPS, was ^ value, now))
        tl.store(out_old + i, was, mask=here)
        tl.store(out_new + i, now, mask=here)
        start += BLOCK


@triton.jit
def apply_kernel(
    tiles, addresses, geometry, starts, positions, new,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.load(tiles + tl.program_id(0))
    rows, width, stride = tile_shape(geometry, tile)
    at = tile_pointer(addresses, tile, UNIT, False)
    start = tl.load(starts + tile)
    end = tl.load(starts + tile + 1)
    while start < end:
        i = start + tl.arange(0, BLOCK)
        here = i < end
        position = tl.load(positions + i, mask=here, other=0).to(tl.int32)
        row = position // width
        # a position past the tile would be written into a neighbour: hold it back whatever the caller checked
        here &= row < rows
        to = at + row.to(tl.int64) * stride + (position - row * width)
        tl.store(to, tl.load(new + i, mask=here, other=0), mask=here)
        start += BLOCK
