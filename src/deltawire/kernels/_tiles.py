"""Triton helpers every kernel is built from: where a tile lies, and reading it in chunks.

Rows are read in chunks of CHUNK units, several chunks at a time, in row-major order: a block [chunks, CHUNK] then keeps
each chunk within a warp. Addresses come out of a table, so the compiler cannot see that they are aligned: a launch
says so.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_shape(geometry, tile):
    """Rows, width and stride of a tile."""
    row = geometry + tile.to(tl.int64) * 4
    return tl.load(row).to(tl.int32), tl.load(row + 1).to(tl.int32), tl.load(row + 2)


@triton.jit
def tile_pointer(addresses, tile, UNIT: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to the first unit of a tile."""
    address = tl.load(addresses + tile)
    if UNIT == 1:
        pointer = address.to(tl.pointer_type(tl.uint8))
    elif UNIT == 2:
        pointer = address.to(tl.pointer_type(tl.uint16))
    else:
        pointer = address.to(tl.pointer_type(tl.uint32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def chunk_offsets(chunk, rows, width, stride, CHUNK: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the row of each chunk, and of each unit its column, its offset in the tile, and whether it exists."""
    per_row = tl.cdiv(width, CHUNK)
    row = chunk // per_row
    first = (chunk - row * per_row) * CHUNK
    lane = tl.arange(0, CHUNK)
    column = first[:, None] + lane[None, :]
    offset = (row.to(tl.int64) * stride + first)[:, None] + lane[None, :]
    valid = (column < width) & (row < rows)[:, None]
    if ALIGNED:
        vector: tl.constexpr = 16 // UNIT
        offset = tl.multiple_of(tl.max_contiguous(offset, [1, vector]), [1, vector])
        valid = tl.max_constancy(valid, [1, vector])
    return row, column, offset, valid
