"""A shard on a GPU: what changes is sent there before the pause; in the pause it takes a launch or two."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import kernels
from ...core import digest
from ...core.change import Change, Region
from ...core.digest import StateDigest
from ...core.dtypes import Bits
from ...core.schema import TensorSpec
from ...kernels import torch_ops
from ...kernels.plan import units
from .placement import Piece
from .shard import PieceChange, Sums


class DeviceShard:
    audited = False

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self._views = [piece.view for piece in pieces]
        self._names = [str(number) for number in range(len(pieces))]
        for piece in pieces:
            if not piece.view.is_contiguous():
                raise ValueError(f"{piece.region.tensor.name!r} is not in one piece on its device")
        self._proof: tuple[tuple[int, ...], dict[int, _Proof]] | None = None
        locals_ = [
            Region(TensorSpec(name, p.region.tensor.dtype, (p.region.rows, p.region.columns)), 0, p.region.rows, 0,
                   p.region.columns)
            for name, p in zip(self._names, pieces, strict=True)
        ]  # fmt: skip
        self._plan = kernels.region_plan(self._names, self._views, locals_)

    def read(self, piece: int) -> Bits:
        view = self._views[piece]
        signed = units(view).cpu().numpy()
        return signed.view(f"u{signed.itemsize}").reshape(view.shape)

    def prepare(self, changes: Sequence[PieceChange]) -> Any:
        by_piece: dict[int, list[Change]] = {}
        for item in changes:
            by_piece.setdefault(item.piece, []).append(item.change)
        whole = [_joined(piece, by_piece.get(number, [])) for number, piece in enumerate(self.pieces)]
        return kernels.from_changes(self._plan, whole)

    def write(self, patch: Any) -> None:
        kernels.apply(self._views, patch, plan=self._plan)

    def undo(self, patch: Any) -> None:
        kernels.apply(self._views, patch.swapped(), plan=self._plan)

    def put(self, piece: int, row: int, bits: Bits) -> None:
        view = self._views[piece]
        signed = torch.from_numpy(np.ascontiguousarray(bits).view(f"i{bits.itemsize}" if bits.itemsize > 1 else "u1"))
        units(view).reshape(view.shape)[row : row + bits.shape[0]].copy_(signed)

    def digests(self, groups: Sequence[int]) -> Sums:
        key = tuple(groups)
        if self._proof is None or self._proof[0] != key:
            # made once: in a pause there is no time to look at every piece again
            self._proof = key, {group: _Proof([p for p, g in zip(self.pieces, key, strict=True) if g == group])
                                for group in dict.fromkeys(key)}  # fmt: skip
        return {group: proof.digest() for group, proof in self._proof[1].items()}


class _Proof:
    """The digest of some pieces, in a launch for those that lie on the digest's blocks and one for all others."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        device = pieces[0].view.device
        self._operations = kernels.operations(device)
        aligned = [piece for piece in pieces if _on_block_lines(piece.region)]
        others = [piece for piece in pieces if not _on_block_lines(piece.region)]
        self._views = [piece.view for piece in aligned]
        self._plan = kernels.flat_plan(self._views, unit=2) if aligned else None
        self._keys = _placed_keys(self._plan, aligned) if self._plan is not None else None
        by_kernel = self._operations is not torch_ops
        self._wide = [piece for piece in others if by_kernel and piece.view.dtype.itemsize == 2]
        self._bands = _bands_of(self._wide) if self._wide else None
        self._slow = [piece for piece in others if piece not in self._wide]
        self._table = torch.from_numpy(digest.TABLE.view("i8").copy()).to(device)

    def digest(self) -> StateDigest:
        out = torch.zeros(2, dtype=torch.int64, device=self._table.device)
        with torch.cuda.device(out.device) if out.device.type == "cuda" else nullcontext():
            if self._bands is not None:
                from ._rows import rows_kernel

                rows_kernel[(self._bands.shape[0],)](self._bands, self._table, out, PERIOD=digest.BLOCK, BLOCK=512)
            if self._plan is not None:
                out += self._operations.digest(self._plan, self._views, self._keys)
            for piece in self._slow:
                out += _rows_digest(piece, self._table)
        lane0, lane1 = (value & (1 << 64) - 1 for value in out.tolist())
        return StateDigest(lane0, lane1)


def _bands_of(pieces: Sequence[Piece], height: int = 16) -> Tensor:
    """What the kernel's programs work on: some rows of a piece each."""
    bands = []
    for piece in pieces:
        region = piece.region
        keys = digest.tensor_keys(region.tensor.name).view(np.int64).tolist()
        for row in range(0, region.rows, height):
            address = piece.view.data_ptr() + row * region.columns * 2
            rows = min(height, region.rows - row)
            first = region.base + row * region.tensor.columns
            bands.append([address, rows, region.columns, first, region.tensor.columns, *keys])
    return torch.tensor(bands, dtype=torch.int64, device=pieces[0].view.device)


def _joined(piece: Piece, changes: list[Change]) -> Change:
    """All changes of a piece as one, in the order of their positions."""
    if len(changes) == 1:
        return changes[0]
    unit = f"u{piece.view.dtype.itemsize}"
    positions = np.concatenate([np.empty(0, np.uint32), *(change.positions for change in changes)])
    order = np.argsort(positions, kind="stable")
    old = np.concatenate([np.empty(0, unit), *(change.old for change in changes)])
    new = np.concatenate([np.empty(0, unit), *(change.new for change in changes)])
    return Change(piece.region, positions[order], old[order], new[order])


def _halves(region: Region) -> int:
    """Digest units (of 16 bits at the most) per unit of a tensor."""
    return 2 if region.tensor.unit_size == 4 else 1


def _on_block_lines(region: Region) -> bool:
    """Whether the digest's blocks begin where the piece does, so that it counts like a tensor of its own."""
    return region.contiguous and region.base * _halves(region) % digest.BLOCK == 0


def _placed_keys(plan: kernels.Plan, pieces: Sequence[Piece]) -> Tensor:
    """Block b of a piece is block first + b of its tensor, and the digest's keys count by blocks."""
    each = np.array([digest.tensor_keys(p.region.tensor.name) for p in pieces], np.uint64).reshape(-1, 2)
    first = [p.region.base * _halves(p.region) // digest.BLOCK for p in pieces]
    shifted = each + np.array(first, np.uint64)[:, None]
    return torch.from_numpy(shifted[plan.tensor].view(np.int64)).to(plan.device)


def _rows_digest(piece: Piece, table: Tensor) -> Tensor:
    """Both lanes of a block of columns, in plain torch through the definition: right for any layout, much slower."""
    region, halves = piece.region, _halves(piece.region)
    columns = region.columns * halves
    bits = units(piece.view, min(piece.view.dtype.itemsize, 2)).reshape(region.rows, columns)
    key = torch.from_numpy(digest.tensor_keys(region.tensor.name).view(np.int64)).to(bits.device)
    out = torch.zeros(2, dtype=torch.int64, device=bits.device)
    band = max(1, (1 << 22) // columns)
    for row in range(0, region.rows, band):
        part = bits[row : row + band].to(torch.int64) & ((1 << 8 * bits.dtype.itemsize) - 1)
        lines = torch.arange(row, row + part.shape[0], device=bits.device)
        at = (region.base + lines * region.tensor.columns)[:, None] * halves + torch.arange(columns, device=bits.device)
        for lane in range(2):
            weight = torch_ops._mix(key[lane] + at // digest.BLOCK) * table[lane][at % digest.BLOCK]
            out[lane] += (weight * part).sum()
    return out
