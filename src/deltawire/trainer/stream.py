"""Publishing with one copy of the model and little more: compare, code and take over a block at a time.

A capture (see captures.py) keeps old and new bits of all that changed, which for a dense change is more than the model.
Here nothing is kept but the coded bytes, which the writer spools to disk; the price is that the caller waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np

from ..core import full
from ..core.change import Block, Change, Region, compare
from ..core.digest import StateDigest
from ..core.dtypes import Bits
from ..core.errors import PublishFailed
from ..core.parallel import default_threads, ordered_map
from ..core.sparse import EncodedBlock, encode_block
from .captures import Mirror

READ_UNITS = 1 << 22
"""Weights are read and compared in parts of this size, several of which make a block."""

PIECE_UNITS = 1 << 20
"""A dense part is coded in pieces of this size: its changes would take several times the memory of its weights."""

IN_WORK = 128 << 20
"""Bytes that may be in work at a time: what bounds the threads, on machines with many."""

_PER_UNIT = 8
"""Bytes that a unit in work takes, roughly: its new bits, and scratch for those that changed."""

_DENSE = 16
_SAMPLE = 61

Detected = Callable[[int], None]
"""Told the bytes that were compared."""


class Stream:
    """The coded blocks of what a source changed. The mirror is taken along; if anything fails on the way, drop it."""

    def __init__(self, mirror: Mirror, source: full.Source, encoding: str, detected: Detected | None) -> None:
        self._mirror, self._source, self._encoding, self._detected = mirror, source, encoding, detected
        self._threads = max(1, min(default_threads(), IN_WORK // (READ_UNITS * _PER_UNIT)))
        self._moved = StateDigest()

    def blocks(self) -> Iterator[EncodedBlock]:
        """What turns the mirror's weights into the source's, while the mirror becomes that."""
        plan = self._mirror.plan
        for block, (moved, coded) in zip(plan, ordered_map(self._code, plan, self._threads), strict=True):
            self._moved += moved
            self._tell(block)
            yield from coded
        self._arrive()

    def digest(self) -> StateDigest:
        """After the last block: the digest of the source."""
        return self._mirror.digest

    def load(self) -> None:
        """Take everything over without saying what changed: for the first version, which has no version before it."""
        detector = self._mirror.detector
        # a device takes weights over by itself; where they are read by regions that can be watched
        source = _Watched(self._source, self._detected) if detector.writes_parts and self._detected else self._source
        self._mirror.digest = detector.load(source)

    def _arrive(self) -> None:
        """Whatever is read from the mirror from now on (an anchor, say) is the source's."""
        mirror = self._mirror
        reached = mirror.digest + self._moved
        if not mirror.detector.writes_parts and mirror.detector.load(self._source) != reached:
            raise PublishFailed("the weights changed while they were being published; keep training out of `publish`")
        mirror.digest, self._moved = reached, StateDigest()

    def _tell(self, block: Block) -> None:
        if self._detected:
            self._detected(sum(region.units * region.tensor.unit_size for region in block))

    def _code(self, block: Block) -> tuple[StateDigest, list[EncodedBlock]]:
        """Blocks cover disjoint regions: one may be taken over while others are still being compared."""
        moved, coded = StateDigest(), []
        sparse: list[Change] = []
        for part in (part for region in block for part in _cut(region, READ_UNITS)):
            old, new = self._mirror.detector.region(part), self._source.region(part)
            if not _is_dense(old, new):
                sparse.append(compare(part, old, new))
                continue
            for piece in _cut(part, PIECE_UNITS):
                at = piece.base - part.base
                change = compare(piece, old[at : at + piece.units], new[at : at + piece.units])
                moved += self._take(coded, [change])
        moved += self._take(coded, sparse)
        return moved, coded

    def _take(self, coded: list[EncodedBlock], changes: list[Change]) -> StateDigest:
        coded.append(encode_block(changes, self._encoding, self._mirror.detector.region))
        if self._mirror.detector.writes_parts:
            # coded against the old bits, so they may go now
            self._mirror.detector.write(changes)
        return sum((change.digest() for change in changes), StateDigest())


class _Watched:
    """A source that says how far it has been read."""

    def __init__(self, source: full.Source, detected: Detected) -> None:
        self.schema, self._source, self._detected = source.schema, source, detected
        self._lock = threading.Lock()

    def region(self, region: Region) -> Bits:
        bits = self._source.region(region)
        with self._lock:
            self._detected(bits.nbytes)
        return bits


def _is_dense(old: Bits, new: Bits) -> bool:
    """Judged by a sample: what is at stake is memory, not correctness."""
    if old.size <= PIECE_UNITS:
        return False
    changed = np.count_nonzero(old[::_SAMPLE] != new[::_SAMPLE])
    return bool(changed * _SAMPLE * _DENSE > old.size)


def _cut(region: Region, units: int) -> Iterator[Region]:
    """A contiguous region in smaller ones, in the order of its bytes."""
    height, width = max(1, units // region.columns), min(region.columns, units)
    for row in range(0, region.rows, height):
        for column in range(0, region.columns, width):
            rows, columns = min(height, region.rows - row), min(width, region.columns - column)
            yield Region(region.tensor, region.row + row, rows, region.column + column, columns)
