"""A delta cut for the ranks of an engine: what changes in each piece a rank holds, tile by tile of its memory.

Made once per node, in the decoder's process (decoder.py), without any weights. No torch here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from numba import njit

from ...core.change import Region, RegionMoves
from ...core.dtypes import Bits
from ...core.parallel import for_each
from . import arrays

TILE_BITS = 16
"""Tiles are runs of 65,536 units of a piece, as `kernels.flat_plan` cuts them: positions in them take two bytes."""


class PieceMoves(msgspec.Struct, frozen=True):
    """Changed units of one piece: positions ascending and counted within the piece."""

    piece: int
    kind: int
    positions: Any
    values: Any


class RankPieces:
    """The pieces of one rank, and how their memory is numbered."""

    def __init__(self, pieces: Sequence[Region]) -> None:
        self.pieces = pieces
        self.by_tensor: dict[str, list[int]] = defaultdict(list)
        for number, piece in enumerate(pieces):
            self.by_tensor[piece.tensor.name].append(number)
        self.first_tile = np.cumsum([0, *(-(-piece.units >> TILE_BITS) for piece in pieces)])
        self.width = max((piece.tensor.unit_size for piece in pieces), default=1)

    @property
    def tiles(self) -> int:
        return int(self.first_tile[-1])

    def cut(self, moves: RegionMoves) -> list[PieceMoves]:
        """What of a region's changes lies in each piece that holds some of it."""
        region, found = moves.region, []
        for number in self.by_tensor.get(region.tensor.name, ()):
            piece = self.pieces[number]
            row, column = region.row - piece.row, region.column - piece.column
            if column == 0 and region.columns == piece.columns and row >= 0 and row + region.rows <= piece.rows:
                # every position moves by the same distance
                positions, values = moves.positions + np.uint32(row * piece.columns), moves.values
            else:
                positions, values = np.empty_like(moves.positions), np.empty_like(moves.values)
                count = _cut(
                    moves.positions, moves.values, max(region.columns, 1), row, column, piece.rows, piece.columns,
                    positions, values,
                )  # fmt: skip
                positions, values = positions[:count], values[:count]
            if positions.size:
                found.append(PieceMoves(number, moves.kind, positions, values))
        return found


def write_moves(path: Path, rank: RankPieces, cut: Iterable[PieceMoves]) -> list[tuple[int, int]]:
    """All moves of a rank as arrays, those of each kind apart. Returns (kind, count) of each part of the file."""
    by_kind: dict[int, dict[int, list[PieceMoves]]] = defaultdict(lambda: defaultdict(list))
    for moves in cut:
        by_kind[moves.kind][moves.piece].append(moves)
    counts = {kind: sum(m.positions.size for ms in found.values() for m in ms) for kind, found in by_kind.items()}
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for kind, count in counts.items():
        shapes[f"starts.{kind}"] = ("<i8", (rank.tiles + 1,))
        shapes[f"positions.{kind}"] = ("<u2", (count,))
        shapes[f"values.{kind}"] = (f"<u{rank.width}", (count,))
    made = arrays.create(path, shapes)
    for kind, found in by_kind.items():
        _fill(rank, found, *(made[f"{name}.{kind}"] for name in ("starts", "positions", "values")))
    return list(counts.items())


def _fill(
    rank: RankPieces, found: dict[int, list[PieceMoves]], starts: Any, positions: npt.NDArray[np.uint16], values: Bits
) -> None:
    begin, work = 0, []
    for number in range(len(rank.pieces)):
        work.append((number, begin))
        begin += sum(moves.positions.size for moves in found.get(number, ()))
    starts[-1] = begin

    def one(item: tuple[int, int]) -> None:
        number, to = item
        tiles = slice(int(rank.first_tile[number]), int(rank.first_tile[number + 1]))
        where, what = _joined(found.get(number, ()))
        end = to + where.size
        _to_tiles(where, what, to, starts[tiles], positions[to:end], values[to:end])

    for_each(one, work)


def _joined(parts: Sequence[PieceMoves]) -> tuple[npt.NDArray[np.uint32], Bits]:
    """The moves of a piece in one array each, ascending."""
    if not parts:
        return np.empty(0, np.uint32), np.empty(0, np.uint8)
    if len(parts) == 1:
        return parts[0].positions, parts[0].values
    parts = sorted(parts, key=lambda moves: int(moves.positions[0]))
    positions = np.concatenate([moves.positions for moves in parts])
    values = np.concatenate([moves.values for moves in parts])
    if any(a.positions[-1] > b.positions[0] for a, b in pairwise(parts)):
        # regions that stand side by side in the tensor share its rows
        order = np.argsort(positions, kind="stable")
        positions, values = positions[order], values[order]
    return positions, values


@njit(cache=True, nogil=True)
def _cut(
    positions: Any, values: Any, across: Any, row: Any, column: Any, rows: Any, columns: Any, out: Any, kept: Any
) -> Any:
    """Changes of a region that lie in a piece. The region's corner is at [row, column] of the piece."""
    count = 0
    for i in range(positions.size):
        line = np.int64(positions[i]) // across
        r, c = row + line, column + np.int64(positions[i]) - line * across
        if 0 <= r < rows and 0 <= c < columns:
            out[count] = r * columns + c
            kept[count] = values[i]
            count += 1
    return count


@njit(cache=True, nogil=True)
def _to_tiles(positions: Any, values: Any, to: Any, starts: Any, out: Any, kept: Any) -> None:
    """Number the changes of a piece within its tiles; `to` is where its first change stands in the whole."""
    i = 0
    for tile in range(starts.size):
        starts[tile] = to + i
        end = np.int64(tile + 1) << TILE_BITS
        while i < positions.size and np.int64(positions[i]) < end:
            out[i] = np.int64(positions[i]) & ((1 << TILE_BITS) - 1)
            kept[i] = values[i]
            i += 1
