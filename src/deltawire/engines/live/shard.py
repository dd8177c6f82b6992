"""One rank's weights, read and written through the placement map, in checkpoint coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from ...core import digest
from ...core.change import Change, Region
from ...core.digest import StateDigest
from ...core.dtypes import Bits
from ...core.parallel import for_each, ordered_map
from ...core.scatter import scatter_and_look
from ...core.schema import TensorSpec
from .layout import Sums
from .placement import Piece, Places

Positions = npt.NDArray[np.uint32]

WORTH_THREADS = 1 << 19
"""Changes that are worth starting threads for."""

DENSE = 4
"""Full weights that differ in more than one of so many units are written over the old ones, not staged."""


Part = tuple[slice, slice]
"""Rows and columns of a piece."""

WHOLE: Part = (slice(None), slice(None))


@dataclass(frozen=True, slots=True)
class PieceChange:
    """What changes in one piece. `change.region` is the piece's own."""

    piece: int
    """Its number in the shard."""
    change: Change


class Shard(Protocol):
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

    def put(self, piece: int, row: int, bits: Bits) -> None:
        """Overwrite whole rows of a piece, from `row` on."""
        ...

    def moved(self, patch: Any, groups: Sequence[int]) -> Sums:
        """How the digest of each group moves when a patch is written; `groups` has the group of every piece."""
        ...

    def digests(self, groups: Sequence[int]) -> Sums:
        """The state digest of each group of pieces, in the engine's own thread."""
        ...

    def digests_beside(self, groups: Sequence[int]) -> Sums:
        """The same in another thread, while the model generates."""
        ...


def open_shard(pieces: Sequence[Piece]) -> Shard:
    """Weights in host memory are patched by the core's kernels, others by torch's or Triton's. Raises ValueError where
    that cannot be done."""
    for piece in pieces:
        if piece.view.is_meta:
            raise ValueError(f"it is not known where {piece.region.tensor.name!r} lies in memory")
    if all(piece.view.device.type == "cpu" for piece in pieces):
        return HostShard(pieces)
    from .device import DeviceShard

    return DeviceShard(pieces)


class HostShard:
    audited = True

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self._memory = [_Rows(piece) if piece.places is None else _Placed(piece, piece.places) for piece in pieces]

    def read(self, piece: int, part: Part = WHOLE) -> Bits:
        return self._memory[piece].read(part)

    def prepare(self, changes: Sequence[PieceChange]) -> list[PieceChange]:
        return list(changes)

    def write(self, patch: list[PieceChange]) -> None:
        self._scatter(patch, new=True)

    def undo(self, patch: list[PieceChange]) -> None:
        self._scatter(patch, new=False)

    def put(self, piece: int, row: int, bits: Bits) -> None:
        self._memory[piece].put(row, bits)

    def digests(self, groups: Sequence[int]) -> Sums:
        def one(number: int) -> StateDigest:
            region = self.pieces[number].region
            return digest.of_rows(region.tensor.name, self.read(number), region.base, region.tensor.columns)

        totals = {group: StateDigest() for group in groups}
        # large ones first, so that no thread is left alone with one at the end
        order = sorted(range(len(self.pieces)), key=lambda number: -self.pieces[number].region.units)
        for number, part in zip(order, ordered_map(one, order), strict=True):
            totals[groups[number]] += part
        return totals

    digests_beside = digests

    def moved(self, patch: list[PieceChange], groups: Sequence[int]) -> Sums:
        totals = {group: StateDigest() for group in groups}
        for item in patch:
            totals[groups[item.piece]] += item.change.digest()
        return totals

    def _scatter(self, patch: list[PieceChange], *, new: bool) -> None:
        def one(item: PieceChange) -> None:
            change = item.change
            if not self._memory[item.piece].write(change.positions, change.new if new else change.old):
                raise RuntimeError(f"memory of {change.region.tensor.name!r} does not hold what was written to it")

        many = sum(item.change.count for item in patch) >= WORTH_THREADS
        for_each(one, patch, None if many else 1)


class _Rows:
    """Host memory whose rows are those of the piece."""

    def __init__(self, piece: Piece) -> None:
        self._bits = _host_bits(piece)
        rows, columns = self._bits.shape
        stride = self._bits.strides[0] // self._bits.itemsize if rows > 1 else columns
        span = ((rows - 1) * stride + columns,)
        self._flat = np.lib.stride_tricks.as_strided(self._bits, span, (self._bits.itemsize,))
        # the piece's memory as the core sees a tensor: flat bits, and the rectangle of them that is ours
        whole = TensorSpec(piece.region.tensor.name, piece.region.tensor.dtype, (rows, stride))
        self._geometry = Region(whole, 0, rows, 0, columns).geometry

    def read(self, part: Part) -> Bits:
        return self._bits[part]

    def write(self, positions: Positions, values: Bits) -> bool:
        """Returns whether memory holds the values afterwards."""
        return bool(scatter_and_look(self._flat, positions, values, *self._geometry))

    def put(self, row: int, bits: Bits) -> None:
        self._bits[row : row + bits.shape[0]] = bits


class _Placed:
    """Host memory that a kernel's layout is learned of: units lie where two tables say."""

    def __init__(self, piece: Piece, places: Places) -> None:
        self._bits, self._places, self._across = _host_bits(piece), places, piece.region.columns

    def read(self, part: Part) -> Bits:
        rows, columns = self._places.rows[part[0]], self._places.columns[part[1]]
        out = np.empty((rows.size, columns.size), self._bits.dtype)
        _gather(self._bits, rows, columns, out)
        return out

    def write(self, positions: Positions, values: Bits) -> bool:
        row, column = np.divmod(positions, np.uint32(self._across))
        where = self._places.rows[row] + self._places.columns[column]
        return bool(scatter_and_look(self._bits, where, values, 0, 1, 1))

    def put(self, row: int, bits: Bits) -> None:
        self._bits[self._places.rows[row : row + bits.shape[0], None] + self._places.columns] = bits


@njit(cache=True, nogil=True)
def _gather(bits: Any, rows: Any, columns: Any, out: Any) -> None:
    for r in range(rows.size):
        for c in range(columns.size):
            out[r, c] = bits[rows[r] + columns[c]]


def _host_bits(piece: Piece) -> Bits:
    size = piece.view.dtype.itemsize
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    return piece.view.view(signed).numpy().view(f"u{size}")
