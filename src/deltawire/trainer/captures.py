"""Changes on their way to the bucket.

A detector holds the weights captured last. A capture keeps the old and new bits of everything it changed, so any
earlier state is the detector's with later captures undone: an anchor of version 40 can be uploaded while the trainer is
already at 43, with one copy of the model, or none but the trainer's own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from ..core.change import Change, Region, no_change
from ..core.digest import StateDigest
from ..core.dtypes import Bits
from ..core.full import Source
from ..core.parallel import ordered_map, threads_for
from ..core.sparse import EncodedBlock, encode_block
from .detectors import Detector, Found, done, merge

if TYPE_CHECKING:
    from ..kernels.block import DeviceBlock

BLOCKS = 12
"""Blocks of old weights that are on a device for the encoder at a time, 64 MB each."""


class Changes(Protocol):
    """What turns one version into the next: a capture, or a `Stream` that compares while it is encoded."""

    def encode(self, encoding: str) -> Iterator[EncodedBlock]:
        """The coded blocks. Iterate once, to the end, before asking for `digest` or `weights`."""
        ...

    def digest(self) -> StateDigest:
        """State digest of the new version, or the share of this rank in it."""
        ...

    def weights(self, region: Region) -> Bits:
        """Full weights of the new version, a region at a time."""
        ...


class Capture:
    """What changed between two moments, block by block. Compared by identity; `Captures` makes them.

    It may still be on its way from a device or being merged: reading it waits for that.
    """

    def __init__(self, owner: Captures, found: Future[Found]) -> None:
        self._owner, self.found = owner, found

    @property
    def blocks(self) -> list[list[Change]]:
        return self.found.result().blocks

    @property
    def moved(self) -> StateDigest:
        """How the state digest moves."""
        return self.found.result().moved

    @property
    def count(self) -> int:
        """Number of changed units."""
        return sum(change.count for block in self.blocks for change in block)

    def encode(self, encoding: str, since: Capture | None = None) -> Iterator[EncodedBlock]:
        """The coded blocks of this capture, or of `since`, which spans several captures and ends with this one."""
        changes = since or self
        before = Before(self._owner, self, changes)
        return ordered_map(
            lambda block: encode_block(block, encoding, before), changes.blocks, threads_for(changes.count)
        )

    def digest(self) -> StateDigest:
        return self._owner.digest_at(self)

    def weights(self, region: Region) -> Bits:
        return self._owner.read(region, self)

    def then(self, later: Capture) -> Capture:
        """Merge with the capture that follows."""
        return Capture(self._owner, done(lambda: merge(self.found, later.found)))


class Captures:
    """The captures of a detector that are not yet in the bucket. One thread captures; any thread may read."""

    def __init__(self, detector: Detector, digest: StateDigest) -> None:
        """`digest` is that of the weights that the detector holds."""
        self.detector = detector
        self.plan = detector.plan
        self._digest = digest
        """Of the version before the oldest pending capture."""
        self._place = {region: (b, r) for b, block in enumerate(self.plan) for r, region in enumerate(block)}
        self.pending: list[Capture] = []
        """Oldest first."""
        self._lock = threading.Lock()
        self._room = threading.BoundedSemaphore(BLOCKS)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the weights that the detector covers."""
        return sum(region.units * region.tensor.unit_size for block in self.plan for region in block)

    def capture(self, source: Source, budget: int, onto: Capture | None = None) -> Capture:
        """What `source` changed since the last capture, merged with `onto` if that is still waiting.

        The source may change again as soon as this returns. Raises TooLarge if it would hold more bytes than `budget`.
        """
        if onto is not None:
            # a trainer faster than merging waits here, so that captures do not pile up
            onto.found.result()
        detected = self.detector.detect(source, budget)
        with self._lock:
            try:
                detected.take()
            except BaseException:
                # interrupted half-way: restore the weights captured before
                detected.give_back()
                raise
            capture = Capture(self, detected.found)
            if onto is None:
                self.pending.append(capture)
            else:
                first = onto.found
                capture = Capture(self, self.detector.later(lambda: merge(first, detected.found)))
                self.pending[self.pending.index(onto)] = capture
        return capture

    def empty(self) -> Capture:
        """A capture without a change, which is not pending."""
        nothing = [[no_change(region) for region in block] for block in self.plan]
        return Capture(self, done(lambda: Found(nothing, StateDigest())))

    def precede(self, found: Found) -> None:
        """Insert a change that leads to the weights which the detector holds, as if it had been captured."""
        with self._lock:
            self._digest -= found.moved
            self.pending.insert(0, Capture(self, done(lambda: found)))

    def settle(self, capture: Capture) -> None:
        """Drop a published capture. Captures settle in the order they were taken."""
        with self._lock:
            if self.pending[0] is not capture:
                raise RuntimeError("captures must be published in the order they were taken")
            self._digest += self.pending.pop(0).moved

    def fold(self, first: Capture, second: Capture) -> Capture:
        """Merge two neighbouring pending captures."""
        with self._lock:
            both = first.then(second)
            at = self.pending.index(first)
            self.pending[at : at + 2] = [both]
            return both

    @property
    def digest(self) -> StateDigest:
        """State digest of the weights captured last."""
        with self._lock:
            return sum((pending.moved for pending in self.pending), self._digest)

    def move(self, digest: StateDigest) -> None:
        """The detector took weights over without a capture: those that it holds now have this digest."""
        with self._lock:
            if self.pending:
                raise RuntimeError("the weights captured last were replaced while captures of them are pending")
            self._digest = digest

    def digest_at(self, capture: Capture) -> StateDigest:
        """State digest of the weights when a pending capture was taken."""
        with self._lock:
            upto = self.pending[: self.pending.index(capture) + 1]
            return sum((pending.moved for pending in upto), self._digest)

    def read(self, region: Region, capture: Capture, *undone: Capture) -> Bits:
        """A region of the weights as they were when a pending capture was taken, with further changes undone."""
        block, number = self._place[region]
        with self._lock:
            bits: Bits = self.detector.region(region).copy()
            later = self.pending[self.pending.index(capture) + 1 :]
        for each in (*reversed(later), *undone):
            change = each.blocks[block][number]
            bits[change.positions] = change.old
        return bits

    def block(self, regions: Sequence[Region], capture: Capture, *undone: Capture) -> DeviceBlock | None:
        """The same for regions on a device, which stay there; None if they are in host memory."""
        # before the lock: who captures must not wait until an encoder is done with a block
        self._room.acquire()
        try:
            with self._lock:
                found = self.detector.block(regions)
                later = self.pending[self.pending.index(capture) + 1 :]
        except BaseException:
            self._room.release()
            raise
        if found is None:
            self._room.release()
        else:
            weakref.finalize(found, self._room.release)
            for each in (*reversed(later), *undone):
                found.undo([each.blocks[block][number] for block, number in map(self._place.__getitem__, regions)])
        return found


class Before:
    """The weights before a capture, by region, or by regions that are counted on their device."""

    def __init__(self, captures: Captures, capture: Capture, undone: Capture) -> None:
        self._captures, self._capture, self._undone = captures, capture, undone

    def __call__(self, region: Region) -> Bits:
        return self._captures.read(region, self._capture, self._undone)

    def block(self, regions: Sequence[Region]) -> DeviceBlock | None:
        return self._captures.block(regions, self._capture, self._undone)


class Skips:
    """Everything that changed since a base version, kept to be published as a skip delta beside an ordinary one."""

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._base: tuple[int, Capture] | None = None
        """The last base version, and what changed since."""

    @property
    def base(self) -> int | None:
        """The version that the next skip delta starts from."""
        return self._base[0] if self._base else None

    def forget(self) -> None:
        """Start over at the next base version: something was published that was not captured."""
        self._base = None

    def since(self, capture: Capture, version: int) -> tuple[int, Capture] | None:
        """(base, changes) of the skip delta that goes with this version; None if none does."""
        if self._base is None or not self._is_base(version) or self._base[0] == version - 1:
            return None
        return self._base[0], self._base[1].then(capture)

    def settle(self, captures: Captures, capture: Capture, version: int) -> None:
        """Note that a capture is published as this version."""
        captures.settle(capture)
        if self._is_base(version):
            self._base = version, captures.empty()
        elif self._base is not None:
            self._base = self._base[0], self._base[1].then(capture)

    def _is_base(self, version: int) -> bool:
        return bool(self._every) and version % (self._every or 1) == 0
