"""The publisher's memory of what it has captured, and the captures still on their way to the bucket.

The detector holds the newest captured weights. A capture keeps the old and new bits of everything it changed, so any
earlier state is the detector's with later captures undone: that is how an anchor of version 40 can be uploaded while
the trainer is already at 43, with one copy of the model, or none but the trainer's own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING

from ..core.change import Block, Change, Region, no_change
from ..core.digest import StateDigest
from ..core.dtypes import Bits
from ..core.full import Source
from .detectors import Detector, Found, merged, now

if TYPE_CHECKING:
    from ..kernels.block import DeviceBlock

BLOCKS = 12
"""Blocks of old weights that are on a device for the encoder at a time, 64 MB each."""


class Capture:
    """What changed between two moments, block by block. Compared by identity.

    It may still be on its way from a device or being merged: whoever looks inside waits for it.
    """

    def __init__(self, found: Future[Found]) -> None:
        self.found = found

    @property
    def blocks(self) -> list[list[Change]]:
        return self.found.result().blocks

    @property
    def moved(self) -> StateDigest:
        """How the state digest moves."""
        return self.found.result().moved

    @property
    def count(self) -> int:
        return sum(change.count for block in self.blocks for change in block)

    @property
    def nbytes(self) -> int:
        return sum(change.nbytes for block in self.blocks for change in block)

    @classmethod
    def empty(cls, plan: Sequence[Block]) -> Capture:
        return cls(now(lambda: Found([[no_change(region) for region in block] for block in plan], StateDigest())))

    def then(self, later: Capture) -> Capture:
        """Both as one."""
        return Capture(now(lambda: merged(self.found, later.found)))


class Mirror:
    """The captures in flight over a detector. Only one thread captures; any thread may read."""

    def __init__(self, detector: Detector, digest: StateDigest | None = None) -> None:
        self.detector = detector
        self.plan = detector.plan
        self._digest = digest or StateDigest()
        # of the version before the oldest pending capture
        self._place = {region: (b, r) for b, block in enumerate(self.plan) for r, region in enumerate(block)}
        self._pending: list[Capture] = []
        # oldest first
        self._lock = threading.Lock()
        self._room = threading.BoundedSemaphore(BLOCKS)

    @cached_property
    def nbytes(self) -> int:
        return sum(region.units * region.tensor.unit_size for block in self.plan for region in block)

    def capture(self, source: Source, budget: int, onto: Capture | None = None) -> Capture:
        """What `source` changed since the last capture, merged with `onto` if that is still waiting.

        The source may change again as soon as this returns.
        """
        if onto is not None:
            # a trainer faster than merging waits here, so that captures do not pile up
            onto.found.result()
        detected = self.detector.detect(source, budget)
        with self._lock:
            try:
                detected.take()
            except BaseException:
                # interrupted half-way: be what we were
                detected.give_back()
                raise
            capture = Capture(detected.found)
            if onto is None:
                self._pending.append(capture)
            else:
                first = onto.found
                capture = Capture(self.detector.later(lambda: merged(first, detected.found)))
                self._pending[self._pending.index(onto)] = capture
        return capture

    def at(self, capture: Capture) -> Callable[[Region], Bits]:
        """The weights as they were when a pending capture was taken, a region at a time."""
        return lambda region: self._read(region, capture)

    def before(self, capture: Capture, since: Capture | None = None) -> Before:
        """The weights as they were before a pending capture, or before all of `since`, which ends with it."""
        return Before(self, capture, since or capture)

    def digest_at(self, capture: Capture) -> StateDigest:
        with self._lock:
            upto = self._pending[: self._pending.index(capture) + 1]
            return sum((pending.moved for pending in upto), self._digest)

    @property
    def digest(self) -> StateDigest:
        """Of the weights captured last."""
        with self._lock:
            return sum((pending.moved for pending in self._pending), self._digest)

    @digest.setter
    def digest(self, digest: StateDigest) -> None:
        with self._lock:
            assert not self._pending
            self._digest = digest

    def precede(self, found: Found) -> Capture:
        """Go back to before a change that leads to the weights captured first: it is pending, like a capture."""
        with self._lock:
            assert not self._pending
            capture = Capture(now(lambda: found))
            self._digest -= found.moved
            self._pending.append(capture)
            return capture

    def settle(self, capture: Capture) -> None:
        """The capture is published: nobody will ask for the state before it again."""
        with self._lock:
            # captures settle in the order they were taken
            assert self._pending[0] is capture
            self._digest += self._pending.pop(0).moved

    def fold(self, first: Capture, second: Capture) -> Capture:
        """Make two neighbouring pending captures one (the first could not be published)."""
        with self._lock:
            both = first.then(second)
            at = self._pending.index(first)
            self._pending[at : at + 2] = [both]
            return both

    def _read(self, region: Region, capture: Capture, *also: Capture) -> Bits:
        """A region with every capture after `capture` undone, and then those in `also`."""
        block, number = self._place[region]
        with self._lock:
            bits = self.detector.region(region).copy()
            later = self._pending[self._pending.index(capture) + 1 :]
        for undone in (*reversed(later), *also):
            change = undone.blocks[block][number]
            bits[change.positions] = change.old
        return bits

    def _block(self, regions: Sequence[Region], capture: Capture, *also: Capture) -> DeviceBlock | None:
        """The same for regions on a device."""
        # before the lock: who captures must not wait until an encoder is done with a block
        self._room.acquire()
        try:
            with self._lock:
                found = self.detector.block(regions)
                later = self._pending[self._pending.index(capture) + 1 :]
        except BaseException:
            self._room.release()
            raise
        if found is None:
            self._room.release()
        else:
            weakref.finalize(found, self._room.release)
            for undone in (*reversed(later), *also):
                found.undo([undone.blocks[block][number] for block, number in map(self._place.__getitem__, regions)])
        return found


class Before:
    """The weights before a capture, by region, or by regions that are counted on their device."""

    def __init__(self, mirror: Mirror, capture: Capture, also: Capture) -> None:
        self._mirror, self._capture, self._also = mirror, capture, also

    def __call__(self, region: Region) -> Bits:
        return self._mirror._read(region, self._capture, self._also)

    def block(self, regions: Sequence[Region]) -> DeviceBlock | None:
        return self._mirror._block(regions, self._capture, self._also)
