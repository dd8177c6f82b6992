"""The publisher's memory of what it has captured, and the captures still on their way to the bucket.

`state` always holds the newest captured weights. A capture keeps the old and new bits of everything it changed, so any
earlier state is `state` with later captures undone: that is how an anchor of version 40 can be uploaded while the
trainer is already at 43, with one copy of the model in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..bucket.replay import State
from ..core.change import Block, Change, Region, blocks, compare, compose, no_change
from ..core.digest import StateDigest
from ..core.dtypes import Bits
from ..core.full import Source
from ..core.parallel import ordered_map


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """What changed between two moments, block by block. Compared by identity."""

    blocks: list[list[Change]]
    moved: StateDigest = field(default_factory=StateDigest)
    # how the state digest moves

    @property
    def count(self) -> int:
        return sum(change.count for block in self.blocks for change in block)

    @property
    def nbytes(self) -> int:
        return sum(change.nbytes for block in self.blocks for change in block)

    @classmethod
    def empty(cls, plan: Sequence[Block]) -> Capture:
        return cls([[no_change(region) for region in block] for block in plan])

    def then(self, later: Capture) -> Capture:
        """Both as one. A weight that came back to its old bits is no longer in it."""
        pairs = zip(self.blocks, later.blocks, strict=True)
        merged = ordered_map(lambda pair: [compose(a, b) for a, b in zip(*pair, strict=True)], pairs)
        return Capture(list(merged), self.moved + later.moved)


class TooLarge(Exception):
    """A capture would need more memory than allowed; nothing was changed."""


class Mirror:
    """One copy of the model and the captures in flight. Only one thread captures; any thread may read."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.plan: list[Block] = blocks(state.schema)
        self._place = {region: (b, r) for b, block in enumerate(self.plan) for r, region in enumerate(block)}
        self._pending: list[Capture] = []
        # oldest first
        self._lock = threading.Lock()

    def capture(self, source: Source, budget: int, onto: Capture | None = None) -> Capture:
        """What `source` changed since the last capture, merged with `onto` if that is still waiting.

        The source may change again as soon as this returns.
        """

        def one(block: Block) -> tuple[list[Change], StateDigest]:
            changes = self.compare(source, block)
            return changes, sum((change.digest() for change in changes), StateDigest())

        found: list[list[Change]] = []
        moved, held = StateDigest(), 0
        for changes, digest in ordered_map(one, self.plan):
            found.append(changes)
            moved += digest
            held += sum(change.nbytes for change in changes)
            if held > budget:
                raise TooLarge
        capture = Capture(found, moved)
        with self._lock:
            try:
                for _ in ordered_map(self.write, capture.blocks):
                    pass
            except BaseException:
                # interrupted half-way: be what we were
                for changes in capture.blocks:
                    for change in changes:
                        change.undo(self.state.bits(change.region.tensor.name))
                raise
            self.state.digest += moved
            if onto is None:
                self._pending.append(capture)
            else:
                capture = onto.then(capture)
                self._pending[self._pending.index(onto)] = capture
        return capture

    def compare(self, source: Source, block: Block) -> list[Change]:
        return [compare(region, self.state.region(region), source.region(region)) for region in block]

    def write(self, changes: Sequence[Change]) -> None:
        for change in changes:
            change.write(self.state.bits(change.region.tensor.name))

    def at(self, capture: Capture) -> Callable[[Region], Bits]:
        """The weights as they were when a pending capture was taken, a region at a time."""
        return lambda region: self._read(region, capture)

    def before(self, capture: Capture, since: Capture | None = None) -> Callable[[Region], Bits]:
        """The weights as they were before a pending capture, or before all of `since`, which ends with it."""
        return lambda region: self._read(region, capture, since or capture)

    def digest_at(self, capture: Capture) -> StateDigest:
        with self._lock:
            digest = self.state.digest
            for later in self._pending[self._pending.index(capture) + 1 :]:
                digest -= later.moved
            return digest

    def settle(self, capture: Capture) -> None:
        """The capture is published: nobody will ask for the state before it again."""
        with self._lock:
            self._pending.remove(capture)

    def fold(self, first: Capture, second: Capture) -> Capture:
        """Make two neighbouring pending captures one (the first could not be published)."""
        with self._lock:
            merged = first.then(second)
            at = self._pending.index(first)
            self._pending[at : at + 2] = [merged]
            return merged

    def _read(self, region: Region, capture: Capture, *also: Capture) -> Bits:
        """A region with every capture after `capture` undone, and then those in `also`."""
        block, number = self._place[region]
        with self._lock:
            bits = self.state.region(region).copy()
            later = self._pending[self._pending.index(capture) + 1 :]
        for undone in (*reversed(later), *also):
            change = undone.blocks[block][number]
            bits[change.positions] = change.old
        return bits
