"""Changes that are not yet in the bucket: captured, or compared while they are encoded.

A detector holds the weights captured last. A `Capture` keeps the old and new bits of everything it changed, so any
earlier state is the detector's with later captures undone: an anchor of version 40 can be uploaded while the trainer is
already at 43, with one copy of the model, or none besides the trainer's own.

For a dense change that is more than the model. A `Stream` compares, encodes and updates the copy a block at a time, and
keeps nothing but the coded bytes, which the delta's writer spools to disk; the price is that the caller waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from ..core import codecs
from ..core.change import Block, Change, Region, compare, digest_shift, pieces
from ..core.digest import StateDigest
from ..core.dtypes import Bits
from ..core.errors import PublishFailed
from ..core.full import ReadBy, Source
from ..core.parallel import Later, default_threads, ordered_map, threads_for
from ..core.sparse import EncodedBlock, encode_block, encode_counted
from .detectors import Detector, Found, SnapshotLost, done, merge

if TYPE_CHECKING:
    from ..kernels.block import DeviceBlock

READ_UNITS = 1 << 22
"""Weights are read and compared in parts of this size, several of which make a block."""

PIECE_UNITS = 1 << 20
"""A dense part is encoded in pieces of this size: its changes would take several times the memory of its weights."""

IN_WORK = 128 << 20
"""Bytes that may be in work at a time: limits the threads on machines with many cores."""

_PER_UNIT = 8
"""Bytes that a unit in work takes, roughly: its new bits, and scratch for those that changed."""

_DENSE = 16
"""A part is dense if more than one weight in so many changed."""

_SAMPLE = 61
"""One weight in so many is looked at to tell."""

Compared = Callable[[int], None]
"""Called with the number of bytes that were compared."""


class Capture:
    """The weights that changed between two calls of `publish`, grouped by block. `Captures` makes them.

    The data may still be in transit from a GPU or being merged in a thread: `result` waits until it is there.
    Captures are compared by identity.
    """

    def __init__(self, owner: Captures, future: Later[Found]) -> None:
        self.owner, self._future = owner, future

    def result(self) -> Found:
        return self._future.result()

    def encode(self, encoding: str) -> Iterator[EncodedBlock]:
        """The coded blocks."""
        before, found = Weights(self.owner, self, undone=True), self.result()
        units = sum(region.units for block in self.owner.plan for region in block)
        threads = threads_for(codecs.work(encoding, units, found.count))
        if encoding == codecs.context.name and self.owner.detector.counts:
            return encode_counted(found.blocks, before, threads)
        return ordered_map(lambda block: encode_block(block, encoding, before), found.blocks, threads)

    def base(self) -> StateDigest | None:
        """State digest of the version that it follows, or the share of this rank in it; None if there is none."""
        owner = self.owner
        with owner._lock:
            owner._require_known()
            before = owner.pending[: owner.pending.index(self)]
            return None if owner.alone else sum((pending.result().shift for pending in before), owner._digest)

    def digest(self) -> StateDigest:
        """State digest of the new version, or the share of this rank in it."""
        owner = self.owner
        with owner._lock:
            owner._require_known()
            upto = owner.pending[: owner.pending.index(self) + 1]
            return sum((pending.result().shift for pending in upto), owner._digest)

    def weights(self, region: Region) -> Bits:
        """Full weights of the new version, a region at a time."""
        return Weights(self.owner, self)(region)


class Captures:
    """The captures of a detector that are not yet in the bucket. One thread captures; any thread may read."""

    def __init__(
        self,
        detector: Detector,
        digest: StateDigest,
        plan: Sequence[Block] | None = None,
        *,
        alone: bool = False,
    ) -> None:
        """`digest` is that of the weights that the detector holds. `plan` says where the regions of the detector's plan
        are in the checkpoint, for a rank that holds parts of a model; by default they are the same."""
        self.alone = alone
        """Whether these weights follow no version that can be read: the next version has full weights alone."""
        self.lost = False
        """Whether the detector's weights and the captures may not belong together: what moves both was interrupted."""
        self.detector = detector
        self.plan = detector.plan if plan is None else plan
        self._translates = plan is not None
        self._digest = digest
        """Of the version before the oldest pending capture."""
        self._place = {region: (b, r) for b, block in enumerate(self.plan) for r, region in enumerate(block)}
        self.pending: list[Capture] = []
        """Oldest first."""
        self._lock = threading.Lock()

    def capture(self, source: Source, budget: int) -> Capture:
        """Capture what `source` changed since the last capture.

        The source may change again as soon as this returns. Raises TooLarge if it would hold more bytes than `budget`,
        and SnapshotLost if an earlier call was interrupted.
        """
        with self._lock:
            self._require_known()
        take = self.detector.detect(source, budget)
        with self._lock:
            self.lost = True
            future = take()
            capture = Capture(self, self._translated(future) if self._translates else future)
            self.pending.append(capture)
            self.lost = False
        return capture

    def abandon(self) -> None:
        """Let nothing be read of these captures any more."""
        with self._lock:
            self.lost = True

    @property
    def known(self) -> bool:
        """Whether the detector's weights and the captures belong together."""
        with self._lock:
            return not self.lost

    def _require_known(self) -> None:
        if self.lost:
            raise SnapshotLost("a publish was interrupted while it captured what changed")

    def _translated(self, found: Later[Found]) -> Later[Found]:
        """Changes that a detector found, in the coordinates of the checkpoint."""

        def translate() -> Found:
            # positions count within a region, so they stay what they are
            pairs = zip(self.plan, found.result().blocks, strict=True)
            return Found.of(
                [[Change(r, c.positions, c.old, c.new) for r, c in zip(*pair, strict=True)] for pair in pairs]
            )

        return self.detector.later(translate)

    def follow(self, version: Source) -> None:
        """Make what differs between a version and the weights that the detector holds the first pending capture."""

        def compared(block: Block) -> list[Change]:
            return [compare(region, version.region(region), self._held(region)) for region in block]

        found = Found.of(list(ordered_map(compared, self.plan)))
        with self._lock:
            self._digest -= found.shift
            self.pending.insert(0, Capture(self, done(found)))

    def settle(self, capture: Capture) -> None:
        """Drop a capture that is published. Captures settle in the order they were taken."""
        with self._lock:
            if self.lost:
                return  # the next publish compares with this version
            if self.pending[0] is not capture:
                raise RuntimeError("captures must be published in the order they were taken")
            digest = self._digest + capture.result().shift
            self.lost = True
            self.pending.remove(capture)
            self._digest, self.alone = digest, False
            self.lost = False

    def carry_older(self, capture: Capture, committed: bool) -> None:
        """Make a capture include those before it, whose publishing failed. `committed`: that of the oldest did not, and
        only the answer was lost."""
        if committed and self.pending[0] is not capture:
            self.settle(self.pending[0])
        with self._lock:
            first = self.pending[0]
        if first is not capture:
            self.fold(first, capture)

    def fold(self, first: Capture, second: Capture) -> None:
        """Make `second` include the pending captures before it, from `first` on, unless that was given up before."""
        if first.owner is not self:
            return  # these captures began anew, with full weights
        with self._lock:
            self._require_known()
            start, end = self.pending.index(first), self.pending.index(second)
            parts = [capture._future for capture in self.pending[start : end + 1]]
            self.lost = True
            second._future = self.detector.later(lambda: reduce(merge, [part.result() for part in parts]))
            del self.pending[start:end]
            self.lost = False

    @property
    def digest(self) -> StateDigest:
        """State digest of the weights captured last."""
        with self._lock:
            return sum((pending.result().shift for pending in self.pending), self._digest)

    def move(self, digest: StateDigest) -> None:
        """Note the digest of the detector's weights, after it took them without a capture."""
        with self._lock:
            if self.pending:
                raise RuntimeError("the weights captured last were replaced while captures of them are pending")
            self._digest = digest

    def _held(self, region: Region) -> Bits:
        """A region of the weights captured last."""
        return self.detector.region(self._local(region))

    def _local(self, region: Region) -> Region:
        """The detector's own region for one of the plan."""
        block, number = self._place[region]
        return self.detector.plan[block][number]


class Weights:
    """The weights at the time of a pending capture, with the changes of others undone. Any thread may read them."""

    def __init__(self, captures: Captures, capture: Capture, *, undone: bool = False) -> None:
        """With `undone`, this capture is undone too."""
        self._captures, self._capture, self._undone = captures, capture, undone

    def __call__(self, region: Region) -> Bits:
        """A copy of a region of the plan, in host memory."""
        captures = self._captures
        with captures._lock:
            captures._require_known()
            bits: Bits = captures._held(region).copy()
            undone = self._to_undo()
        block, number = captures._place[region]
        for capture in undone:
            change = capture.result().blocks[block][number]
            bits[change.positions] = change.old
        return bits

    def block(self, regions: Sequence[Region]) -> DeviceBlock | None:
        """A copy of regions on the device they are on, which stays there; None if they are in host memory."""
        captures = self._captures
        with captures._lock:
            captures._require_known()
            found = captures.detector.block([captures._local(region) for region in regions])
            undone = self._to_undo()
        if found is not None:
            for capture in undone:
                found.undo([capture.result().blocks[b][n] for b, n in map(captures._place.__getitem__, regions)])
        return found

    def _to_undo(self) -> list[Capture]:
        """Captures that the detector's weights have and these do not, latest first."""
        pending = self._captures.pending
        return [*reversed(pending[pending.index(self._capture) + (not self._undone) :])]


class Stream:
    """Changes of a source, compared while they are encoded.

    The weights captured last become the source's block by block. If anything fails on the way, drop `captures`.
    Iterate over `encode` once, to the end, before asking for `digest` or `weights`, which are those of the new version.
    """

    def __init__(self, captures: Captures, source: Source, compared: Compared | None) -> None:
        self._captures, self._detector, self._write = captures, captures.detector, captures.detector.writer()
        self._source, self._compared = source, compared
        self._base = None if captures.alone else captures.digest

    def base(self) -> StateDigest | None:
        """State digest of the weights that it is compared with; None if these are no version."""
        return self._base

    def encode(self, encoding: str) -> Iterator[EncodedBlock]:
        plan, reached = self._captures.plan, self._captures.digest
        threads = max(1, min(default_threads(), IN_WORK // (READ_UNITS * _PER_UNIT)))
        parts = ordered_map(lambda block: self._encode(block, encoding), plan, threads)
        for block, (digest, coded) in zip(plan, parts, strict=True):
            reached += digest
            if self._compared:
                self._compared(sum(region.nbytes for region in block))
            yield from coded
        if not self._detector.in_host_memory and self._detector.load(self._source) != reached:
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
            # encoded against the old bits, so they may go now
            self._write(changes)
            digest += digest_shift(changes)

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
                at = piece.start - part.start
                take([compare(piece, old[at : at + piece.units], new[at : at + piece.units])])
        take(sparse)
        return digest, coded


def counted(source: Source, compared: Compared) -> Source:
    """Return a source that reports how many bytes are read from it."""
    lock = threading.Lock()

    def read(region: Region) -> Bits:
        bits = source.region(region)
        with lock:
            compared(bits.nbytes)
        return bits

    return ReadBy(source.schema, read)


def _is_dense(old: Bits, new: Bits) -> bool:
    """Whether many weights differ, judged by a sample: it decides about memory, not about correctness."""
    if old.size <= PIECE_UNITS:
        return False
    changed = np.count_nonzero(old[::_SAMPLE] != new[::_SAMPLE])
    return bool(changed * _SAMPLE * _DENSE > old.size)
