"""Triton kernels of the state digest. Arithmetic is modulo 2^64, and sums come in any order."""

from __future__ import annotations

import triton
import triton.language as tl

from ._tiles import tile_pointer, tile_shape


@triton.jit
def mix(x):
    """splitmix64's finaliser, as the core has it."""
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def digest_kernel(
    tiles, addresses, geometry, keys, table, out,
    UNIT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Tiles of one row, which start at a multiple of BLOCK in their tensor."""
    tile = tl.load(tiles + tl.program_id(0))
    _, width, _ = tile_shape(geometry, tile)
    at = tile_pointer(addresses, tile, UNIT, ALIGNED)
    number = (tl.load(geometry + tile.to(tl.int64) * 4 + 3) // BLOCK).to(tl.uint64)
    key0 = tl.load(keys + 2 * tile).to(tl.uint64, bitcast=True)
    key1 = tl.load(keys + 2 * tile + 1).to(tl.uint64, bitcast=True)
    lane = tl.arange(0, BLOCK)
    # Σ A · (Σ B · bits) is Σ B · (Σ A · bits): the inner sum needs no other thread
    sum0 = tl.zeros([BLOCK], tl.uint64)
    sum1 = tl.zeros([BLOCK], tl.uint64)
    for first in range(0, tl.cdiv(width, BLOCK), ROWS):
        row = first + tl.arange(0, ROWS)
        offset = row[:, None] * BLOCK + lane[None, :]
        valid = offset < width
        if ALIGNED:
            valid = tl.max_constancy(valid, [1, 16 // UNIT])
        bits = tl.load(at + offset, mask=valid, other=0).to(tl.uint64)
        block = number + row.to(tl.uint64)
        sum0 += tl.sum(mix(key0 + block)[:, None] * bits, 0)
        sum1 += tl.sum(mix(key1 + block)[:, None] * bits, 0)
    sum0 *= tl.load(table + lane).to(tl.uint64, bitcast=True)
    sum1 *= tl.load(table + BLOCK + lane).to(tl.uint64, bitcast=True)
    tl.atomic_add(out, tl.sum(sum0, 0).to(tl.int64, bitcast=True))
    tl.atomic_add(out + 1, tl.sum(sum1, 0).to(tl.int64, bitcast=True))


@triton.jit
def digest_change_kernel(
    geometry, units, keys, table, starts, positions, old, new, origins, out,
    PLACED: tl.constexpr, PERIOD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    _, width, stride = tile_shape(geometry, tile)
    offset = tl.load(geometry + tile.to(tl.int64) * 4 + 3)
    # a 4-byte unit is two 16-bit ones; the upper half of a narrower unit is zero, old and new alike
    halves = tl.where(tl.load(units + tile) == 4, 2, 1)
    key0 = tl.load(keys + 2 * tile).to(tl.uint64, bitcast=True)
    key1 = tl.load(keys + 2 * tile + 1).to(tl.uint64, bitcast=True)
    if PLACED:
        origin = origins + tile.to(tl.int64) * 4
        first = tl.load(origin)
        columns = tl.load(origin + 1)
        across = tl.load(origin + 2)
        out += 2 * tl.load(origin + 3)
    start = tl.load(starts + tile)
    end = tl.load(starts + tile + 1)
    sum0 = tl.zeros([BLOCK], tl.uint64)
    sum1 = tl.zeros([BLOCK], tl.uint64)
    while start < end:
        i = start + tl.arange(0, BLOCK)
        here = i < end
        position = tl.load(positions + i, mask=here, other=0).to(tl.int32)
        row = position // width
        flat = offset + row.to(tl.int64) * stride + (position - row * width)
        if PLACED:
            line = flat // columns
            flat = first + line * across + (flat - line * columns)
        flat *= halves
        was = tl.load(old + i, mask=here, other=0).to(tl.uint32)
        now = tl.load(new + i, mask=here, other=0).to(tl.uint32)
        for half in range(0, halves):
            p = flat + half
            # differences wrap: the digest is linear modulo 2^64
            moved = ((now >> (16 * half)) & 0xFFFF).to(tl.uint64) - ((was >> (16 * half)) & 0xFFFF).to(tl.uint64)
            block = (p // PERIOD).to(tl.uint64)
            b0 = tl.load(table + p % PERIOD).to(tl.uint64, bitcast=True)
            b1 = tl.load(table + PERIOD + p % PERIOD).to(tl.uint64, bitcast=True)
            sum0 += mix(key0 + block) * b0 * moved
            sum1 += mix(key1 + block) * b1 * moved
        start += BLOCK
    tl.atomic_add(out, tl.sum(sum0, 0).to(tl.int64, bitcast=True))
    tl.atomic_add(out + 1, tl.sum(sum1, 0).to(tl.int64, bitcast=True))
