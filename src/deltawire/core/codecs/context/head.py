"""The small streams of a context block: what they hold, byte by byte, and every check on the way back in.

head    u8 version, top, span, leveled, classes, spread; CLASSES bytes of rates; CLASSES bits (4 bytes, highest first):
        which are inverted; u8 number of step tables, each u8 length and its scaled bytes; CLASSES bytes of table
        numbers (only where there are several); per region: varint grid rows, varint grid columns, u8 flags (1 row
        levels, 2 column levels), i8 rate offset.
levels  per axis that has them: a table of LEVELS scaled bytes, u32 length, and the range-coded levels.
sizes   the low bytes of all tile sizes, then the next bytes, as many planes as the largest needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...compiled import njit
from ...dtypes import Dtype
from ...errors import CorruptStream, CountMismatch
from ...simd import LEAN
from .classes import CLASSES, LEVELS, Rule
from .entropy import (
    MAX_TILE,
    SPREADS,
    SYMBOLS,
    coarse,
    encode_ops,
    get_symbol,
    put_symbol,
    scale,
    start_decode,
    unscale,
)
from .tiles import LevelBytes, cuts

VERSION = 1
NEVER = 255
"""Rate of a class without a change (or, inverted, with nothing else): no counts are sent."""
ROW_LEVELS, COLUMN_LEVELS = 1, 2
SIZE_PLANES = 4
"""Bytes a tile's size may have."""
LEVEL_HEAD = LEVELS + 4
"""Bytes before the coded levels of an axis: their table and their length."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RegionGrid:
    """The tiles of one region, as the head describes them."""

    down: int
    """Tiles along the rows."""
    across: int
    """Tiles along the columns."""
    flags: int
    """Which levels it has."""
    offset: int
    """How far its rates are from the block's, in eighths of an octave."""

    @property
    def tiles(self) -> int:
        return self.down * self.across

    def cuts(self, shape: tuple[int, int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return cuts(shape[0], self.down), cuts(shape[1], self.across)


@dataclass(frozen=True, slots=True)
class BlockHead:
    """The part of a block that all its tiles share."""

    rule: Rule
    classes: int
    spread: int
    """Which set of count tables."""
    rates: npt.NDArray[np.uint8]
    """Per class: how often it changes, in eighths of an octave below 1."""
    inverse: npt.NDArray[np.bool_]
    """Per class: the rate is of the unchanged."""
    steps: Sequence[bytes]
    """Scaled step tables."""
    step_table: npt.NDArray[np.uint8]
    """Per class: its step table."""
    grids: Sequence[RegionGrid]
    """Per segment."""


@njit(**LEAN)
def shift_rates(rates: Any, inverse: Any, offset: Any, out: Any) -> None:
    """The rates of a region: the block's moved by an offset, but for classes that never change or are inverted."""
    for c in range(CLASSES):
        keep = rates[c] == NEVER or inverse[c]
        out[c] = rates[c] if keep else min(max(np.int64(rates[c]) + offset, 0), NEVER - 1)


def exponent(dtype: Dtype) -> tuple[int, int]:
    """Lowest bit and mask of the exponent; a dtype without one has one class for all."""
    return dtype.exponent_shift, (1 << dtype.exponent_bits) - 1


def head_limit(regions: int) -> int:
    """The most bytes a head can have."""
    return 6 + CLASSES + CLASSES // 8 + 1 + CLASSES * (1 + SYMBOLS) + CLASSES + 12 * regions


def pack_head(head: BlockHead) -> bytes:
    rule = head.rule
    out = bytearray([VERSION, rule.top, rule.span, rule.leveled, head.classes, head.spread])
    out += head.rates.tobytes() + np.packbits(head.inverse).tobytes()
    out.append(len(head.steps))
    for table in head.steps:
        out += bytes([len(table)]) + table
    if len(head.steps) > 1:
        out += head.step_table.tobytes()
    for grid in head.grids:
        out += _varint(grid.down) + _varint(grid.across) + bytes([grid.flags, grid.offset & 255])
    return bytes(out)


def parse_head(dtype: Dtype, data: Bytes, shapes: Sequence[tuple[int, int]]) -> BlockHead:
    """The head of a block whose regions are walked in these shapes."""
    read = _Reader(data.tobytes())
    version, top, span, leveled, classes, spread = read.take(6)
    shift, mask = exponent(dtype)
    if version != VERSION:
        raise CorruptStream(f"a context block of version {version}; this build reads version {VERSION}")
    if top > mask or not 1 <= span <= min(top + 1, CLASSES - 1) or leveled > 1:
        raise CorruptStream(f"a context head with exponents {top} down by {span} makes no sense for {dtype.name}")
    if not 2 <= classes <= CLASSES or spread >= len(SPREADS):
        raise CorruptStream(f"a context head with {classes} classes and spread {spread} makes no sense")
    rates = np.frombuffer(read.take(CLASSES), np.uint8)
    inverse = np.unpackbits(np.frombuffer(read.take(CLASSES // 8), np.uint8)).astype(bool)
    count = read.byte()
    if not 1 <= count <= CLASSES:
        raise CorruptStream(f"a context head with {count} step tables makes no sense")
    steps = [read.take(read.byte()) for _ in range(count)]
    if any(len(table) > SYMBOLS or not any(table) for table in steps):
        raise CorruptStream("a context head has an empty or oversized step table")
    # a copy: kernels are compiled anew for memory that is read-only
    step_table = np.frombuffer(read.take(CLASSES) if count > 1 else bytes(CLASSES), np.uint8).copy()
    if int(step_table.max()) >= count:
        raise CorruptStream("a context head names a step table that is not there")
    grids = [_grid(read, shape, leveled) for shape in shapes]
    read.end()
    rule = Rule(top, span, bool(leveled), shift, mask)
    return BlockHead(rule, classes, spread, rates, inverse, steps, step_table, grids)


def _grid(read: _Reader, shape: tuple[int, int], leveled: int) -> RegionGrid:
    rows, columns = shape
    down, across, flags, offset = read.varint(), read.varint(), read.byte(), read.byte()
    fits = 1 <= down <= rows and 1 <= across <= columns and down * across <= 64 + rows * columns // 256
    if not fits or -(-rows // down) * -(-columns // across) > MAX_TILE:
        raise CorruptStream(f"a context grid of {down} × {across} tiles does not fit {rows} × {columns} units")
    if flags > (ROW_LEVELS | COLUMN_LEVELS) or (flags and not leveled):
        raise CorruptStream(f"a context head has region flags {flags}")
    return RegionGrid(down, across, flags, offset - 256 if offset > 127 else offset)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, size: int) -> bytes:
        if self._at + size > len(self._data):
            raise CountMismatch("a context head ends too early")
        self._at += size
        return self._data[self._at - size : self._at]

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        value = 0
        for shift in range(0, 35, 7):
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise CorruptStream("a context head holds a number that is too long")

    def end(self) -> None:
        if self._at != len(self._data):
            raise CountMismatch("a context head goes on after its last region")


def pack_sizes(sizes: npt.NDArray[np.int64]) -> bytes:
    planes = max(1, (int(sizes.max(initial=0)).bit_length() + 7) // 8)
    return b"".join(((sizes >> 8 * p) & 255).astype(np.uint8).tobytes() for p in range(planes))


def unpack_sizes(data: Bytes, tiles: int, total: int) -> npt.NDArray[np.int64]:
    """Where each tile's bytes start; the last entry is their end, which must be `total`."""
    if data.size % tiles:
        raise CountMismatch(f"stream 'sizes' holds {data.size} bytes for {tiles} tiles")
    starts = np.zeros(tiles + 1, np.int64)
    sizes: Any = 0
    for number, plane in enumerate(data.reshape(-1, tiles).astype(np.int64)):
        sizes = sizes + (plane << 8 * number)
    np.cumsum(sizes, out=starts[1:])
    if starts[-1] != total:
        raise CountMismatch(f"stream 'tiles' holds {total} bytes, the sizes of its tiles add up to {starts[-1]}")
    return starts


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def pack_levels(levels: LevelBytes) -> bytes:
    """A table of LEVELS bytes, four bytes of length, and the range-coded levels."""
    table = scale(np.bincount(levels, minlength=LEVELS)[:LEVELS])
    ops, out = np.empty(levels.size, np.uint64), np.empty(3 * levels.size + 8, np.uint8)
    size = encode_ops(ops, _write_levels(levels, unscale(table), ops), out, 0)
    return table + int(size).to_bytes(4, "little") + out[:size].tobytes()


def unpack_levels(data: npt.NDArray[np.uint8], count: int) -> tuple[LevelBytes, int] | None:
    """The levels at the start of data and how many bytes they took; None where the bytes do not hold them."""
    if data.size < LEVEL_HEAD or not data[:LEVELS].any():
        return None
    size = int.from_bytes(data[LEVELS:LEVEL_HEAD].tobytes(), "little")
    if size > data.size - LEVEL_HEAD:
        return None
    table, out = unscale(data[:LEVELS].tobytes()), np.empty(count, np.uint8)
    if (
        not _read_levels(data[LEVEL_HEAD : LEVEL_HEAD + size], table, coarse([table]), out)
        or int(out.max(initial=0)) >= LEVELS
    ):
        return None
    return out, LEVEL_HEAD + size


@njit(nogil=True, cache=True, error_model="numpy")
def _write_levels(levels: Any, tables: Any, ops: Any) -> Any:
    at = 0
    for level in levels:
        at = put_symbol(ops, at, tables, 0, level)
    return at


@njit(nogil=True, cache=True, error_model="numpy")
def _read_levels(data: Any, tables: Any, first: Any, out: Any) -> Any:
    code, span, at = start_decode(data, 0, data.size)
    for i in range(out.size):
        code, span, at, level = get_symbol(code, span, at, data, data.size, tables, first, 0)
        out[i] = level
        if at > data.size + 4:
            return False
    return at >= data.size
