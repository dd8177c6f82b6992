"""Make skip deltas from the present weights and the changes that led to them.

An earlier version is the present one with the changes since then undone, a region at a time. The changes are kept as
pieces over 1, 4, 16 … versions, at most four of each (`skip_spans` in core/added.py needs no more): four become one of
the next length. So one copy of the weights is in memory; pieces that are not small are on disk.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ..core.added import LEVELS, skip_spans
from ..core.change import Block, Change, Region, blocks, compare, digest_shift
from ..core.digest import StateDigest
from ..core.dtypes import Bits
from ..core.parallel import ordered_map, threads_for
from ..core.sparse import EncodedBlock, encode_block
from ..core.state import State
from ..core.temporary import spooling

IN_MEMORY = 1 << 20
"""Bytes of an array that stays in memory."""

ALIGNMENT = 64
"""Bytes; arrays in a file begin at multiples of it."""


class ArrayFile:
    """A file for the arrays of a piece: one open file for all of them. Threads may share it.

    It is made for the first array that is not small, and has no name: nothing is left of it, whatever happens.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._lock = threading.Lock()

    def add(self, array: npt.NDArray[Any]) -> Callable[[], npt.NDArray[Any]]:
        """Return a function that returns the same array, mapped from the file while it is used."""
        if array.nbytes <= IN_MEMORY:
            kept = array.copy()
            return lambda: kept
        dtype, shape = array.dtype, array.shape
        with self._lock, spooling("what skip deltas are made of"):
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="deltawire-")  # noqa: SIM115
            file = self._file
            start = -(-file.seek(0, os.SEEK_END) // ALIGNMENT) * ALIGNMENT
            file.seek(start)
            file.write(np.ascontiguousarray(array).data)
            file.flush()

        def mapped() -> npt.NDArray[Any]:
            # numpy moves the position in the file
            with self._lock:
                return np.memmap(file, dtype, "r", start, shape)

        return mapped


@dataclass(frozen=True, slots=True)
class Reversal:
    """The bits that a region had before."""

    region: Region
    positions_of: Callable[[], npt.NDArray[np.uint32]] | None
    old_of: Callable[[], Bits]

    @classmethod
    def of(cls, change: Change, file: ArrayFile, old: Bits | None = None) -> Reversal:
        """`old` are the bits of the whole region before: kept instead where most of it changed."""
        if old is not None and change.positions.nbytes + change.old.nbytes > old.nbytes:
            return cls(change.region, None, file.add(old))
        return cls(change.region, file.add(change.positions), file.add(change.old))

    @property
    def positions(self) -> npt.NDArray[np.uint32] | None:
        """Positions of the weights that changed; None where `old` has all of them."""
        return self.positions_of() if self.positions_of is not None else None

    @property
    def old(self) -> Bits:
        return self.old_of()

    def restore(self, bits: Bits, region: Region) -> None:
        """Put the old bits into a copy of a region, as far as the two overlap."""
        common = self.region.meet(region)
        if common is None:
            return
        positions, old = self.positions, self.old
        if self.region == region:
            if positions is None:
                bits[:] = old
            else:
                bits[positions] = old
            return
        if positions is None:
            own = old.reshape(self.region.rows, self.region.columns)
            bits.reshape(region.rows, region.columns)[common.within(region)] = own[common.within(self.region)]
            return
        # positions count within another rectangle of the tensor: a sharded trainer's
        rows, columns = np.divmod(positions.astype(np.int64), self.region.columns)
        rows, columns = rows + (self.region.row - region.row), columns + (self.region.column - region.column)
        inside = (rows >= 0) & (rows < region.rows) & (columns >= 0) & (columns < region.columns)
        bits[rows[inside] * region.columns + columns[inside]] = old[inside]


Piece = dict[str, list[Reversal]]
"""How to undo what some versions changed: by tensor, the oldest change first."""


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
        """The farthest version up to `goal` that one sync may go to."""
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
        due, file = skip_spans(version, self.levels), ArrayFile()
        piece = _piece(Reversal.of(change, file) for change in changes if change.count)
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
        file = ArrayFile()

        def one(region: Region) -> Reversal:
            old, present = self._before(pieces, region)
            return Reversal.of(compare(region, old, present), file, old)

        regions = [region for block in self._plan for region in block]
        return _piece(ordered_map(one, regions, self._threads))

    def _encoder(self, pieces: Sequence[Piece]) -> Callable[[str], Iterator[tuple[EncodedBlock, StateDigest]]]:
        kept = list(pieces)

        def one(block: Block, encoding: str) -> tuple[EncodedBlock, StateDigest]:
            both = {region: self._before(kept, region) for region in block}
            changes = [compare(region, old, present) for region, (old, present) in both.items()]
            return encode_block(changes, encoding, lambda region: both[region][0]), digest_shift(changes)

        return lambda encoding: ordered_map(lambda block: one(block, encoding), self._plan, self._threads)


def _piece(undos: Iterable[Reversal]) -> Piece:
    found: Piece = {}
    for undo in undos:
        if undo.old.size:
            found.setdefault(undo.region.tensor.name, []).append(undo)
    return found
