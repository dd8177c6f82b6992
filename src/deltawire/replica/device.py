"""Weights on a GPU: what changes is made ready there, written by a few launches and proven by another.

Moves and ranks come from the decoder (moves.py), go to the device through pinned memory, and become old and new bits
there, portion after portion (portions.py). Beside a model that is served all of that has a stream of its own, and
buffers in pinned memory that are made once, before anything is served.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .. import kernels
from ..core import digest
from ..core.change import NEW_BITS, Region, RegionMoves, pieces
from ..core.codecs import context
from ..core.codecs.context.decoder import Tiles, decode_ranks, join_ranks, make_sheet
from ..core.digest import StateDigest
from ..core.dtypes import Bits, lookup
from ..core.full import Source
from ..core.schema import Schema
from ..core.sparse import BlockRef, DeltaFile
from ..kernels import torch_ops
from ..kernels.host import on, wait
from ..kernels.plan import Launch, Remember, flat, narrow, stretch, unit_bytes, units, widen
from .model import ModelWeights
from .moves import ArrayInFile, CutTiles, DevicePieces, NumberedMoves
from .portions import Patch, Portion, Room
from .shard import DENSE, MOST_UNITS, WHOLE, Part, Piece, PieceChange, Places, Sums, cut_moves

Array = npt.NDArray[Any]


_SLOT = 8 << 20
"""Bytes of one of two pinned buffers that everything passes through."""


SHADOW_UNITS = 1 << 24
"""Units in a kernel's order that may be held a second time, with 8 bytes each for their places."""

_LAUNCH_ROWS = 16
"""Rows of a column shard in one program of the digest kernel."""

_BAND = 1 << 24
"""Units of full weights that are compared at once; a multiple of a tile."""


class DeviceShard:
    """Pieces on one device.

    served   whether a model computes with them beside the staging, which then has a stream and buffers of its own, and
             breaks in which the device is the model's
    room     bytes of the device that a version may take; None: all that it needs
    """

    audited = False

    def __init__(self, pieces: Sequence[Piece], *, served: bool = True, room: int | None = None) -> None:
        self.pieces = pieces
        self.cutter = DevicePieces([piece.region for piece in pieces])
        tiled = [piece for piece in pieces if piece.places is not None]
        if sum(piece.region.units for piece in tiled) > SHADOW_UNITS:
            raise ValueError(f"a kernel keeps {tiled[0].region.tensor.name!r} in tiles: too many to patch on a device")
        self._shadows = [_Shadow(piece, piece.places) for piece in pieces if piece.places is not None]
        shadows = iter(self._shadows)
        self._plain = [piece if piece.places is None else replace(piece, view=next(shadows).view) for piece in pieces]
        """The pieces, with shadows in the place of those that a kernel keeps in another order."""
        self._views = [piece.view for piece in self._plain]
        self._widths = np.array([unit_bytes(view) for view in self._views], np.int64)
        for piece in self._plain:
            if not piece.view.is_contiguous():
                raise ValueError(f"{piece.region.tensor.name!r} is not in one piece on its device")
            if piece.region.units > MOST_UNITS:
                raise ValueError(f"{piece.region.tensor.name!r} has more units than positions can count")
        self._names = [piece.region.tensor.name for piece in pieces]
        self._device = self._views[0].device if pieces else torch.device("cpu")
        self._plan = kernels.flat_plan(self._views)
        self._room = Room(room, self._plan.value_dtype.itemsize)
        # at the usual densities a version has fewer portions
        self._stretches, self._sheets = Remember(256), Remember(64)
        self._proof: tuple[tuple[int, ...], _Proof] | None = None
        beside = served and self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if beside else None
        self._slots = [_Slot() for _ in range(2)] if beside else []

    # ── beside the model ─────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, piece: int, part: Part = WHOLE) -> Bits:
        """A copy in host memory: for deltas whose tiles are cut by the edges of pieces, and for tests."""
        view = self._views[piece]
        with self._on_own_stream():
            signed = units(view).reshape(view.shape)[part].contiguous().cpu().numpy()
        return signed.view(f"u{signed.itemsize}")

    def prepare(self, changes: Sequence[PieceChange]) -> Patch:
        moves = []
        for number, change in ((item.piece, item.change) for item in changes):
            given = RegionMoves(change.region, change.positions, change.new, NEW_BITS)
            moves.append((number, cut_moves(given, self.pieces[number].region)))
        return self.receive_here(moves, {}, {})

    def receive_here(
        self, cut: Sequence[NumberedMoves], sheet: Mapping[str, Array], ranks: Mapping[str, Array]
    ) -> Patch:
        """Take moves that this process has cut."""
        parts, moves = self.cutter.join(
            [item for item in cut if item[1].positions.size],
            lambda shapes: {name: np.empty(shape, dtype) for name, (dtype, shape) in shapes.items()},
        )
        return self.receive(moves, parts, sheet, ranks)

    def receive(
        self,
        moves: Mapping[str, Array | ArrayInFile],
        parts: Sequence[tuple[int, int]],
        sheet: Mapping[str, Array],
        ranks: Mapping[str, Array | ArrayInFile],
    ) -> Patch:
        """Take what was decoded for these pieces (moves.py).

        `parts` has the kinds and counts of `moves`; `ranks` are of the tiles that were counted by a sheet, if any were.
        """
        with self._on_own_stream():
            patch = self._patch()
            for kind, count in parts:
                if count:
                    self._resolve(patch, kind, *(moves[f"{name}.{kind}"] for name in ("starts", "positions", "values")))
            if sheet:
                self._place(patch, sheet, *(ranks[name] for name in ("counts", "ranks", "steps")))
            patch.ready()
        return patch

    def _patch(self) -> Patch:
        return Patch(self._views, self._room, self._stream)

    def _resolve(self, patch: Patch, kind: int, *sent: Array | ArrayInFile) -> None:
        """Make moves of one kind ready, stretch by stretch."""
        starts, positions, values = _here(sent[0]), *sent[1:]
        for first, last in self._room.cut(starts):
            here = slice(int(starts[first]), int(starts[last]))
            plan, pieces = self._stretch(first, last)
            kinds = torch.full((plan.tiles,), kind, dtype=torch.int32, device=self._device)
            edges = self._send(starts[first : last + 1] - starts[first])
            moves = kernels.Moves(edges, self._send(positions[here]), self._send(values[here]), kinds)
            patch.add(Portion(plan, pieces, kernels.resolve(self._views[pieces], moves, plan=plan)))

    def _place(
        self, patch: Patch, sheet: Mapping[str, Array], counts: Array | ArrayInFile, *sent: Array | ArrayInFile
    ) -> None:
        """Make tiles that were counted ready, some segments of their sheet at a time."""
        of_tiles = _here(counts).sum(1, dtype=np.int64)
        tiles = np.append(0, np.cumsum(kernels.tiles_of(sheet)))
        ends = np.append(0, np.cumsum(of_tiles))[tiles]
        for first, last in self._of_one_width(sheet, ends):
            plan, rules = kernels.read_sheet(kernels.part_of_sheet(sheet, first, last), self._views, self._sheets)
            here, changes = slice(int(tiles[first]), int(tiles[last])), slice(int(ends[first]), int(ends[last]))
            # they were sent as wide as all tiles need
            dtypes = plan.position_dtype, plan.value_dtype
            ranks, steps = (_as(self._send(array[changes]), dtype) for array, dtype in zip(sent, dtypes, strict=True))
            changed = kernels.place(self._views, plan, rules, self._send(counts[here]), ranks, steps)
            patch.add(Portion(plan, slice(None), changed))

    def _of_one_width(self, sheet: Mapping[str, Array], ends: Array) -> Iterator[tuple[int, int]]:
        """Stretches of the segments of a sheet with units of one width, as files have them: sorted by their dtype."""
        widths = self._widths[sheet["segments"][:, 0]]
        edges = [0, *(np.flatnonzero(np.diff(widths)) + 1).tolist(), widths.size]
        for begin, end in pairwise(edges):
            for first, last in self._room.cut(ends[begin : end + 1] - ends[begin]):
                yield begin + first, begin + last

    def _stretch(self, first: int, last: int) -> tuple[kernels.Plan, slice]:
        """The plan of some tiles of all, and the pieces that it is of."""
        if (first, last) == (0, self._plan.tiles):
            return self._plan, slice(None)
        tiles = self.cutter.first_tile
        pieces = slice(bisect_right(tiles, first) - 1, bisect_left(tiles, last))
        views, begin = self._views[pieces], tiles[pieces.start]

        def make() -> kernels.Plan:
            return kernels.Plan(views, stretch(flat(views), first - begin, last - begin))

        return self._stretches.get((first, last), make), pieces

    def compare(self, source: Source) -> Patch:
        """Find what full weights change, on the device, band by band. TooMany if most of a model differs."""
        patch, found = self._patch(), list[kernels.Changed]()
        room, first, last = sum(piece.region.units for piece in self.pieces) // DENSE, 0, 0

        def gather() -> None:
            plan, pieces = self._stretch(first, last)
            patch.add(Portion(plan, pieces, _in_turn(found, plan, self._plan.value_dtype)))
            found.clear()

        for piece in self._plain:
            for start in range(0, piece.region.units, _BAND):
                end = min(start + _BAND, piece.region.units)
                new = _flat(source, piece.region, start, end)
                with self._on_own_stream():
                    old = units(piece.view)[start:end]
                    change = kernels.detect([old], [units(self._send(new))], most=room)
                    room -= change.count
                    if found and sum(each.count for each in found) + change.count > self._room.at_once:
                        gather()
                        first = last
                    found.append(change)
                    last += change.starts.numel() - 1
        with self._on_own_stream():
            if found:
                gather()
            patch.ready()
        return patch

    def count(self, sheet: Mapping[str, Array]) -> Array:
        """Count the classes of old weights in the tiles of a sheet."""
        with self._on_own_stream():
            plan, rules = kernels.read_sheet(sheet, self._views, self._sheets)
            return self._fetch(kernels.class_counts(self._views, plan, rules))

    def shifts(self, patch: Patch, groups: Sequence[int]) -> Sums:
        """How the digest of each group moves when a patch is written."""
        numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        with self._on_own_stream():
            total = torch.zeros((len(numbers), 2), dtype=torch.int64, device=self._device)
            for plan, pieces, changed in patch.portions():
                origins = plan.remember(
                    ("origins", tuple(groups)), partial(self._origins, plan, pieces, groups, numbers)
                )
                total += kernels.digest_change_by_group(self._names[pieces], changed, origins, plan=plan)
            lanes = total.tolist()
        return {group: StateDigest.of_lanes(lanes[number]) for group, number in numbers.items()}

    def _origins(
        self, plan: kernels.Plan, pieces: slice, groups: Sequence[int], numbers: Mapping[int, int]
    ) -> kernels.Origins:
        rows = [
            [p.region.start, max(p.region.columns, 1), p.region.tensor.columns, numbers[group]]
            for p, group in zip(self.pieces[pieces], groups[pieces], strict=True)
        ]
        table = np.array(rows, np.int64).reshape(-1, 4)[plan.tensor]
        return kernels.Origins(torch.from_numpy(table).to(self._device), len(numbers))

    def _send(self, array: Array | ArrayInFile) -> Tensor:
        """A copy on the device. Pinned memory is filled while the interpreter is free for others."""
        if isinstance(array, np.ndarray) and not self._slots and self._device.type == "cuda":
            return torch.from_numpy(array).pin_memory().to(self._device, non_blocking=True)
        dtype = {"u2": torch.uint16, "u4": torch.uint32, "u1": torch.uint8, "i8": torch.int64, "i4": torch.int32}
        out = torch.empty(array.shape, dtype=dtype[array.dtype.str[1:]], device=self._device)
        to = out.view(torch.uint8).reshape(-1)

        def read(start: int, part: Array) -> None:
            if isinstance(array, np.ndarray):
                np.copyto(part, array.reshape(-1).view(np.uint8)[start : start + part.size])
            else:
                array.read(start, part)

        if not self._slots:
            read(0, to.numpy())
            return out
        for number, start in enumerate(range(0, to.numel(), _SLOT)):
            self._slots[number % 2].send(partial(read, start), to[start : start + _SLOT])
        return out

    def _fetch(self, tensor: Tensor) -> Array:
        """A copy of 32-bit integers in host memory."""
        if not self._slots:
            return tensor.cpu().numpy()
        out = np.empty(tuple(tensor.shape), np.int32)
        flat, to = tensor.reshape(-1).view(torch.uint8), out.reshape(-1).view(np.uint8)
        for start in range(0, to.size, _SLOT):
            self._slots[0].fetch(flat[start : start + _SLOT], to[start : start + _SLOT])
        return out

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:
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
        with on(self._device):
            self._pull()
            patch.write()
            self._push()
        self._finish()

    def _finish(self) -> None:
        """Wait for what was written, where no digest is read after it."""
        if self._stream is None:
            wait(self._device)

    def undo(self, patch: Patch) -> None:
        with on(self._device):
            self._pull()
            patch.undo()
            self._push()
        self._finish()

    def load(self, source: Source) -> None:
        views: dict[Region, list[Tensor]] = {}
        for piece, view in zip(self.pieces, self._views, strict=True):
            views.setdefault(piece.region, []).append(units(view).reshape(view.shape))
        for region, (view, *copies) in views.items():
            for part in pieces(region):
                bits = source.region(part).reshape(part.rows, part.columns)
                if self._stream is None and not bits.flags.writeable:
                    # torch warns of memory that it could write to and must not
                    bits = bits.copy()
                signed = torch.from_numpy(bits.view(f"i{bits.itemsize}" if bits.itemsize > 1 else "u1"))
                view[part.within(region)].copy_(signed)
            for copy in copies:
                # read and sent once
                copy.copy_(view)
        self._push()

    def digests(self, groups: Sequence[int]) -> Sums:
        """Compute on the current stream, after what was launched there."""
        key = tuple(groups)
        if self._proof is None or self._proof[0] != key:
            # made once: in a swap there is no time to look at every piece again
            self._proof = key, _Proof(self._plain, key)
        self._pull()
        return self._proof[1].digests()

    def digests_beside(self, groups: Sequence[int]) -> Sums:
        with self._on_own_stream():
            return self.digests(groups)


class _Decoded(NamedTuple):
    """A delta without weights, cut for pieces on a device."""

    moves: list[NumberedMoves]
    sheet: Mapping[str, Array]
    """What the ranks were counted by; empty if there are none."""
    ranks: Mapping[str, Array]


class DeviceWeights(ModelWeights):
    """The weights of a model of this process, on its device.

    While they are written nothing crosses the bus but two words of digest.
    """

    def __init__(self, schema: Schema, found: Sequence[Piece]) -> None:
        pieces = [
            Piece(band, units(piece.view).reshape(piece.region.rows, piece.region.columns)[band.within(piece.region)])
            for piece in found
            for band in _countable(piece.region)
        ]
        self._shard = DeviceShard(pieces, served=False)
        super().__init__(schema, pieces, self._shard)

    def decode(self, files: Sequence[DeltaFile]) -> _Decoded:
        moves: list[NumberedMoves] = []
        tiles: list[Tiles] = []
        for file in files:
            for some_moves, some_tiles in file.each(partial(self._block, file)):
                moves += some_moves
                tiles += some_tiles
        if not tiles:
            return _Decoded(moves, {}, {})
        sheet = make_sheet(tiles)
        return _Decoded(moves, sheet, join_ranks(tiles, decode_ranks(tiles, self._shard.count(sheet))))

    def _block(self, file: DeltaFile, block: BlockRef) -> tuple[list[NumberedMoves], list[Tiles]]:
        found = file.read(block)
        try:
            return self._shard.cutter.cut(found)
        except CutTiles:
            assert isinstance(found, context.TiledBlock)
        moves = []
        for number, (region, _) in enumerate(found.regions):
            # only what the block needs leaves the device
            old = np.empty((region.rows, region.columns), lookup(region.tensor.dtype).unit)
            held = {self._shard.pieces[n].region: n for n in self._pieces[region.tensor.name]}
            for piece, n in held.items():
                if (part := region.meet(piece)) is not None:
                    old[part.within(region)] = self._shard.read(n, part.within(piece))
            positions, _, new = found.shard(number, slice(0, region.rows), slice(0, region.columns), old)
            moves.append(RegionMoves(region, positions, new, NEW_BITS))
        return self._shard.cutter.cut(moves)

    def prepare(self, decoded: _Decoded) -> Patch:
        return self._shard.receive_here(decoded.moves, decoded.sheet, decoded.ranks)


class _Shadow:
    """A copy, in the checkpoint's order, of weights that a kernel keeps in another order.

    Meant for what is small, like the scales of fp8 blocks. It is read again from the live memory before each use, and
    written there whole.
    """

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

    def __init__(self) -> None:
        self._memory = torch.empty(_SLOT, dtype=torch.uint8, pin_memory=True)
        self._bytes = self._memory.numpy()
        self._sent = torch.cuda.Event()

    def send(self, read: Callable[[Array], None], to: Tensor) -> None:
        """Copy what `read` puts into its argument."""
        self._sent.synchronize()
        read(self._bytes[: to.numel()])
        to.copy_(self._memory[: to.numel()], non_blocking=True)
        self._sent.record()

    def fetch(self, data: Tensor, to: Array) -> None:
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
        with on(self._device):
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
        # a tensor that moves gets another shard: where they lie is looked up once
        self._add = operations.prepare_digest(plan, views, _placed_keys(plan, aligned)) if plan is not None else None
        self._operations = operations
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
            self._operations.digest_rows(self._bands, self._table, out)
        for piece in self._slow:
            out += _rows_digest(piece, self._table)


def _flat(source: Source, piece: Region, start: int, end: int) -> Bits:
    """Units [start:end] of a piece, counted row by row, from full weights."""
    first, last = start // piece.columns, -(-end // piece.columns)
    rows = Region(piece.tensor, piece.row + first, last - first, piece.column, piece.columns)
    return source.region(rows)[start - first * piece.columns : end - first * piece.columns]


def _here(array: Array | ArrayInFile) -> Array:
    return array if isinstance(array, np.ndarray) else array.whole()


def _as(values: Tensor, dtype: torch.dtype) -> Tensor:
    if values.dtype.itemsize < dtype.itemsize:
        return narrow(widen(values), dtype)
    # their low bytes, which come first
    return units(values, dtype.itemsize)[:: values.dtype.itemsize // dtype.itemsize].contiguous().view(dtype)


def _in_turn(found: Sequence[kernels.Changed], plan: kernels.Plan, dtype: torch.dtype) -> kernels.Changed:
    """Changes of bands that follow each other, as one of all their tiles; bits of this dtype."""
    counts = np.cumsum([0, *(change.count for change in found)]).tolist()
    starts = [change.starts[:-1] + done for change, done in zip(found, counts, strict=False)]
    total = torch.tensor([counts[-1]], dtype=torch.int64, device=plan.device)
    old, new = (torch.cat([_as(getattr(change, name), dtype) for change in found]) for name in ("old", "new"))
    return kernels.Changed(torch.cat([*starts, total]), torch.cat([change.positions for change in found]), old, new)


def _bands_of(pieces: Sequence[Piece]) -> Launch:
    """The work of each of the kernel's programs: some rows of a piece."""
    bands = []
    for piece in pieces:
        region = piece.region
        keys = digest.tensor_keys(region.tensor.name).view(np.int64).tolist()
        for row in range(0, region.rows, _LAUNCH_ROWS):
            address = piece.view.data_ptr() + row * region.columns * 2
            rows = min(_LAUNCH_ROWS, region.rows - row)
            first = region.start + row * region.tensor.columns
            bands.append([address, rows, region.columns, first, region.tensor.columns, *keys])
    table = torch.tensor(bands, dtype=torch.int64, device=pieces[0].view.device)
    return Launch(table, len(table), 2, False, ())


def _halves(region: Region) -> int:
    """Digest units (of 16 bits at the most) per unit of a tensor."""
    return 2 if region.tensor.unit_size == 4 else 1


def _countable(region: Region) -> Iterator[Region]:
    """A tensor in bands of rows whose units positions can count, cut where blocks of the digest begin if some do."""
    if not region.units:
        return
    rows = MOST_UNITS // region.columns
    # from one row that a block begins with to the next
    apart = digest.BLOCK // gcd(region.columns * _halves(region), digest.BLOCK)
    height = rows // apart * apart or rows
    for row in range(0, region.rows, height):
        yield Region(region.tensor, row, min(height, region.rows - row), 0, region.columns)


def _on_block_lines(region: Region) -> bool:
    """Whether the digest's blocks begin where the piece does, so that it counts like a tensor of its own."""
    return region.contiguous and region.start * _halves(region) % digest.BLOCK == 0


def _placed_keys(plan: kernels.Plan, pieces: Sequence[Piece]) -> Tensor:
    """Block b of a piece is block first + b of its tensor, and the digest's keys count by blocks."""
    each = np.array([digest.tensor_keys(p.region.tensor.name) for p in pieces], np.uint64).reshape(-1, 2)
    first = [p.region.start * _halves(p.region) // digest.BLOCK for p in pieces]
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
        starts = (region.start + lines * region.tensor.columns)[:, None] * halves
        at = starts + torch.arange(columns, device=bits.device)
        for lane in range(2):
            weight = torch_ops._mix(key[lane] + at // digest.BLOCK) * table[lane][at % digest.BLOCK]
            out[lane] += (weight * part).sum()
    return out
