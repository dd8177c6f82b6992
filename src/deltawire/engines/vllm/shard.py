"""One rank's weights, read and written through the placement map, in checkpoint coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ...core import digest
from ...core.change import Change, Region
from ...core.digest import StateDigest
from ...core.dtypes import Bits
from ...core.parallel import for_each, ordered_map
from ...core.scatter import scatter_and_look
from ...core.schema import TensorSpec
from .layout import Sums
from .placement import Piece

WORTH_THREADS = 1 << 19
"""Changes that are worth starting threads for."""

DENSE = 4
"""Full weights that differ in more than one of so many units are written over the old ones, not staged."""


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

    def read(self, piece: int) -> Bits:
        """The piece's present bits, [rows, columns]; not to be written to."""
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
    """Weights in host memory are patched by the core's kernels, others by torch's or Triton's."""
    if all(piece.view.device.type == "cpu" for piece in pieces):
        return HostShard(pieces)
    from .device import DeviceShard

    return DeviceShard(pieces)


class HostShard:
    audited = True

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self._bits = [_host_bits(piece) for piece in pieces]
        self._cells = [_cell(piece, bits) for piece, bits in zip(pieces, self._bits, strict=True)]

    def read(self, piece: int) -> Bits:
        return self._bits[piece]

    def prepare(self, changes: Sequence[PieceChange]) -> list[PieceChange]:
        return list(changes)

    def write(self, patch: list[PieceChange]) -> None:
        self._scatter(patch, new=True)

    def undo(self, patch: list[PieceChange]) -> None:
        self._scatter(patch, new=False)

    def put(self, piece: int, row: int, bits: Bits) -> None:
        self._bits[piece][row : row + bits.shape[0]] = bits

    def digests(self, groups: Sequence[int]) -> Sums:
        def one(number: int) -> StateDigest:
            region = self.pieces[number].region
            return digest.of_rows(region.tensor.name, self._bits[number], region.base, region.tensor.columns)

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
            change, (place, flat) = item.change, self._cells[item.piece]
            values = change.new if new else change.old
            if not scatter_and_look(flat, change.positions, values, *place.geometry):
                raise RuntimeError(f"memory of {change.region.tensor.name!r} does not hold what was written to it")

        many = sum(item.change.count for item in patch) >= WORTH_THREADS
        for_each(one, patch, None if many else 1)


def _host_bits(piece: Piece) -> Bits:
    size = piece.view.dtype.itemsize
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    return piece.view.view(signed).numpy().view(f"u{size}")


def _cell(piece: Piece, bits: Bits) -> tuple[Region, Bits]:
    """The piece's memory as the core sees a tensor: flat bits, and the rectangle of them that is ours."""
    rows, columns = bits.shape
    stride = bits.strides[0] // bits.itemsize if rows > 1 else columns
    flat = np.lib.stride_tricks.as_strided(bits, ((rows - 1) * stride + columns,), (bits.itemsize,))
    whole = TensorSpec(piece.region.tensor.name, piece.region.tensor.dtype, (rows, stride))
    return Region(whole, 0, rows, 0, columns), flat
