"""Segments and their tiles: which rectangles of a tensor are coded on their own.

A segment is a region's matrix of units, cut into a grid of tiles: cut i of an axis lies at i · length // count, so a
grid of 8 (or 24, 40 …) has its lines where shards of 2, 4 and 8 have theirs, and one of 16 where 16 have theirs. A tile
is coded from its own old weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...compiled import njit
from ...dtypes import Bits
from .classes import CHUNK, COLUMN_NEUTRAL, ROW_NEUTRAL

TILE, TILE_MIN = 1 << 16, 1 << 14
"""Elements a tile aims at, and the least it may have to keep its sides on shard lines."""
SIXTEEN_MIN = 3 * TILE // 8
"""The least for lines of 16 shards, which only large models have."""

NARROW = 64
"""A segment with fewer columns is walked as one row: chunks of a few weights would cost a chunk each."""

Cuts = npt.NDArray[np.int64]
LevelBytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Old weights as kernels want them: weight [r, c] is unit r · stride + c."""

    units: npt.NDArray[np.uint8]
    """Their bytes, from the first weight to the last; read-only."""
    size: int
    """Bytes per unit."""
    stride: int
    rows: int
    columns: int

    @classmethod
    def over(cls, old: Bits) -> Matrix:
        """Without a copy, unless columns do not follow each other in memory."""
        rows, columns = old.shape
        size = old.itemsize
        if old.size and (old.strides[1] != size or old.strides[0] < 0 or old.strides[0] % size):
            old = np.ascontiguousarray(old)
        stride = old.strides[0] // size if old.size else 0
        span = (rows - 1) * stride + columns if old.size else 0
        flat = np.lib.stride_tricks.as_strided(old, (span,), (size,), writeable=False)
        return cls(flat.view(np.uint8), size, stride, rows, columns)


def cuts(length: int, count: int) -> Cuts:
    return np.arange(count + 1, dtype=np.int64) * length // count


@njit(nogil=True, cache=True, error_model="numpy")
def widest(lines: Any) -> Any:
    most = 0
    for i in range(lines.size - 1):
        most = max(most, lines[i + 1] - lines[i])
    return most


def grid_of(rows: int, columns: int, tile: int = TILE) -> tuple[int, int]:
    """Tiles per axis: about `tile` elements each, lines where 16, 8, 4 or 2 shards have theirs as far as that allows.

    Columns are cut only into pieces that fill at least three quarters of their chunks.
    """
    degrees = (16, 8, 4, 2) if rows * columns >= 16 * 16 * min(SIXTEEN_MIN, tile) else (8, 4, 2)
    across = next((d for d in degrees if columns % d == 0 and _fills_chunks(columns // d)), 1)
    down = next((d for d in degrees if rows % d == 0), 1)
    while down * across > 1 and rows * columns < down * across * min(TILE_MIN, tile):
        down, across = (down // 2, across) if down > 1 else (down, across // 2)
    while columns // across > tile:
        across *= 2
    if rows * columns > down * across * tile:
        down *= -(-rows * columns // (down * across * tile))
    return min(down, max(rows, 1)), across


def _fills_chunks(columns: int) -> bool:
    return 4 * columns >= 3 * CHUNK * -(-columns // CHUNK)


def walked(rows: int, columns: int) -> tuple[int, int]:
    """The shape a segment is walked in: a narrow one as one row."""
    return (1, rows * columns) if columns < NARROW else (rows, columns)


def padded(
    rows: LevelBytes | None, columns: LevelBytes | None, shape: tuple[int, int]
) -> tuple[LevelBytes, LevelBytes]:
    """Levels of every row and, with a chunk behind them, of every column; neutral where there are none."""
    rows = np.full(shape[0], ROW_NEUTRAL, np.uint8) if rows is None else rows
    columns = np.full(shape[1], COLUMN_NEUTRAL, np.uint8) if columns is None else columns
    return rows, np.concatenate([columns, np.zeros(CHUNK, np.uint8)])
