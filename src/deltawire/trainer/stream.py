"""Publishing with one copy of the model and little more: compare, encode and update the copy, a block at a time.

A capture (captures.py) keeps old and new bits of all that changed, which for a dense change is more than the model.
Here nothing is kept but the coded bytes, which the delta's writer spools to disk; the price is that the caller waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np

from ..core import full
from ..core.change import Block, Change, Region, compare, moved, pieces
from ..core.digest import StateDigest
from ..core.dtypes import Bits
from ..core.errors import PublishFailed
from ..core.parallel import default_threads, ordered_map
from ..core.sparse import EncodedBlock, encode_block
from .captures import Captures
from .detectors import HostDetector

READ_UNITS = 1 << 22
"""Weights are read and compared in parts of this size, several of which make a block."""

PIECE_UNITS = 1 << 20
"""A dense part is encoded in pieces of this size: its changes would take several times the memory of its weights."""

IN_WORK = 128 << 20
"""Bytes that may be in work at a time: limits the threads on machines with many cores."""

_PER_UNIT = 8
"""Bytes that a unit in work takes, roughly: its new bits, and scratch for those that changed."""

_DENSE = 16
_SAMPLE = 61

Detected = Callable[[int], None]
"""Called with the number of bytes that were compared."""


class Stream:
    """What a source changed, compared while it is encoded (`Changes`).

    The weights captured last become the source's block by block. If anything fails on the way, drop `captures`.
    """

    def __init__(self, captures: Captures, source: full.Source, detected: Detected | None) -> None:
        self._captures, self._detector = captures, captures.detector
        self._source, self._detected = source, detected

    def encode(self, encoding: str) -> Iterator[EncodedBlock]:
        plan, reached = self._captures.plan, self._captures.digest
        threads = max(1, min(default_threads(), IN_WORK // (READ_UNITS * _PER_UNIT)))
        parts = ordered_map(lambda block: self._encode(block, encoding), plan, threads)
        for block, (digest, coded) in zip(plan, parts, strict=True):
            reached += digest
            if self._detected:
                self._detected(sum(region.units * region.tensor.unit_size for region in block))
            yield from coded
        if not isinstance(self._detector, HostDetector) and self._detector.load(self._source) != reached:
            raise PublishFailed("the weights changed while they were being published; keep training out of `publish`")
        self._captures.move(reached)

    def digest(self) -> StateDigest:
        return self._captures.digest

    def weights(self, region: Region) -> Bits:
        return self._detector.region(region)

    def _encode(self, block: Block, encoding: str) -> tuple[StateDigest, list[EncodedBlock]]:
        """Compare and encode a block, and update the copy. Returns how the digest moves, and coded blocks.

        Blocks cover disjoint regions: one may be updated while others are still being compared.
        """
        digest, coded = StateDigest(), []

        def take(changes: list[Change]) -> None:
            nonlocal digest
            coded.append(encode_block(changes, encoding, self._detector.region))
            if isinstance(self._detector, HostDetector):
                # encoded against the old bits, so they may go now
                self._detector.write(changes)
            digest += moved(changes)

        sparse: list[Change] = []
        for part in (part for region in block for part in pieces(region, READ_UNITS)):
            old, new = self._detector.region(part), self._source.region(part)
            if not _is_dense(old, new):
                sparse.append(compare(part, old, new))
                continue
            # in the order of the tensor's bytes, which `raw` needs
            take(sparse)
            sparse = []
            for piece in pieces(part, PIECE_UNITS):
                at = piece.base - part.base
                take([compare(piece, old[at : at + piece.units], new[at : at + piece.units])])
        take(sparse)
        return digest, coded


class Watched:
    """A source that reports how many bytes were read from it."""

    def __init__(self, source: full.Source, detected: Detected) -> None:
        self.schema, self._source, self._detected = source.schema, source, detected
        self._lock = threading.Lock()

    def region(self, region: Region) -> Bits:
        bits = self._source.region(region)
        with self._lock:
            self._detected(bits.nbytes)
        return bits


def _is_dense(old: Bits, new: Bits) -> bool:
    """Whether many weights differ, judged by a sample: it decides about memory, not about correctness."""
    if old.size <= PIECE_UNITS:
        return False
    changed = np.count_nonzero(old[::_SAMPLE] != new[::_SAMPLE])
    return bool(changed * _SAMPLE * _DENSE > old.size)
