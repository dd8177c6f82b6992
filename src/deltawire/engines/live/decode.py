"""Decode on a CPU what a delta changes in the pieces of one rank, from the weights that this rank holds.

`context` codes a tile from the tile's own old weights, so a rank decodes the tiles it holds and never sees the others.
A tile that is cut by the edge of a piece needs the rest of its old weights: those are *borrowed* from the ranks that
hold them, through files (`Wanted` says which). All other encodings need old weights at the changed positions alone;
what a rank decodes at positions that it does not hold is left out again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from ... import kernels
from ...api import encode
from ...core.change import Change, Region, compare, pieces, whole
from ...core.codecs import ENCODINGS, context
from ...core.dtypes import Bits, lookup
from ...core.errors import CountMismatch
from ...core.full import Source
from ...core.parallel import ordered_map
from ...core.schema import Schema, TensorSpec
from ...core.sparse import BlockRef, DeltaFile
from ...replica.shard import DENSE, Piece, PieceChange, Shard, Sums, cut, digests_of
from .placement import open_shard

Lent = Mapping[Region, Bits]
"""Old weights of other ranks, by where they belong."""


class Wanted(Exception):
    """Tiles are cut by the edges of this rank's pieces: it takes the old weights of these regions to decode them."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self.regions = list(dict.fromkeys(regions))
        super().__init__(f"{len(self.regions)} regions of old weights are held by other ranks")


class Decoder:
    """Compares deltas and full weights with a shard's present bits. Writes nothing."""

    def __init__(self, shard: Shard, threads: int | None = 1) -> None:
        self._shard = shard
        self._threads = threads
        self._by_tensor: dict[str, list[int]] = {}
        for number, piece in enumerate(shard.pieces):
            self._by_tensor.setdefault(piece.region.tensor.name, []).append(number)

    def delta(self, file: DeltaFile, lent: Lent | None = None) -> list[PieceChange]:
        """Decode the changes of a delta in this shard. Raises `Wanted` if that needs weights of other ranks."""
        lent = lent or {}
        wanted: list[Region] = []
        found: list[PieceChange] = []

        def one(block: BlockRef) -> tuple[list[PieceChange], list[Region]]:
            if block.record is not None and block.record.encoding == context.name:
                return self._tiles(file, block, lent)
            return self._anywhere(file, block), []

        for changes, missing in ordered_map(one, file.blocks, self._threads):
            found += changes
            wanted += missing
        if wanted:
            raise Wanted(wanted)
        return found

    def full(self, source: Source) -> list[PieceChange]:
        """Return the changes from this shard to full weights. Raises TooMany if too many weights differ."""
        room = sum(piece.region.units for piece in self._shard.pieces) // DENSE

        def one(number: int) -> list[PieceChange]:
            whole, result = self._shard.pieces[number].region, []
            for part in pieces(whole):
                old = np.ascontiguousarray(self._shard.read(number, part.within(whole))).reshape(-1)
                result.append(PieceChange(number, compare(part, old, source.region(part))))
            return [item for item in result if item.change.count]

        found: list[PieceChange] = []
        for changes in ordered_map(one, range(len(self._shard.pieces)), self._threads):
            found += changes
            room -= sum(item.change.count for item in changes)
            if room < 0:
                raise kernels.TooMany(sum(item.change.count for item in found))
        return found

    def digests(self, source: Source, groups: Sequence[int]) -> Sums:
        """The digest of each group of pieces, if they held full weights."""
        regions = [piece.region for piece in self._shard.pieces]
        return digests_of(lambda _, part: source.region(part), regions, groups, self._threads)

    def lend(self, regions: Sequence[Region]) -> Iterator[tuple[Region, Bits]]:
        """Yield the parts of regions that this rank holds."""
        for wanted in regions:
            for number in self._by_tensor.get(wanted.tensor.name, ()):
                piece = self._shard.pieces[number].region
                part = wanted.meet(piece)
                if part is not None:
                    yield part, np.ascontiguousarray(self._shard.read(number, part.within(piece)))

    # ── encodings that need old weights at the changed positions alone ────────────────────────────────────────────────

    def _anywhere(self, file: DeltaFile, block: BlockRef) -> list[PieceChange]:
        if not any(region.tensor.name in self._by_tensor for region, _ in block.regions):
            return []
        known: dict[str, Bits] = {}

        def base(name: str) -> Bits:
            if name not in known:
                known[name] = self._whole(name, block)
            return known[name]

        result = []
        for change in file.decode(block, base):
            for number in self._by_tensor.get(change.region.tensor.name, ()):
                here = _cut(change, self._shard.pieces[number].region)
                if here is not None:
                    result.append(PieceChange(number, here))
        return result

    def _whole(self, name: str, block: BlockRef) -> Bits:
        """A tensor's flat bits as far as this rank holds them, zero elsewhere."""
        numbers = self._by_tensor.get(name, [])
        spec = next(region.tensor for region, _ in block.regions if region.tensor.name == name)
        if len(numbers) == 1:
            piece, bits = self._shard.pieces[numbers[0]], self._shard.read(numbers[0])
            if piece.region.units == spec.units and bits.flags.c_contiguous:
                return bits.reshape(-1)
        whole = np.zeros((spec.rows, spec.columns), lookup(spec.dtype).unit)
        for number in numbers:
            region = self._shard.pieces[number].region
            region.matrix(whole.reshape(-1))[:] = self._shard.read(number)
        return whole.reshape(-1)

    # ── tiles ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tiles(self, file: DeltaFile, block: BlockRef, lent: Lent) -> tuple[list[PieceChange], list[Region]]:
        held = [
            (number, piece, part)
            for number, (region, _) in enumerate(block.regions)
            for piece in self._by_tensor.get(region.tensor.name, ())
            if (part := region.meet(self._shard.pieces[piece].region)) is not None
        ]
        if not held:
            return [], []
        coded = file.read(block)
        assert isinstance(coded, context.TiledBlock)
        result: list[PieceChange] = []
        wanted: list[Region] = []
        for number, piece, part in held:
            region, count = block.regions[number]
            spans = coded.around(number, *part.within(region))
            around = _of_spans(region, spans)
            old, missing = self._old(around, lent)
            if old is None:
                wanted += missing
                continue
            positions, was, now = coded.shard(number, *spans, old)
            if around == region and positions.size != count:
                raise CountMismatch(
                    f"a region of {region.tensor.name!r} has {positions.size} changes, its count is {count}"
                )
            here = _cut(Change(around, positions, was, now), self._shard.pieces[piece].region)
            if here is not None:
                result.append(PieceChange(piece, here))
        return result, wanted

    def _old(self, around: Region, lent: Lent) -> tuple[Bits | None, list[Region]]:
        """The old weights of a region: a view where one piece holds it, else put together, or what is missing."""
        known: list[tuple[Region, Callable[[], Bits]]] = []
        for number in self._by_tensor[around.tensor.name]:
            whole = self._shard.pieces[number].region
            part = around.meet(whole)
            if part == around:
                return self._shard.read(number, around.within(whole)), []
            if part is not None:
                known.append((part, lambda n=number, p=part, w=whole: self._shard.read(n, p.within(w))))  # type: ignore[misc]
        for whole, bits in lent.items():
            part = around.meet(whole)
            if part is not None:
                known.append((part, lambda b=bits, p=part, w=whole: b[p.within(w)]))  # type: ignore[misc]
        covered = np.zeros((around.rows, around.columns), bool)
        for part, _ in known:
            covered[part.within(around)] = True
        if not covered.all():
            return None, [around]
        old = np.empty((around.rows, around.columns), lookup(around.tensor.dtype).unit)
        for part, bits_of in known:
            old[part.within(around)] = bits_of()
        return old, []


def compile_decoders() -> None:
    """Decode a delta of each encoding, for a piece that lies in one stretch of memory and for one that does not."""
    spec = TensorSpec("w", "BF16", (128, 256))
    values = np.random.default_rng(0).normal(0, 0.05, spec.shape).astype(np.float32)
    old = (values.view(np.uint32) >> 16).astype(np.uint16)
    new = old + (np.arange(old.size) % 50 == 0).astype(np.uint16).reshape(old.shape)
    for encoding in ENCODINGS:
        blob = encode({"w": old}, {"w": new}, encoding, threads=1)
        file = DeltaFile(lambda start, length, b=blob: b[start : start + length], len(blob), Schema.build([spec]))  # type: ignore[misc]
        for width in (spec.columns, 2 * spec.columns):
            view = torch.zeros((spec.rows, width), dtype=torch.bfloat16)[:, : spec.columns]
            view.view(torch.int16).copy_(torch.from_numpy(old.view(np.int16)))
            Decoder(open_shard([Piece(whole(spec), view)])).delta(file)


def _of_spans(region: Region, spans: tuple[slice, slice]) -> Region:
    rows, columns = spans
    return Region(
        region.tensor,
        region.row + rows.start,
        rows.stop - rows.start,
        region.column + columns.start,
        columns.stop - columns.start,
    )


def _cut(change: Change, to: Region) -> Change | None:
    """The part of a change that lies in a piece; None if there is none."""
    if (common := change.region.meet(to)) is None:
        return None
    if common != change.region:
        change = Change(common, *cut(change.region, common, change.positions, change.old, change.new))
    return change if change.count else None
