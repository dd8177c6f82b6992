"""Triton: the state digest of blocks of columns, whose rows begin anywhere in the digest's blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from ._digest import mix


@triton.jit
def rows_kernel(bands, table, out, PERIOD: tl.constexpr, BLOCK: tl.constexpr):
    """A program takes a band of rows: address, rows, columns, position of the first unit, tensor columns, keys."""
    band = bands + tl.program_id(0) * 7
    at = tl.load(band).to(tl.pointer_type(tl.uint16))
    rows, columns = tl.load(band + 1), tl.load(band + 2)
    first, stride = tl.load(band + 3), tl.load(band + 4)
    key0 = tl.load(band + 5).to(tl.uint64, bitcast=True)
    key1 = tl.load(band + 6).to(tl.uint64, bitcast=True)
    sum0 = tl.zeros([BLOCK], tl.uint64)
    sum1 = tl.zeros([BLOCK], tl.uint64)
    for row in range(0, rows):
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            here = column < columns
            bits = tl.load(at + row * columns + column, mask=here, other=0).to(tl.uint64)
            position = first + row * stride + column
            block = (position // PERIOD).to(tl.uint64)
            b0 = tl.load(table + position % PERIOD).to(tl.uint64, bitcast=True)
            b1 = tl.load(table + PERIOD + position % PERIOD).to(tl.uint64, bitcast=True)
            sum0 += mix(key0 + block) * b0 * bits
            sum1 += mix(key1 + block) * b1 * bits
    tl.atomic_add(out, tl.sum(sum0, 0).to(tl.int64, bitcast=True))
    tl.atomic_add(out + 1, tl.sum(sum1, 0).to(tl.int64, bitcast=True))
