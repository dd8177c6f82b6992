"""A delta cut for pieces on a device: what changes in each of them, tile by tile of its memory, without any weights.

For the ranks of an engine that is done once per node, in a process without torch (engines/live/decoder.py).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.change import Region, RegionMoves
from ..core.codecs import context
from ..core.codecs.context.decoder import Tiles
from ..core.parallel import for_each
from .shard import cut_moves

Array = npt.NDArray[Any]
NumberedMoves = tuple[int, RegionMoves]
"""Changed units of a piece, and its number."""

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtypes and shapes of arrays."""

TILE_BITS = 16
"""Tiles are runs of 65,536 units of a piece, as `kernels.flat_plan` cuts them: positions in them take two bytes."""


_AT_ONCE = 1 << 18
"""Changes that a thread joins at a time, at least: a mixture of experts has tens of thousands of pieces."""


class CutTiles(Exception):
    """Tiles of a context block lie across the edge of a piece, so no piece has all of their old weights."""


@dataclass(frozen=True, slots=True)
class ArrayInFile:
    """An array that stays in its file and is read in parts."""

    file: FileIO
    start: int
    """Where in the file it begins."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape))

    def __getitem__(self, part: slice) -> ArrayInFile:
        first, last, _ = part.indices(self.shape[0])
        row = self.dtype.itemsize * int(np.prod(self.shape[1:]))
        return replace(self, start=self.start + first * row, shape=(max(last - first, 0), *self.shape[1:]))

    def whole(self) -> Array:
        out = np.empty(self.shape, self.dtype)
        self.read(0, out.reshape(-1).view(np.uint8))
        return out

    def read(self, start: int, out: Array) -> None:
        """Fill `out`, which is bytes, from byte `start` of the array on."""
        view = out.data
        while view:
            count = os.preadv(self.file.fileno(), [view], self.start + start)
            if not count:
                raise OSError(f"{self.file.name!r} ends within an array")
            start, view = start + count, view[count:]


class DevicePieces:
    """The pieces of one rank or model, and how their memory is numbered."""

    def __init__(self, pieces: Sequence[Region]) -> None:
        self._pieces = pieces
        self._by_tensor: dict[str, list[int]] = defaultdict(list)
        for number, piece in enumerate(pieces):
            self._by_tensor[piece.tensor.name].append(number)
        self.first_tile = np.cumsum([0, *(-(-piece.units >> TILE_BITS) for piece in pieces)]).tolist()
        """The number of the first tile of each piece, and that of all tiles."""
        self._width = max((piece.tensor.unit_size for piece in pieces), default=1)

    def cut(self, block: list[RegionMoves] | context.TiledBlock) -> tuple[list[NumberedMoves], list[Tiles]]:
        """The part of a block in these pieces: moves, or tiles whose classes must be counted. Raises CutTiles."""
        if isinstance(block, context.TiledBlock):
            return [], self._tiles(block)
        found = []
        for moves in block:
            for number in self._by_tensor.get(moves.region.tensor.name, ()):
                own = cut_moves(moves, self._pieces[number])
                if own.positions.size:
                    found.append((number, own))
        return found, []

    def _tiles(self, block: context.TiledBlock) -> list[Tiles]:
        found = []
        for number, (region, _) in enumerate(block.regions):
            for piece_number in self._by_tensor.get(region.tensor.name, ()):
                piece = self._pieces[piece_number]
                part = region.meet(piece)
                if part is None:
                    continue
                rows, columns = part.within(region)
                if block.around(number, rows, columns) != (rows, columns):
                    raise CutTiles
                span = block.span(number, rows, columns)
                if len(span.row_cuts) == 2 and span.column_cuts[-1] != part.columns and part.columns != piece.columns:
                    # a narrow region is walked as one row, which it is only in memory of the same width
                    raise CutTiles
                first = (part.row - piece.row) * piece.columns + part.column - piece.column
                found.append(Tiles(piece_number, first, max(piece.columns, 1), block, span))
        return found

    def join(
        self,
        cut: Iterable[NumberedMoves],
        make: Callable[[Shapes], dict[str, Array]],
        threads: int | None = None,
    ) -> tuple[list[tuple[int, int]], dict[str, Array]]:
        """All moves as arrays that `make` makes, those of each kind apart. Returns (kind, count) of each, and them."""
        by_kind: dict[int, dict[int, list[RegionMoves]]] = defaultdict(lambda: defaultdict(list))
        for number, moves in cut:
            by_kind[moves.kind][number].append(moves)
        counts = {kind: sum(m.positions.size for ms in found.values() for m in ms) for kind, found in by_kind.items()}
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        for kind, count in counts.items():
            shapes[f"starts.{kind}"] = ("<i8", (self.first_tile[-1] + 1,))
            shapes[f"positions.{kind}"] = ("<u2", (count,))
            shapes[f"values.{kind}"] = (f"<u{self._width}", (count,))
        made = make(shapes)
        for kind, found in by_kind.items():
            starts, positions, values = (made[f"{name}.{kind}"] for name in ("starts", "positions", "values"))
            self._fill(found, starts, positions, values, threads)
        return list(counts.items()), made

    def _fill(
        self,
        found: Mapping[int, list[RegionMoves]],
        starts: Array,
        positions: Array,
        values: Array,
        threads: int | None,
    ) -> None:
        begin = 0
        work: list[list[tuple[int, int]]] = [[]]
        for number in range(len(self._pieces)):
            work[-1].append((number, begin))
            begin += sum(moves.positions.size for moves in found.get(number, ()))
            if begin - work[-1][0][1] >= _AT_ONCE:
                work.append([])
        starts[-1] = begin

        def one(number: int, to: int) -> None:
            first, last = self.first_tile[number : number + 2]
            edges, tile = np.arange(last - first, dtype=np.uint32) << np.uint32(TILE_BITS), 0
            for moves in _ascending(found.get(number, [])):
                # up to the last tile that has one of these
                next_tile = (int(moves.positions[-1]) >> TILE_BITS) + 1
                starts[first + tile : first + next_tile] = to + np.searchsorted(moves.positions, edges[tile:next_tile])
                tile, end = next_tile, to + moves.positions.size
                # two bytes of each: its position in the tile
                positions[to:end], values[to:end], to = moves.positions, moves.values, end
            starts[first + tile : last] = to

        def some(numbers: list[tuple[int, int]]) -> None:
            for number, to in numbers:
                one(number, to)

        for_each(some, work, threads)


def _ascending(parts: list[RegionMoves]) -> list[RegionMoves]:
    """The moves of a piece in the order of their positions."""
    parts = sorted(parts, key=lambda moves: int(moves.positions[0]))
    if all(a.positions[-1] < b.positions[0] for a, b in pairwise(parts)):
        return parts
    # regions that stand side by side in the tensor share its rows
    positions = np.concatenate([moves.positions for moves in parts])
    values = np.concatenate([moves.values for moves in parts])
    order = np.argsort(positions, kind="stable")
    return [RegionMoves(parts[0].region, positions[order], values[order], parts[0].kind)]
