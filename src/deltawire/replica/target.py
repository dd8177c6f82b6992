"""The interface of live weights for a replica: in host memory, on a GPU, on the ranks of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from ..bucket.run import Run
from ..bucket.walk import Delta
from ..core.change import Change, Region, RegionMoves, compare, digest_shift, pieces, regions, whole
from ..core.codecs import context
from ..core.digest import StateDigest
from ..core.errors import DigestMismatch
from ..core.full import Source, digest_of
from ..core.held import Held
from .shard import cut, cut_moves

UNCHANGED = "what was fetched does not lead there; nothing was changed"
"""End of the message of a DigestMismatch in `stage`."""


@dataclass(frozen=True, slots=True)
class Update:
    """A version to be applied to live weights, as `Target.stage` gets it.

        changes = update.changes(self)          # of a target that is a `Source` of the present weights

    version   its number
    digest    the digest that the weights will have
    before    the digest that the weights have now, as far as the replica knows
    content   full weights, which are a `Source`, or a delta, which only `changes` reads
    final     whether this is the version that was asked for, and not one on the way to it
    url       address of the run, for a target that has parts on other hosts: they fetch the content themselves
    """

    version: int
    digest: StateDigest
    before: StateDigest
    content: Delta | Source
    final: bool = True
    url: str = ""

    def changes(self, present: Source, held: Sequence[Region] | None = None) -> list[Change]:
        """Return what turns the present weights into the version, checked, and change nothing.

        Raises DigestMismatch where the content, or the weights it meets, do not lead to the version. Each weight that
        differs takes up to twelve bytes. Where full weights may be too many, read them from `content` instead:

            if isinstance(update.content, dw.Source):
                update.require(dw.digest_of(update.content))
                part = update.content.region(region)

        held   the regions that are here, none twice, where others hold the rest (`PartTarget`). Nothing else is read,
               and what the changes lead to is not compared: that takes those of all parts. A delta in `context` needs
               the present weights of whole tiles: unless whole tensors are held, `present` is asked for a little more
        """
        if held is not None:
            return self._changes_within(present, held)
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
            self.require(digest_of(new), UNCHANGED)
            parts = (region for tensor in new.schema.tensors for region in regions(tensor))
            found = [compare(region, present.region(region), new.region(region)) for region in parts]
        self.require(self.before + digest_shift(found), UNCHANGED)
        return found

    def _changes_within(self, present: Source, held: Sequence[Region]) -> list[Change]:
        here, found = Held(held), list[Change]()
        if isinstance(self.content, Delta):
            for file in self.content.open():
                for block in file.each(file.read, held=here):
                    found += _changes_of(block, present, here)
        else:
            for part in (part for region in held for part in pieces(region)):
                found.append(compare(part, present.region(part), self.content.region(part)))
        return [change for change in found if change.count]

    def require(self, found: StateDigest, hint: str = "") -> None:
        """Raise DigestMismatch where this is not the digest of the version. `hint` ends the message.

        update.require(self.digest())           # in `swap`, of what was written
        """
        if found != self.digest:
            raise DigestMismatch(self.version, str(self.digest), str(found), hint)


def _changes_of(block: list[RegionMoves] | context.TiledBlock, present: Source, held: Held) -> Iterator[Change]:
    """What a block changes of what is held."""
    if not isinstance(block, context.TiledBlock):
        for moves in block:
            for part in held.common(moves.region):
                own = cut_moves(moves, part)
                yield own.from_old(present.region(part)[own.positions])
        return
    for number, (region, _) in enumerate(block.regions):
        for part in held.common(region):
            spans = block.around(number, *part.within(region))
            around = region.part(*spans)
            old = present.region(around).reshape(around.rows, around.columns)
            positions, was, now = block.shard(number, *spans, old)
            yield Change(part, *cut(around, part, positions, was, now))


@dataclass(slots=True, kw_only=True)
class Staged:
    """An update that is checked, decoded and ready to be written.

    Targets add what they write:

        @dataclass(kw_only=True)
        class Patch(dw.Staged):
            changes: list[dw.Change]

    update    what `stage` got
    undoable  whether a failed swap restores the previous weights; full weights may be too many to keep the old ones
    served    whether clients get this version after the swap; a target may keep one that is not `final` to itself
    timings   seconds by phase: "decode" and "stage" by `stage`, "apply" and "prove" by `swap`; a replica sums them up
    """

    update: Update
    undoable: bool = True
    served: bool = True
    timings: dict[str, float] = field(default_factory=dict)


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
                    staged.update.require(self.digest())
                except BaseException:
                    for change in staged.changes:
                        change.undo(self.bits(change.region.tensor))
                    raise

        dw.Replica("s3://runs/wordle").sync(Target(weights))

    docs/tutorials/extending.md has a complete one.

    The author is responsible for the proof: a replica believes a `swap` that returns, and does not read the weights
    again. After a DigestMismatch or another error of the data (ChainError, FormatError, SchemaError, ObjectNotFound)
    a sync goes around the link that was applied. Any other `DeltawireError` ends the sync, and `Replica.follow` tries
    again; VersionRefused says that this version needs no second attempt. Any other exception is a mistake in the
    target, and ends `follow` too.
    """

    @property
    def takes_deltas(self) -> bool:
        """Whether deltas can be staged. Where they cannot, every version comes as full weights."""
        ...

    def bind(self, run: Run) -> bool:
        """Locate the weights of `run.schema`; called before every sync. Raises SchemaMismatch for another model's.

        Returns True where the weights may have lost their version since the last call: they lie in other memory, or
        something else wrote to them. Their digest is then computed again.
        """
        ...

    def digest(self) -> StateDigest:
        """Compute the digest of the live weights from their bits, not from what was written."""
        ...

    def stage(self, update: Update) -> S:
        """Decode next to whatever uses the weights. Changes nothing; every error in the data ends here."""
        ...

    def swap(self, staged: S) -> None:
        """Write, then compute the digest of the live weights and compare it: `staged.update.require(self.digest())`.

        On a failure of an undoable update, restore the previous weights, then raise. Raises NotRestored if they could
        not be restored.
        """
        ...


@runtime_checkable
class PartTarget(Protocol):
    """A `Target` of which this process has a part, and others the rest: ranks of an engine on several nodes.

    A `Target` that has this method too gets no more of a version than changes its part. Digests are those of whole
    versions all the same: its `digest` and `stage` add up what all parts have, so that all of them prove a version
    together, or none does. A part alone proves nothing but that its bytes are those that were published.

        changes = update.changes(self, self.holds())
        shift = add_up([change.digest() for change in changes])         # of all parts, by means of the target's own
        update.require(update.before + shift)

    All processes must be at the same call for that: where one fails, it has to tell the others, and each raises.
    """

    def holds(self) -> Sequence[Region] | None:
        """The regions that are here; None if the next versions are needed whole. Called before each fetch.

        return [region for region in mine if region.tensor.name in self.weights]
        """
        ...


AnyTarget = Target[Any]
