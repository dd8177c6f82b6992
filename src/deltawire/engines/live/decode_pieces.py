"""Decode on a CPU what a delta changes in the pieces of one rank, from the weights that this rank holds.

`context` codes a tile from the tile's own old weights, so a rank decodes the tiles it holds and never sees the others.
A tile that is cut by the edge of a piece needs the rest of its old weights: those are *borrowed* from the ranks that
hold them, through files (`Wanted` says which). All other encodings need old weights at the changed positions alone;
what a rank decodes at positions that it does not hold is left out again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from ... import kernels
from ...core.change import Change, Region, RegionMoves, compare, pieces, whole
from ...core.codecs import context
from ...core.dtypes import Bits, lookup
from ...core.full import Source, digests_of
from ...core.parallel import ordered_map
from ...core.scatter import gather
from ...core.sparse import BlockRef, DeltaFile
from ...replica.shard import DENSE, LiveShard, Piece, PieceChange, Sums, cut, cut_moves
from . import small_deltas
from .placement import open_shard

Lent = Mapping[Region, Bits]
"""Old weights of other ranks, by where they belong."""


class Wanted(Exception):
    """Tiles are cut by the edges of this rank's pieces: it takes the old weights of these regions to decode them."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self.regions = list(dict.fromkeys(regions))
        super().__init__(f"{len(self.regions)} regions of old weights are held by other ranks")


class ShardDecoder:
    """Compares deltas and full weights with a shard's present bits. Writes nothing."""

    def __init__(self, shard: LiveShard, threads: int | None = 1) -> None:
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
            if not any(self._held(region) for region, _ in block.regions):
                return [], []
            found = file.read(block)
            return self._tiles(found, lent) if isinstance(found, context.TiledBlock) else (self._moves(found), [])

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
            for number, part in self._held(wanted):
                yield part, np.ascontiguousarray(self._read(number, part))

    def _held(self, region: Region) -> list[tuple[int, Region]]:
        """What this rank holds of a region: numbers of pieces, and the parts in them."""
        numbers = self._by_tensor.get(region.tensor.name, ())
        found = ((number, region.meet(self._shard.pieces[number].region)) for number in numbers)
        return [(number, part) for number, part in found if part is not None]

    def _read(self, number: int, part: Region) -> Bits:
        return self._shard.read(number, part.within(self._shard.pieces[number].region))

    def _moves(self, block: Sequence[RegionMoves]) -> list[PieceChange]:
        """Decode encodings that need old weights only at the changed positions."""
        result = []
        for moves in block:
            for number, part in self._held(moves.region):
                own = cut_moves(moves, part)
                if own.positions.size:
                    bits = np.ascontiguousarray(self._read(number, part)).reshape(-1)
                    old = np.empty(own.positions.size, bits.dtype)
                    gather(bits, own.positions, old, 0, 1, 1)
                    result.append(PieceChange(number, own.from_old(old)))
        return result

    def _tiles(self, block: context.TiledBlock, lent: Lent) -> tuple[list[PieceChange], list[Region]]:
        """What tiles change, and the regions that it takes the old weights of, where others hold some of these."""
        result: list[PieceChange] = []
        wanted: list[Region] = []
        for number, (region, _) in enumerate(block.regions):
            for piece, part in self._held(region):
                spans = block.around(number, *part.within(region))
                around = region.part(*spans)
                old = self._old(around, lent)
                if old is None:
                    wanted.append(around)
                    continue
                change = Change(around, *block.shard(number, *spans, old))
                if around != part:
                    change = Change(part, *cut(around, part, change.positions, change.old, change.new))
                if change.count:
                    result.append(PieceChange(piece, change))
        return result, wanted

    def _old(self, around: Region, lent: Lent) -> Bits | None:
        """The old weights of a region: a view where one piece holds it, else put together; None if some are missing."""
        mine = [(part, partial(self._read, number, part)) for number, part in self._held(around)]
        others = [(p, partial(bits.__getitem__, p.within(w))) for w, bits in lent.items() if (p := around.meet(w))]
        known = [*mine, *others]
        if (read := next((read for part, read in known if part == around), None)) is not None:
            return read()
        missing = np.ones((around.rows, around.columns), bool)
        for part, _ in known:
            missing[part.within(around)] = False
        if missing.any():
            return None
        old = np.empty(missing.shape, lookup(around.tensor.dtype).unit)
        for part, read in known:
            old[part.within(around)] = read()
        return old


def warm_up(weights: LiveShard, groups: Sequence[int]) -> None:
    """Compile all that is left before anything is served, which takes seconds in which a model beside it stands still:
    write a weight of each width and layout over itself, prove, and decode something."""
    kinds: dict[tuple[int, bool], PieceChange] = {}
    for number, piece in enumerate(weights.pieces):
        kind = piece.view.dtype.itemsize, piece.places is None
        if kind not in kinds and piece.region.units:
            bit = weights.read(number)[0, :1].copy()
            change = Change(piece.region, np.zeros(1, np.uint32), bit, bit)
            change.digest()
            kinds[kind] = PieceChange(number, change)
    patch = weights.prepare([*kinds.values()])
    weights.shifts(patch, groups)
    weights.write(patch)
    weights.digests(groups)
    compile_decoders()


def compile_decoders() -> None:
    """Decode a delta of each encoding, for a piece that lies in one stretch of memory, for one that does not, and for
    one that is cut from the tensor, also through a tile."""
    spec, old = small_deltas.SPEC, small_deltas.weights()
    for file in small_deltas.open_all():
        for columns, width in ((256, 256), (256, 512), (100, 100)):
            view = torch.zeros((spec.rows, width), dtype=torch.bfloat16)[:, :columns]
            view.view(torch.int16).copy_(torch.from_numpy(old.view(np.int16)[:, :columns]))
            piece = Piece(Region(spec, 0, spec.rows, 0, columns), view)
            ShardDecoder(open_shard([piece])).delta(file, {whole(spec): old})
