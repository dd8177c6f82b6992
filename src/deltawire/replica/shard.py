"""Live weights as pieces: rectangles of the run's tensors, each with the memory that holds it.

A model of this process has a piece for every tensor, a rank of an engine has its part of them. Both are read, patched,
proven and taken back through a `LiveShard`: `HostShard` (host.py) or `DeviceShard` (device.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..core.change import Change, Region, RegionMoves
from ..core.compiled import njit
from ..core.digest import StateDigest
from ..core.dtypes import Bits
from ..core.full import Source

Positions = npt.NDArray[np.uint32]

Sums = dict[int, StateDigest]
"""Digests by group of pieces."""

Part = tuple[slice, slice]
"""Rows and columns of a piece."""

WHOLE: Part = (slice(None), slice(None))

DENSE = 4
"""Full weights that differ in more than one of so many units are written over the old ones, not staged."""


MOST_UNITS = 1 << 32
"""Units of a piece on a device: positions take four bytes."""


class Places(NamedTuple):
    """Where the units of a rectangle lie in flat memory: unit [r, c] at rows[r] + columns[c]."""

    rows: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a checkpoint tensor and the runtime memory that holds it."""

    region: Region
    view: Any
    """An array or tensor, [rows, columns] of the region; columns are neighbours in memory. With `places`, flat memory.
    Without data where it is not known which memory that is."""
    places: Places | None = None
    """None where rows are rows in memory too."""


@dataclass(frozen=True, slots=True)
class PieceChange:
    """A change within one piece. `change.region` lies within the piece's."""

    piece: int
    """Its number in the shard."""
    change: Change


class LiveShard(Protocol):
    pieces: Sequence[Piece]
    audited: bool
    """Whether reading all weights takes too long for a pause: `write` then proves what it wrote, and all of them are
    read before the pause and after it."""

    def read(self, piece: int, part: Part = WHOLE) -> Bits:
        """The piece's present bits, [rows, columns], or some rows and columns of them; not to be written to."""
        ...

    def prepare(self, changes: Sequence[PieceChange]) -> Any:
        """Checked changes in the form that `write` and `undo` need, on the weights' device."""
        ...

    def write(self, patch: Any) -> None:
        """The patch's new bits. RuntimeError where `audited` and memory does not hold them afterwards."""
        ...

    def undo(self, patch: Any) -> None:
        """The patch's old bits, wherever new ones were written."""
        ...

    def load(self, source: Source) -> None:
        """Overwrite everything with full weights."""
        ...

    def shifts(self, patch: Any, groups: Sequence[int]) -> Sums:
        """How the digest of each group moves when a patch is written; `groups` has the group of every piece."""
        ...

    def digests(self, groups: Sequence[int]) -> Sums:
        """The state digest of each group of pieces, in the engine's own thread."""
        ...

    def digests_beside(self, groups: Sequence[int]) -> Sums:
        """The state digest of each group of pieces, in another thread while the model generates."""
        ...


def cut(region: Region, piece: Region, positions: Positions, *values: Bits) -> tuple[Any, ...]:
    """The part of a region's changes that lies in a piece: positions within the piece, and the values at them."""
    row, column = region.row - piece.row, region.column - piece.column
    if column == 0 and region.columns == piece.columns and row >= 0 and row + region.rows <= piece.rows:
        # every position moves by the same distance
        return (positions + np.uint32(row * piece.columns) if row else positions), *values
    where, kept = np.empty_like(positions), np.empty_like(positions)
    sides = max(region.columns, 1), row, column, piece.rows, piece.columns
    count = _cut(positions, *sides, where, kept)
    return where[:count], *(each[kept[:count]] for each in values)


def cut_moves(moves: RegionMoves, piece: Region) -> RegionMoves:
    """The part of a region's moves that lies in a piece."""
    positions, values = cut(moves.region, piece, moves.positions, moves.values)
    return RegionMoves(piece, positions, values, moves.kind)


@njit(cache=True, nogil=True)
def _cut(positions: Any, across: Any, row: Any, column: Any, rows: Any, columns: Any, where: Any, kept: Any) -> Any:
    """Changes of a region that lie in a piece. The region's corner is at [row, column] of the piece."""
    count = 0
    for i in range(positions.size):
        line = np.int64(positions[i]) // across
        r, c = row + line, column + np.int64(positions[i]) - line * across
        if 0 <= r < rows and 0 <= c < columns:
            where[count] = r * columns + c
            kept[count] = i
            count += 1
    return count
