"""The interface of live weights for a replica: in host memory, on a GPU, on the ranks of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from ..bucket.fetch import FetchedObject
from ..bucket.run import Run
from ..core.change import Change, compare, digest_shift, regions, whole
from ..core.digest import StateDigest
from ..core.errors import DigestMismatch
from ..core.full import Source, digest_of
from ..core.schema import Schema
from ..core.sparse import DeltaClaim, DeltaFile, open_delta


@dataclass(frozen=True, slots=True)
class Delta:
    """A fetched delta, which its target opens."""

    schema: Schema
    """Of the run."""
    claim: DeltaClaim
    """What its manifest says it is."""
    files: Sequence[FetchedObject]

    def open(self) -> list[DeltaFile]:
        """Open its files and check that they are what the manifest says."""
        return [open_delta(data.read, data.size, self.schema, self.claim) for data in self.files]


@dataclass(frozen=True, slots=True)
class Update:
    """A version to be applied to live weights, as `Target.stage` gets it.

    A target that is a `Source` of the present weights calls:

        changes = update.changes(self)
    """

    version: int
    digest: StateDigest
    """Digest that the weights will have."""
    base: StateDigest
    """Digest that the weights have now, as far as the replica knows."""
    content: Delta | Source
    """A delta to be applied to the present weights, or full weights. `changes` reads both."""
    final: bool = True
    """Whether this is the version that was asked for, and not one on the way to it."""
    run: str = ""
    """Address of the run, for a target that has parts on other hosts: they fetch the content themselves."""

    def changes(self, present: Source) -> list[Change]:
        """Return what turns the present weights into the version, checked, and change nothing.

        Raises DigestMismatch where the content, or the weights it meets, do not lead to the version. Each weight that
        differs takes up to twelve bytes: where full weights may be too many, read them from `content` instead.
        """
        if isinstance(self.content, Delta):
            tensors = self.content.schema.by_name()
            files = self.content.open()
            found = [
                change
                for file in files
                for block in file.changes(lambda name: present.region(whole(tensors[name])))
                for change in block
            ]
        else:
            new = self.content
            self.require(digest_of(new))
            parts = (region for tensor in new.schema.tensors for region in regions(tensor))
            found = [compare(region, present.region(region), new.region(region)) for region in parts]
        self.require(self.base + digest_shift(found))
        return found

    def require(self, found: StateDigest) -> None:
        """Raise DigestMismatch where the content does not lead to the version. For `stage`: nothing was changed."""
        if found != self.digest:
            raise DigestMismatch(
                self.version, str(self.digest), str(found), "what was fetched does not lead there; nothing was changed"
            )


@dataclass(slots=True, kw_only=True)
class Staged:
    """An update that is checked, decoded and ready to be written.

    Targets add what they write:

        @dataclass(kw_only=True)
        class Patch(dw.Staged):
            changes: list[dw.Change]
    """

    update: Update
    undoable: bool = True
    """Whether a failed swap restores the previous weights. Full weights may be too many to keep the old ones beside."""
    served: bool = True
    """Whether clients get this version after the swap. A target may keep one that is not `final` to itself."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by phase; `swap` adds its own."""


def write_or_undo(
    write: Callable[[], None], prove: Callable[[], None] | None, undo: Callable[[], None] | None
) -> dict[str, float]:
    """Write what is staged, and prove it; on any error, put the old bits back. Returns the seconds of both."""
    clock = time.perf_counter()
    try:
        write()
        written = time.perf_counter()
        if prove is None:
            return {"apply": written - clock}
        prove()
        return {"apply": written - clock, "prove": time.perf_counter() - written}
    except BaseException:
        if undo is not None:
            undo()
        raise


S = TypeVar("S", bound=Staged)


@runtime_checkable
class Target(Protocol[S]):
    """Live weights that a replica keeps up to date. Called by one thread at a time.

    Pass a target to a Replica in place of a model, for weights in another process or in another layout:

        @dataclass(kw_only=True)
        class Patch(dw.Staged):
            changes: list[dw.Change]

        class Target:
            takes_deltas = True

            def __init__(self, weights):                    # name → array
                self.weights = weights

            def bind(self, run):
                self.schema = run.schema
                return False                                # the arrays never move

            def region(self, region):                       # makes it a `Source`: the bits of a part of a tensor
                return region.cut(self.bits(region.tensor))

            def bits(self, tensor):
                return self.weights[tensor.name].reshape(-1).view(f"u{tensor.unit_size}")

            def digest(self):
                return dw.digest_of(self)

            def stage(self, update):                        # while the weights are in use
                return Patch(update=update, changes=update.changes(self))

            def swap(self, staged):                         # within the pause
                try:
                    for change in staged.changes:
                        change.write(self.bits(change.region.tensor))
                    if self.digest() != staged.update.digest:
                        raise RuntimeError("not written as it should be")
                except BaseException:
                    for change in staged.changes:
                        change.undo(self.bits(change.region.tensor))
                    raise

        dw.Replica("s3://runs/wordle").sync(Target(weights))

    docs/tutorials/extending.md has a complete one.
    """

    @property
    def takes_deltas(self) -> bool:
        """Whether deltas can be staged. Where they cannot, every version comes as full weights."""
        ...

    def bind(self, run: Run) -> bool:
        """Locate the weights of `run.schema`; called before every sync. True if they may be others than at the last
        call.

        Raises SchemaMismatch where the model is not the run's.
        """
        ...

    def digest(self) -> StateDigest:
        """Digest of the live weights, recomputed."""
        ...

    def stage(self, update: Update) -> S:
        """Decode next to whatever uses the weights. Changes nothing; every error in the data ends here."""
        ...

    def swap(self, staged: S) -> None:
        """Write and prove. On a failure the previous weights are restored before the exception leaves, where `staged`
        is undoable; NotRestored says that they could not be."""
        ...


AnyTarget = Target[Any]
