"""A shard on a GPU. Everything is made ready beside the model, on a stream of its own; a swap is a launch or two.

No weight leaves the device. Moves and ranks come as files that the decoder's process wrote, go to the device through
pinned memory, and become old and new bits there. Buffers in pinned memory are made once, before anything is served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import kernels
from ...core import digest
from ...core.change import Change, Region
from ...core.digest import StateDigest
from ...core.dtypes import Bits
from ...core.full import Source
from ...kernels import torch_ops
from ...kernels.pace import in_turns
from ...kernels.plan import Launch, Remember, narrow, units, widen
from . import arrays
from .layout import Sums
from .placement import Piece, Places
from .shard import DENSE, WHOLE, Part, PieceChange

_SLOT = 8 << 20
"""Bytes of one of two pinned buffers that everything passes through."""


SHADOW_UNITS = 1 << 24
"""Units in a kernel's order that may be held a second time, with 8 bytes each for their places."""

_BAND = 1 << 24
"""Units of full weights that are compared at once; a multiple of a tile."""


@dataclass(frozen=True, slots=True)
class Patch:
    """Changes on the device, ready to be written and to be taken back."""

    parts: list[tuple[kernels.Plan, kernels.Changed]]
    writes: list[Callable[[], None]]
    """What writes each part: made here, because in a swap there is no time to look where every tensor lies."""

    @property
    def count(self) -> int:
        return sum(changed.count for _, changed in self.parts)


class DeviceShard:
    audited = False

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        tiled = [piece for piece in pieces if piece.places is not None]
        if sum(piece.region.units for piece in tiled) > SHADOW_UNITS:
            raise ValueError(f"a kernel keeps {tiled[0].region.tensor.name!r} in tiles: too many to patch on a device")
        self._shadows = [_Shadow(piece, piece.places) for piece in pieces if piece.places is not None]
        shadows = iter(self._shadows)
        self._plain = [piece if piece.places is None else replace(piece, view=next(shadows).view) for piece in pieces]
        """The pieces, with shadows in the place of those that a kernel keeps in another order."""
        self._views = [piece.view for piece in self._plain]
        for piece in self._plain:
            if not piece.view.is_contiguous():
                raise ValueError(f"{piece.region.tensor.name!r} is not in one piece on its device")
            if piece.region.units > 1 << 32:
                raise ValueError(f"{piece.region.tensor.name!r} has more units than positions can count")
        self._names = [piece.region.tensor.name for piece in pieces]
        self._device = self._views[0].device if pieces else torch.device("cpu")
        self._plan = kernels.flat_plan(self._views)
        self._tile_plans = Remember()
        self._proof: tuple[tuple[int, ...], _Proof] | None = None
        cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if cuda else None
        self._slots = [_Slot(self._device) for _ in range(2)] if cuda else []

    def _patch(self, *parts: tuple[kernels.Plan, kernels.Changed]) -> Patch:
        return Patch([*parts], [kernels.prepare_apply(self._views, changed, plan=plan) for plan, changed in parts])

    def warm_up(self) -> None:
        """Run all that staging runs, on the tiles that versions mostly have: what a device compiles on first use would
        hold up a model that is being served. A weight is written over itself."""
        if self._stream is None:
            return
        with self._beside():
            starts = torch.ones(self._plan.tiles + 1, dtype=torch.int64, device=self._device)
            starts[0] = 0
            kinds = torch.zeros(self._plan.tiles, dtype=torch.int32, device=self._device)
            dtypes = self._plan.position_dtype, self._plan.value_dtype
            first, same = (torch.zeros(1, dtype=dtype, device=self._device) for dtype in dtypes)
            kernels.resolve(self._views, kernels.Moves(starts, first, same, kinds), plan=self._plan)
            kernels.compile_classes(self._views, [(piece.region.rows, piece.region.columns) for piece in self._plain])

    # ── beside the model ─────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, piece: int, part: Part = WHOLE) -> Bits:
        """A copy in host memory: for deltas whose tiles are cut by the edges of pieces, and for tests."""
        with self._beside():
            signed = units(self._views[piece]).cpu().numpy()
        return signed.view(f"u{signed.itemsize}").reshape(self._views[piece].shape)[part]

    def prepare(self, changes: Sequence[PieceChange]) -> Patch:
        by_piece: dict[int, list[Change]] = {}
        for item in changes:
            by_piece.setdefault(item.piece, []).append(item.change)
        whole = [_joined(piece, by_piece.get(number, [])) for number, piece in enumerate(self._plain)]
        with self._beside():
            return self._patch((self._plan, kernels.from_changes(self._plan, [c for c in whole if c.region.units])))

    def receive(self, moves: Path, parts: Sequence[tuple[int, int]], ranks: Path | None, sheet: Path | None) -> Patch:
        """What the decoder wrote for this rank: moves of several kinds, and ranks of the tiles that were counted."""
        found = arrays.open_stored(moves)
        with self._beside():
            ready = []
            for kind, count in parts:
                if count:
                    kinds = torch.full((self._plan.tiles,), kind, dtype=torch.int32, device=self._device)
                    starts, positions, values = (
                        self._send(found[f"{name}.{kind}"]) for name in ("starts", "positions", "values")
                    )
                    sent_moves = kernels.Moves(starts, positions, values, kinds)
                    ready.append((self._plan, kernels.resolve(self._views, sent_moves, plan=self._plan)))
            if ranks is not None and sheet is not None:
                plan, rules = kernels.read_sheet(arrays.open_arrays(sheet), self._views, self._tile_plans)
                placed = [self._send(array) for array in arrays.open_stored(ranks).values()]
                ready.append((plan, kernels.place(self._views, plan, rules, *placed)))
        return self._patch(*ready)

    def compare(self, source: Source) -> Patch:
        """What full weights change, found on the device, band by band. TooMany if most of a model is other weights."""
        found: list[kernels.Changed] = []
        room = sum(piece.region.units for piece in self.pieces) // DENSE
        for piece in self._plain:
            for start in range(0, piece.region.units, _BAND):
                end = min(start + _BAND, piece.region.units)
                new = _flat(source, piece.region, start, end)
                with self._beside():
                    old = units(piece.view)[start:end]
                    change = kernels.detect([old], [units(self._send(new))], most=room)
                room -= change.count
                found.append(change)
        with self._beside():
            return self._patch((self._plan, _in_turn(found, self._plan)))

    def count(self, sheet: Path, out: Path) -> None:
        """Count the classes of old weights in the tiles of a sheet."""
        with self._beside():
            plan, rules = kernels.read_sheet(arrays.open_arrays(sheet), self._views, self._tile_plans)
            sizes = self._fetch(kernels.class_counts(self._views, plan, rules))
        arrays.write(out, {"sizes": sizes})

    def moved(self, patch: Patch, groups: Sequence[int]) -> Sums:
        """How the digest of each group moves when a patch is written."""
        numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        with self._beside():
            total = torch.zeros((len(numbers), 2), dtype=torch.int64, device=self._device)
            for plan, changed in patch.parts:
                origins = plan.remember(("origins", tuple(groups)), lambda p=plan: self._origins(p, groups, numbers))  # type: ignore[misc]
                total += kernels.digest_change_by_group(self._names, changed, origins, plan=plan)
            lanes = total.tolist()
        return {group: StateDigest.of_lanes(lanes[number]) for group, number in numbers.items()}

    def _origins(self, plan: kernels.Plan, groups: Sequence[int], numbers: Mapping[int, int]) -> kernels.Origins:
        rows = [
            [p.region.base, max(p.region.columns, 1), p.region.tensor.columns, numbers[group]]
            for p, group in zip(self.pieces, groups, strict=True)
        ]
        table = np.array(rows, np.int64).reshape(-1, 4)[plan.tensor]
        return kernels.Origins(torch.from_numpy(table).to(self._device), len(numbers))

    def _send(self, array: arrays.Array | arrays.Stored) -> Tensor:
        """A copy on the device. Pinned memory is filled while the interpreter is free for others."""
        dtype = {"u2": torch.uint16, "u4": torch.uint32, "u1": torch.uint8, "i8": torch.int64, "i4": torch.int32}
        out = torch.empty(array.shape, dtype=dtype[array.dtype.str[1:]], device=self._device)
        to = out.view(torch.uint8).reshape(-1)

        def read(start: int, part: arrays.Array) -> None:
            if isinstance(array, arrays.Stored):
                array.read(start, part)
            else:
                np.copyto(part, array.reshape(-1).view(np.uint8)[start : start + part.size])

        if not self._slots:
            read(0, to.numpy())
            return out
        for number, start in enumerate(range(0, to.numel(), _SLOT)):
            self._slots[number % 2].send(partial(read, start), to[start : start + _SLOT])
        return out

    def _fetch(self, tensor: Tensor) -> arrays.Array:
        """A copy of 32-bit integers in host memory."""
        if not self._slots:
            return tensor.numpy()
        out = np.empty(tuple(tensor.shape), np.int32)
        flat, to = tensor.reshape(-1).view(torch.uint8), out.reshape(-1).view(np.uint8)
        for start in range(0, to.size, _SLOT):
            self._slots[0].fetch(flat[start : start + _SLOT], to[start : start + _SLOT])
        return out

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Work on a stream of its own, with breaks in which the device is the model's, and wait for that alone."""
        if self._stream is None:
            self._pull()
            yield
            return
        wait = self._stream.synchronize
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), kernels.gently(wait):
            self._pull()
            yield
            wait()

    def _pull(self) -> None:
        for shadow in self._shadows:
            shadow.pull()

    def _push(self) -> None:
        for shadow in self._shadows:
            shadow.push()

    # ── in the swap ──────────────────────────────────────────────────────────────────────────────────────────────────

    def write(self, patch: Patch) -> None:
        with self._on_device():
            self._pull()
            for write in patch.writes:
                write()
            self._push()

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def undo(self, patch: Patch) -> None:
        self._pull()
        for plan, changed in patch.parts:
            kernels.apply(self._views, changed.swapped(), plan=plan)
        self._push()

    def put(self, piece: int, row: int, bits: Bits) -> None:
        view = self._views[piece]
        signed = torch.from_numpy(np.ascontiguousarray(bits).view(f"i{bits.itemsize}" if bits.itemsize > 1 else "u1"))
        self._pull()
        units(view).reshape(view.shape)[row : row + bits.shape[0]].copy_(signed)
        self._push()

    def digests(self, groups: Sequence[int]) -> Sums:
        """On the current stream: after what was launched there."""
        key = tuple(groups)
        if self._proof is None or self._proof[0] != key:
            # made once: in a swap there is no time to look at every piece again
            self._proof = key, _Proof(self._plain, key)
        self._pull()
        return self._proof[1].digests()

    def digests_beside(self, groups: Sequence[int]) -> Sums:
        with self._beside():
            return self.digests(groups)


class _Shadow:
    """A copy, in the checkpoint's order, of weights that a kernel keeps in another one: meant for what is small, like
    the scales of fp8 blocks. It is read again from the live memory before each use, and written there whole."""

    def __init__(self, piece: Piece, places: Places) -> None:
        shape, live = (piece.region.rows, piece.region.columns), piece.view
        self.view = torch.empty(shape, dtype=live.dtype, device=live.device)
        self._copy, self._live = units(self.view), units(live)
        self._at = torch.from_numpy((places.rows[:, None] + places.columns).reshape(-1)).to(live.device)

    def pull(self) -> None:
        torch.index_select(self._live, 0, self._at, out=self._copy)

    def push(self) -> None:
        self._live.index_copy_(0, self._at, self._copy)


class _Slot:
    """Pinned memory on the way to the device, or from it."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(_SLOT, dtype=torch.uint8, pin_memory=True)
        self._bytes = self._memory.numpy()
        self._sent = torch.cuda.Event()

    def send(self, read: Callable[[arrays.Array], None], to: Tensor) -> None:
        """Copy what `read` puts into its argument."""
        self._sent.synchronize()
        read(self._bytes[: to.numel()])
        to.copy_(self._memory[: to.numel()], non_blocking=True)
        self._sent.record()

    def fetch(self, data: Tensor, to: arrays.Array) -> None:
        self._sent.synchronize()
        self._memory[: to.size].copy_(data, non_blocking=True)
        self._sent.record()
        self._sent.synchronize()
        np.copyto(to, self._bytes[: to.size])


class _Proof:
    """The digests of groups of pieces: a launch per group for pieces on the digest's blocks, and one for others."""

    def __init__(self, pieces: Sequence[Piece], groups: Sequence[int]) -> None:
        self._groups = [
            (group, _GroupProof([p for p, g in zip(pieces, groups, strict=True) if g == group]))
            for group in dict.fromkeys(groups)
        ]
        self._device = pieces[0].view.device if pieces else torch.device("cpu")

    def digests(self) -> Sums:
        if not self._groups:
            return {}
        # one answer for all of them: each wait is a trip to the device
        out = torch.zeros((len(self._groups), 2), dtype=torch.int64, device=self._device)
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            for (_, proof), lanes in zip(self._groups, out.unbind(), strict=True):
                proof.add(lanes)
        return {
            group: StateDigest.of_lanes(found) for (group, _), found in zip(self._groups, out.tolist(), strict=True)
        }


class _GroupProof:
    def __init__(self, pieces: Sequence[Piece]) -> None:
        device = pieces[0].view.device
        operations = kernels.operations(device)
        aligned = [piece for piece in pieces if _on_block_lines(piece.region)]
        others = [piece for piece in pieces if not _on_block_lines(piece.region)]
        views = [piece.view for piece in aligned]
        plan = kernels.flat_plan(views, unit=2) if aligned else None
        # whoever moves a tensor makes another shard: where they lie is looked up once
        self._add = operations.prepare_digest(plan, views, _placed_keys(plan, aligned)) if plan is not None else None
        by_kernel = operations is not torch_ops
        wide = [piece for piece in others if by_kernel and piece.view.dtype.itemsize == 2]
        self._bands = _bands_of(wide) if wide else None
        self._slow = [piece for piece in others if piece not in wide]
        self._table = torch.from_numpy(digest.TABLE.view("i8").copy()).to(device)

    def add(self, out: Tensor) -> None:
        """Add both lanes to `out`."""
        if self._add is not None:
            self._add(out)
        if self._bands is not None:
            from ._rows import rows_kernel

            for part in in_turns(self._bands, 4):
                rows_kernel[(part.count,)](part.tiles, self._table, out, PERIOD=digest.BLOCK, BLOCK=512)
        for piece in self._slow:
            out += _rows_digest(piece, self._table)


def _flat(source: Source, piece: Region, start: int, end: int) -> Bits:
    """Units [start:end] of a piece, counted row by row, from full weights."""
    first, last = start // piece.columns, -(-end // piece.columns)
    rows = Region(piece.tensor, piece.row + first, last - first, piece.column, piece.columns)
    return source.region(rows)[start - first * piece.columns : end - first * piece.columns]


def _in_turn(found: Sequence[kernels.Changed], plan: kernels.Plan) -> kernels.Changed:
    """Changes of bands that follow each other, as one of the whole."""
    counts = np.cumsum([0, *(change.count for change in found)]).tolist()
    starts = [change.starts[:-1] + done for change, done in zip(found, counts, strict=False)]
    total = torch.tensor([counts[-1]], dtype=torch.int64, device=plan.device)
    old, new = (
        torch.cat([narrow(widen(getattr(change, name)), plan.value_dtype) for change in found])
        for name in ("old", "new")
    )
    return kernels.Changed(torch.cat([*starts, total]), torch.cat([change.positions for change in found]), old, new)


def _bands_of(pieces: Sequence[Piece], height: int = 16) -> Launch:
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
    table = torch.tensor(bands, dtype=torch.int64, device=pieces[0].view.device)
    return Launch(table, len(table), 2, False, ())


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
