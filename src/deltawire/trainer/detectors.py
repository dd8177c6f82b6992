"""How a publisher finds what changed: exactly, by comparing the bits of the wire dtype with those it captured last.

    HostDetector       a copy of the model in host memory; for numpy, checkpoint folders and torch models on a CPU
    SnapshotDetector   a copy on the model's own device, compared there: the default for a model on a GPU (device.py)
    FusedDetector      no copy: the bf16 weights that mixed-precision training keeps beside its masters (device.py)
    DeltaAdamW         no copy: the optimizer notes what its own steps change (adamw.py)

A detector covers the tensors of the schema it is bound to. A sharded writer binds one to the tensors of its rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..core import full
from ..core.change import Block, Change, Region, blocks, compare, compose, digest_shift
from ..core.digest import StateDigest
from ..core.dtypes import Bits
from ..core.errors import PublishFailed
from ..core.full import Source
from ..core.parallel import Later, for_each, ordered_map, threads_for
from ..core.state import State
from ..models import ModelView
from .pairs import OneByOne

if TYPE_CHECKING:
    from ..kernels.block import DeviceBlock


WITHIN_A_STEP = (
    "`publish` was called by a signal handler within the optimizer's step, where weights are half written: nothing was "
    "done. Set a flag there instead, and publish in the training loop when it is set"
)


class TooLarge(Exception):
    """A capture would need more memory than allowed; nothing was changed."""


class SnapshotLost(PublishFailed):
    """The detector no longer has the weights captured last: the next change must be computed from the bucket."""


@dataclass(frozen=True, slots=True)
class Found:
    """Changes between two captures, in host memory."""

    blocks: list[list[Change]]
    """One list per block of the plan, one change per region of it, empty ones included."""
    shift: StateDigest
    """How the state digest moves."""

    @property
    def count(self) -> int:
        """Number of changed units."""
        return sum(change.count for block in self.blocks for change in block)

    @property
    def elements(self) -> int:
        """Number of changed weights."""
        return sum(change.elements for block in self.blocks for change in block)

    @classmethod
    def of(cls, found: Sequence[list[Change]]) -> Found:
        return cls(list(found), sum(ordered_map(digest_shift, found), StateDigest()))


Take = Callable[[], Later[Found]]
"""Makes what `detect` found the weights captured last. The answer may still be in transit from a device. Where it is
interrupted, the detector's weights are unknown until the next `load`."""


class Detector(Protocol):
    """Holds, in whatever form, the weights captured last. One thread detects; any thread may read them.

    What has a body here is what a detector in host memory does.
    """

    plan: list[Block]
    """What it was bound to, cut into blocks."""
    in_host_memory: bool = True
    """Whether it compares in host memory, with any source."""
    compares_views: bool = True
    """Whether it can compare what is computed from a model in place of its weights."""

    @property
    def counts(self) -> bool:
        """Whether `block` has an answer: weights are counted on a device, for `context`."""
        return False

    def bind(self, source: Source) -> None:
        """Prepare for the tensors of a source. Called once, before anything else."""
        ...

    def suits(self, source: Source) -> bool:
        """Whether it can compare this source; if not, the publisher uses another detector."""
        return True

    def digest_of(self, source: Source) -> StateDigest:
        """The digest of the source's present weights."""
        ...

    def load(self, source: Source) -> StateDigest:
        """Make the source's present weights the ones captured last; returns their digest."""
        ...

    def holding(self, state: State) -> Detector:
        """A detector in host memory that holds a version already; of the same kind, if this one is there."""
        return HostDetector().holding(state)

    def detect(self, source: Source, budget: int) -> Take:
        """Find what differs between the source and the weights captured last, which stay what they are until `Take`.

        Raises TooLarge past so many bytes, or SnapshotLost. When this returns the source may change again, as seen from
        the stream it was called on.
        """
        ...

    def region(self, region: Region) -> Bits:
        """The weights captured last, of a region in one piece. Perhaps a view: not to be written to."""
        ...

    def block(self, regions: Sequence[Region]) -> DeviceBlock | None:
        """A copy of regions of one dtype on the device they are on, for an encoder; None: use `region`."""
        return None

    def later(self, work: Callable[[], Found]) -> Later[Found]:
        """Merge captures: at once, or in a thread of its own where that would block the trainer. Keeps the order."""
        return done(work())

    def writer(self) -> Callable[[Sequence[Change]], None]:
        """A function that writes changes into the copy; the rest of it stays as it was captured last. Only in host
        memory; elsewhere `load` replaces all of it. After another `load` it writes to a copy that is not used."""
        return lambda changes: None

    def close(self) -> None:
        """Stop the thread, if it has one."""
        return


def done(found: Found) -> Later[Found]:
    """A result that is there."""
    later = Later[Found]()
    later.succeed(found)
    return later


def merge(first: Found, second: Found) -> Found:
    """Return one change with the effect of both. A weight that came back to its old bits is no longer in it."""
    pairs = zip(first.blocks, second.blocks, strict=True)
    both = ordered_map(lambda pair: [compose(a, b) for a, b in zip(*pair, strict=True)], pairs)
    return Found(list(both), first.shift + second.shift)


class HostDetector(Detector):
    """A private copy of the model in host memory; compares any source with it."""

    state: State

    def bind(self, source: Source) -> None:
        if not hasattr(self, "state"):
            self.state = State(source.schema)
        self.plan = blocks(self.state.schema)

    def holding(self, state: State) -> HostDetector:
        detector = type(self)()
        detector.state = state
        detector.bind(state)
        return detector

    def digest_of(self, source: Source) -> StateDigest:
        return full.digest_of(source)

    def load(self, source: Source) -> StateDigest:
        # a new one: threads of a publish that was interrupted may still write to the one before
        state = State(self.state.schema)
        if isinstance(source, OneByOne) and source.tensors:
            # they were copied as they came: a second copy may not fit
            state.tensors = source.tensors
            state.digest = full.digest_of(state)
        else:
            state.load(source)
        self.state = state
        return state.digest

    def _differences(self, source: Source) -> Iterable[tuple[list[Change], StateDigest]]:
        """The changes in each block of the plan, and how the digest moves."""

        def difference(region: Region) -> Change:
            if isinstance(source, OneByOne):
                return source.difference(region, self.state)
            return compare(region, self.state.region(region), source.region(region))

        def one(block: Block) -> tuple[list[Change], StateDigest]:
            changes = list(map(difference, block))
            # here and not in Found.of: the changes are still in the cache
            return changes, digest_shift(changes)

        return ordered_map(one, self.plan, threads_for(source.schema.elements))

    def detect(self, source: Source, budget: int) -> Take:
        changed: list[list[Change]] = []
        total = StateDigest()
        for changes, digest in self._differences(source):
            changed.append(changes)
            total += digest
            budget -= sum(change.nbytes for change in changes)
            if budget < 0:
                raise TooLarge
        found, write = Found(changed, total), self.writer()

        def take() -> Later[Found]:
            for_each(write, changed, threads_for(found.count))
            return done(found)

        return take

    def region(self, region: Region) -> Bits:
        return self.state.region(region)

    def writer(self) -> Callable[[Sequence[Change]], None]:
        state = self.state

        def write(changes: Sequence[Change]) -> None:
            for change in changes:
                change.write(state.bits(change.region.tensor.name))

        return write


def default_detector(source: Source) -> Detector:
    """A snapshot on the device for a model that lies there in one piece, else a copy in host memory."""
    if isinstance(source, ModelView) and source.device() is not None:
        from .device import SnapshotDetector

        return SnapshotDetector()
    return HostDetector()
