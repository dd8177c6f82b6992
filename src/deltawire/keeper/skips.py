"""Make skip deltas from the present weights and the changes that led to them.

An earlier version is the present one with the changes since then undone, a region at a time. The changes are kept as
pieces over 1, 4, 16 … versions, at most four of each (`spans` in core/added.py needs no more): four become one of the
next length. So one copy of the weights is in memory; pieces that are not small are on disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..bucket.replay import State
from ..core.added import LEVELS, spans
from ..core.change import Block, Change, Region, blocks, compare, moved
from ..core.digest import StateDigest
from ..core.dtypes import Bits
from ..core.parallel import ordered_map, threads_for
from ..core.sparse import EncodedBlock, encode_block

IN_MEMORY = 1 << 20
"""Bytes of an array that stays in memory."""


@dataclass(frozen=True, slots=True)
class Undo:
    """The bits that a region had before."""

    region: Region
    positions: npt.NDArray[np.uint32] | None
    """Of the weights that changed; None where `old` has all of them."""
    old: Bits

    @classmethod
    def of(cls, change: Change, old: Bits | None = None) -> Undo:
        """`old` are the bits of the whole region before: kept instead where most of it changed."""
        if old is not None and change.positions.nbytes + change.old.nbytes > old.nbytes:
            return cls(change.region, None, _kept(old))
        return cls(change.region, _kept(change.positions), _kept(change.old))

    def restore(self, bits: Bits, region: Region) -> None:
        """Put the old bits into a copy of a region, as far as the two overlap."""
        if self.region == region:
            if self.positions is None:
                bits[:] = self.old
            else:
                bits[self.positions] = self.old
            return
        common = self.region.meet(region)
        if common is None:
            return
        if self.positions is None:
            own = self.old.reshape(self.region.rows, self.region.columns)
            bits.reshape(region.rows, region.columns)[common.within(region)] = own[common.within(self.region)]
            return
        # positions count within another rectangle of the tensor: a sharded trainer's
        rows, columns = np.divmod(self.positions.astype(np.int64), self.region.columns)
        rows, columns = rows + (self.region.row - region.row), columns + (self.region.column - region.column)
        inside = (rows >= 0) & (rows < region.rows) & (columns >= 0) & (columns < region.columns)
        bits[rows[inside] * region.columns + columns[inside]] = self.old[inside]


def _kept(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same array, on disk if it is not small. The file has no name: nothing is left of it, whatever happens."""
    kept: npt.NDArray[Any]
    if array.nbytes <= IN_MEMORY:
        kept = array.copy()
        return kept
    with tempfile.TemporaryFile(prefix="deltawire-") as file:
        array.tofile(file)
        file.flush()
        kept = np.memmap(file, array.dtype, "r", shape=array.shape)
        return kept


Piece = dict[str, list[Undo]]
"""By tensor, how to undo what some versions changed, the oldest change first."""


@dataclass(frozen=True, slots=True)
class SkipDelta:
    """A delta from an earlier version to the present one."""

    base: int
    encode: Callable[[str], Iterator[tuple[EncodedBlock, StateDigest]]]
    """Given an encoding, the coded blocks, and how each moves the state digest."""


class Skips:
    """Follows a copy of the weights and says which skip deltas are due."""

    def __init__(self, state: State, levels: int = LEVELS) -> None:
        self._state, self.levels = state, levels
        self._plan = blocks(state.schema)
        self._threads = threads_for(state.schema.elements)
        self.version: int | None = None
        self._pieces: list[list[Piece]] = []
        self.start(None)

    def start(self, version: int | None) -> None:
        """Forget all changes: what is made from here on starts from this version."""
        self.version, self._pieces = version, [[] for _ in range(self.levels)]

    def next(self, goal: int) -> int:
        """The farthest version up to `goal` to go to in one piece."""
        at, unit = self.version or 0, 1
        while at % (4 * unit) == 0 and at + 4 * unit <= goal and 4 * unit < 4**self.levels:
            unit *= 4
        return at + unit

    def reach(self, version: int, changes: Sequence[Change]) -> Iterator[SkipDelta]:
        """Take note of the changes that led from the last version to this one, and yield the skip deltas to it.

        Iterate to the end before the weights change again. A version that does not follow in a piece starts anew.
        """
        unit, level = version - (self.version if self.version is not None else version), 0
        while 4**level < unit:
            level += 1
        if unit != 4**level or version % unit or level >= self.levels or any(self._pieces[:level]):
            self.start(version)
            return
        self.version = version
        due, piece = spans(version, self.levels), _piece(Undo.of(change) for change in changes if change.count)
        while True:
            pieces = self._pieces[level]
            pieces.append(piece)
            for count in range(1, min(len(pieces), 3) + 1):
                if count * unit in due:
                    yield SkipDelta(version - count * unit, self._encoder(pieces[-count:]))
            if version % (4 * unit):
                return
            whole = len(pieces) == 4 and level + 1 < self.levels
            if not whole:
                # what is longer would start before the first version that was seen here
                self._pieces[level:] = [[] for _ in self._pieces[level:]]
                return
            piece, self._pieces[level] = self._merge(pieces), []
            level, unit = level + 1, 4 * unit

    def _before(self, pieces: Sequence[Piece], region: Region) -> tuple[Bits, Bits]:
        """The bits of a region before these pieces, and now."""
        present = self._state.region(region)
        bits = present.copy()
        for piece in reversed(pieces):
            for undo in reversed(piece.get(region.tensor.name, ())):
                undo.restore(bits, region)
        return bits, present

    def _merge(self, pieces: Sequence[Piece]) -> Piece:
        def one(region: Region) -> Undo:
            old, present = self._before(pieces, region)
            return Undo.of(compare(region, old, present), old)

        regions = [region for block in self._plan for region in block]
        return _piece(ordered_map(one, regions, self._threads))

    def _encoder(self, pieces: Sequence[Piece]) -> Callable[[str], Iterator[tuple[EncodedBlock, StateDigest]]]:
        kept = list(pieces)

        def one(block: Block, encoding: str) -> tuple[EncodedBlock, StateDigest]:
            both = {region: self._before(kept, region) for region in block}
            changes = [compare(region, old, present) for region, (old, present) in both.items()]
            return encode_block(changes, encoding, lambda region: both[region][0]), moved(changes)

        return lambda encoding: ordered_map(lambda block: one(block, encoding), self._plan, self._threads)


def _piece(undos: Iterable[Undo]) -> Piece:
    found: Piece = {}
    for undo in undos:
        if undo.old.size:
            found.setdefault(undo.region.tensor.name, []).append(undo)
    return found
