"""The interface of live weights for a replica: in host memory, on a GPU, on the ranks of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from ..bucket.fetch import FetchedObject
from ..core.digest import StateDigest
from ..core.errors import DigestMismatch
from ..core.full import Source
from ..core.schema import Schema
from ..core.sparse import DeltaClaim


@dataclass(frozen=True, slots=True)
class Delta:
    """A fetched delta. The target that decodes it opens its files, by `sparse.open_delta`."""

    claim: DeltaClaim
    """What its manifest says it is."""
    files: Sequence[FetchedObject]


@dataclass(frozen=True, slots=True)
class Update:
    """A version to be applied to live weights."""

    version: int
    digest: StateDigest
    """Digest that the weights will have."""
    base: StateDigest
    """Digest that the weights have now, as far as the replica knows."""
    content: Delta | Source
    """A delta to be applied to the present weights, or full weights."""
    final: bool = True
    """Whether this is the version that was asked for, and not one on the way to it."""
    run: str = ""
    """Address of the run, for a target that has parts on other hosts: they fetch the content themselves."""

    def require(self, found: StateDigest) -> None:
        """Raise DigestMismatch where the content does not lead to the version. For `stage`: nothing was changed."""
        if found != self.digest:
            raise DigestMismatch(
                self.version, str(self.digest), str(found), "what was fetched does not lead there; nothing was changed"
            )


@dataclass(slots=True, kw_only=True)
class Staged:
    """An update that is checked, decoded and ready to be written. Targets add what they write."""

    update: Update
    undoable: bool = True
    """Whether a failed swap restores the previous weights. Full weights may be too many to keep the old ones beside."""
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
    """Live weights that a replica keeps up to date. Called by one thread at a time."""

    @property
    def takes_deltas(self) -> bool:
        """Whether deltas can be staged. Where they cannot, every version comes as full weights."""
        ...

    def bind(self, schema: Schema) -> bool:
        """Locate the weights; called before every sync. True if they may be others than at the last call.

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
