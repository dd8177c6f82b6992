"""Walk the chain of a run: plan the cheapest way to a version, prefetch its objects, plan again around a bad link.

For live weights (`replica/`), private copies (`replay.py`) and `verify` alike.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

import msgspec

from ..core import added, chain, full, history
from ..core.chain import Step
from ..core.container import Read
from ..core.digest import StateDigest
from ..core.errors import (
    DAMAGE,
    DeltawireError,
    ForeignObject,
    ManifestError,
    MissingBase,
    ReferenceUnavailable,
    StoreUnavailable,
)
from ..core.held import Held, Part
from ..core.manifest import Blob, Link, Manifest, Summary
from ..core.parallel import Later, Workers, ordered_map
from ..core.schema import Schema
from ..core.sparse import DeltaClaim, DeltaFile, open_delta
from .cache import shared_cache
from .fetch import CONNECTIONS, FetchedObject, Progress, fetch
from .parts import fetch_parts
from .references import Resolve, reference_source
from .run import Run

log = logging.getLogger("deltawire")

FEW = 2
"""Steps of a path that is not worth a request for a shorter one; bad links added later after which none is used."""

TRIES = 2
"""Attempts before an object that the store fails to give counts as lost, and before a version that cannot be reached is
skipped; objects that the store fails to give before a checkout fails."""

PREFETCH_BYTES = 128 << 20
"""Objects that may wait in memory or on disk, beside the one in use."""


class Walker:
    """Plans ways through a run and keeps the links not to use.

    Make a new one for each attempt: what was bad the last time may have been a bad transfer, or repaired since.

    known   all versions that plans may use; by default as few as a plan needs are asked of the run
    """

    def __init__(self, run: Run, known: Mapping[int, Summary] | None = None) -> None:
        self._run, self._known = run, known
        self._bad: set[tuple[int, str, int | None]] = set()
        self._renewed: set[int] = set()
        self._failure: DeltawireError | None = None
        self._unavailable: StoreUnavailable | None = None
        """The last one for which a link was rejected."""
        self._must_plan = False
        self._bad_added = 0
        """Number of links that were added later and could not be used."""

    def walk(
        self,
        have: Callable[[], int | None],
        want: int,
        *,
        begin: Callable[[list[Step]], bool] = lambda steps: True,
        progress: Progress | None = None,
        held: Callable[[], Held | None] = lambda: None,
    ) -> Iterator[tuple[Step, Later[FetchedLink]]]:
        """Yield the steps to `want` with their objects, until `have()` is `want`.

        The caller applies a link before it asks for the next one, and calls `reject` or `plan_again` where that fails.
        `begin` is called with each plan before anything is fetched; if it returns False, another plan is made. `held`
        is called then: what the caller holds, for `fetch_link`.

        When no way is left, raises the StoreUnavailable for which a link was rejected, since there may be a way later;
        else the last failure, or MissingBase where nothing failed. After chain.MAX_PLANS plans the same.
        """
        for _ in range(chain.MAX_PLANS):
            if have() == want:
                return
            try:
                steps = self.plan(have(), want)
            except MissingBase:
                if (failure := self._why()) is not None:
                    raise failure from None
                raise MissingBase(f"no path leads from version {have()} to {want} in {self._run.store.url}") from None
            if begin(steps):
                self._must_plan = False
                for item in prefetch(self._run, steps, progress, held=held()):
                    yield item
                    if self._must_plan:
                        break
        if have() != want:
            if isinstance(failure := self._why(), StoreUnavailable):
                raise failure
            raise MissingBase(
                f"{chain.MAX_PLANS} ways to version {want} in {self._run.store.url} cannot be used; the last: {failure}"
            ) from failure

    def _why(self) -> DeltawireError | None:
        # a reference that is elsewhere can be named, whatever else is missing
        return self._failure if isinstance(self._failure, ReferenceUnavailable) else self._unavailable or self._failure

    def reject(self, step: Step, error: DeltawireError) -> None:
        """Plan again without this link, or with it where its manifest has been replaced meanwhile."""
        log.warning("cannot use the %s to version %d of %s: %s", step.kind, step.version, self._run.store.url, error)
        if isinstance(error, StoreUnavailable):
            self._unavailable = error
        if not self.renew(step):
            self.leave_out([step])
            self._bad_added += self._run.added.find(step.version, step.kind, step.base) is not None
        self.plan_again(error)

    def plan_again(self, error: DeltawireError) -> None:
        """Plan again from what `have()` says now; the link is sound."""
        self._failure, self._must_plan = error, True

    def plan(self, have: int | None, want: int) -> list[Step]:
        """Plan the cheapest way.

        Reads as little as it needs: the manifest's own history; then the links that were added later, and history back
        to `have`, or to the newest anchor; else farther and farther back until there is a way, to its beginning.
        """
        if self._known is not None:
            return chain.plan(have, want, self._usable(self._known))
        run, manifest = self._run, self._run.manifest(want)
        near = {s.version: s for s in (*manifest.recent, manifest.summary())}
        if have in near or (have is not None and manifest.parent == have):
            with suppress(MissingBase):
                steps = chain.plan(have, want, self._usable(near))
                if len(steps) > FEW and have is not None:
                    steps = chain.plan(have, want, self._usable(self._with_added(near, have, want)))
                return steps
        since = have if have is not None and have < want else None
        if since is None and (index := run.added.index()) is not None and index.anchor is not None:
            since = index.anchor.version if index.anchor.version <= want else None
        if since is not None:
            with suppress(MissingBase):
                # from the version before, so that the links to the first one are there
                found = self._with_added(run.timeline(want, since), since - 1, want)
                return chain.plan(have, want, self._usable(found))
        for since in history.reaches(want):
            versions = run.timeline(want, since)
            with suppress(MissingBase):
                return chain.plan(have, want, self._usable(self._with_added(versions, since - 1, want)))
        return chain.plan(have, want, self._usable(added.in_summaries(versions, run.added.listed())))

    def _with_added(self, versions: Mapping[int, Summary], first: int, last: int) -> Mapping[int, Summary]:
        """Add the links that were added to these versions later; not after several of them were bad."""
        return (
            versions if self._bad_added >= FEW else added.in_summaries(versions, self._run.added.between(first, last))
        )

    def leave_out(self, steps: Iterable[Step]) -> None:
        """Plan without these links from now on."""
        self._bad |= {(step.version, step.kind, step.base) for step in steps}

    def leave_out_references(self) -> None:
        """Plan without checkpoints outside the run. For a walker that knows all versions."""
        self._bad |= {(v, "reference", link.base) for v, s in (self._known or {}).items() for link in s.links}

    def renew(self, step: Step) -> bool:
        """Read the manifests of a step again. True if they have been replaced, once per version.

        Where a store cannot create exclusively, that may be why the step does not fit.
        """
        replaced = {v for v in (step.version, step.base) if v is not None and self._is_replaced(v)} - self._renewed
        self._renewed |= replaced
        return bool(replaced)

    def _is_replaced(self, version: int) -> bool:
        """Read a manifest again; whether it has changed, or cannot be read any more."""
        before = self._run.forget(version)
        try:
            return before is not None and self._run.manifest(version) != before
        except DAMAGE:
            return True

    def _usable(self, versions: Mapping[int, Summary]) -> Mapping[int, Summary]:
        """Return the summaries without the links that are left out."""
        if not self._bad:
            return versions
        return {
            v: msgspec.structs.replace(s, links=tuple(x for x in s.links if (v, x.kind, x.base) not in self._bad))
            for v, s in versions.items()
        }


@dataclass(frozen=True, slots=True)
class Delta:
    """A fetched delta, not opened yet."""

    schema: Schema
    """Of the run."""
    claim: DeltaClaim
    """What its manifest says it is."""
    files: Sequence[FetchedObject]

    def open(self) -> list[DeltaFile]:
        """Open its files and check that they are what the manifest says."""
        return [open_delta(data.read, data.size, self.schema, self.claim) for data in self.files]


@dataclass(frozen=True, slots=True)
class FetchedLink:
    """A link of a version with its objects, or what was needed of them, whose hashes have been checked."""

    run: Run
    manifest: Manifest
    link: Link
    objects: list[FetchedObject]
    """One per object of the link."""

    @property
    def bytes(self) -> int:
        """Bytes that were fetched; of a reference, those of the weights."""
        return self.link.nbytes + sum(data.fetched for data in self.objects)

    def delta(self, present: StateDigest | None = None) -> Delta:
        """The objects as a delta, not opened yet. `present` is the digest of what it is to be applied to."""
        manifest, digest = self.manifest, StateDigest.parse(self.manifest.digest)
        claim = DeltaClaim(self.run.info.run, self.link.base, manifest.version, digest, present)
        return Delta(self.run.schema, claim, self.objects)

    def weights(self, resolve: Resolve) -> full.Source:
        """The full weights of an anchor or a reference."""
        if self.link.kind == "reference":
            return reference_source(self.run, self.link, resolve)
        files = [full.FullFile(data.read, data.size) for data in self.objects]
        for file in files:
            run, version = file.metadata.get("run"), file.metadata.get("model_version")
            if (run, version) != (self.run.info.run, str(self.manifest.version)):
                raise ForeignObject(
                    f"an anchor of version {self.manifest.version} says it is run {str(run)[:32]}, "
                    f"version {str(version)[:32]}"
                )
        return full.Anchor(files, self.run.schema)

    def close(self) -> None:
        for item in self.objects:
            item.close()


def prefetch(
    run: Run, steps: Sequence[Step], progress: Progress | None = None, *, shared: bool = True, held: Held | None = None
) -> Iterator[tuple[Step, Later[FetchedLink]]]:
    """Yield the steps of a plan in order, and fetch the objects of the next ones meanwhile.

    The result raises what went wrong with the step's manifest or objects. A link is closed when the next is asked for.
    `shared` and `held` as in `fetch_link`.
    """
    waiting: deque[tuple[int, Later[FetchedLink]]] = deque()
    todo = deque(range(len(steps)))
    workers = Workers(CONNECTIONS, "deltawire-prefetch")
    fetched: dict[int, FetchedLink] = {}
    """Links to be closed, by the thread that takes them out of here."""
    done: set[int] = set()

    def fetch_ahead(number: int) -> FetchedLink:
        step = steps[number]
        manifest = run.manifest(step.version)
        link = run.link(manifest, step.kind, step.base)
        if link.bytes != step.bytes:
            # how much is prefetched was decided by what history says
            raise ManifestError(
                f"history says that the {step.kind} to version {step.version} has {step.bytes:,} bytes, its manifest "
                f"says {link.bytes:,}"
            )
        fetched[number] = found = fetch_link(run, manifest, link, progress, shared=shared, held=held)
        if number in done or workers.closed:
            close(number)
        return found

    def close(number: int) -> None:
        if (link := fetched.pop(number, None)) is not None:
            link.close()

    try:
        while todo or waiting:
            while todo and (not waiting or sum(steps[n].bytes for n in [*dict(waiting), todo[0]]) <= PREFETCH_BYTES):
                number = todo.popleft()
                waiting.append((number, workers.submit(partial(fetch_ahead, number))))
            number, pending = waiting[0]
            yield steps[number], pending
            waiting.popleft()
            done.add(number)
            close(number)
    finally:
        # no waiting: this may run in the garbage collector, in a thread that holds a lock the workers need
        workers.close(wait=False)
        for number in [*fetched]:
            close(number)


def fetch_link(
    run: Run,
    manifest: Manifest,
    link: Link,
    progress: Progress | None = None,
    *,
    shared: bool = True,
    held: Held | None = None,
) -> FetchedLink:
    """Fetch all objects of a link and check their hashes.

    shared   as in `fetch`
    held     what the reader holds of the model: parts of objects that change nothing of it are not fetched, unless the
             processes of this host share a cache, which has whole objects
    """
    # one object, or the small ones of many writers
    count = len(link.objects)
    in_parts = held is not None and not (shared and shared_cache(run.store))

    def needed(read: Read, size: int) -> list[Part] | None:
        assert held is not None
        if link.kind == "delta":
            return DeltaFile(read, size, run.schema).needed(held)
        return full.needed(full.FullFile(read, size), run.schema, held)

    with ExitStack() as opened:

        def one(blob: Blob) -> FetchedObject:
            if in_parts and (some := fetch_parts(run.store, blob, needed, progress, open_objects=count)) is not None:
                return opened.enter_context(some)
            return opened.enter_context(fetch(run.store, blob, progress, shared=shared, open_objects=count))

        found = FetchedLink(run, manifest, link, list(ordered_map(one, link.objects, min(count, CONNECTIONS))))
        # all are there; else also those are closed that other threads had opened when one failed
        opened.pop_all()
    return found
