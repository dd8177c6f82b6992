"""The rollout side: follow a run and keep a model's live weights at a version that can be named and proven."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ..bucket.ahead import Parcel, arrivals
from ..bucket.fetch import Progress
from ..bucket.replay import Resolve, State, as_anchor, find_reference, reference_source, take
from ..bucket.run import Run
from ..core import chain, full, keys
from ..core.digest import StateDigest
from ..core.errors import (
    ChainError,
    DeltawireError,
    DigestMismatch,
    FormatError,
    ManifestError,
    MissingBase,
    ObjectNotFound,
    RunNotFound,
    SchemaError,
    StoreError,
)
from ..core.manifest import Head, Heartbeat, Manifest, Summary, dump, now, parse
from ..store import Store, open_store
from .target import Target
from .transaction import apply, stage

log = logging.getLogger("deltawire")

PROBE_EVERY = 16
"""Idle polls between looks past head, in case its writer died between the manifest and head."""

_BAD_LINK = (FormatError, SchemaError, ChainError, ObjectNotFound)
"""What makes a replica try another way to the same version."""


class Replica:
    """Follows a run. One per set of live weights.

    prove       recompute the digest of all live weights after every apply (default). Without it the digest is still
                checked before the write, from the delta and the weights it meets.
    heartbeat   seconds between heartbeat objects in the bucket; 0 writes none
    reference   the folder of the checkpoint that version 0 refers to, when the run's own name for it does not work here
    """

    def __init__(
        self,
        run: str | Path | Store,
        *,
        id: str | None = None,
        prove: bool = True,
        heartbeat: float = 10.0,
        reference: str | Path | None = None,
        strict: bool = True,
    ) -> None:
        self.id = id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        keys.replica(self.id)
        self.version: int | None = None
        # the version whose digest the weights matched
        self.newest: int | None = None
        self.timings: dict[str, float] = {}
        # seconds of the last sync, by phase
        self._store = open_store(str(run) if isinstance(run, Path) else run)
        self._run: Run | None = None
        self._prove = prove
        self._strict = strict
        self._resolve: Resolve = (lambda _: Path(reference)) if reference is not None else find_reference
        self._target: Target | None = None
        self._digest = StateDigest()
        self._bad: set[tuple[int, str, int | None]] = set()
        self._strayed = False
        # these weights were found changed by somebody else in this sync
        self._heartbeat = heartbeat
        self._beat_at = 0.0
        self._head_etag: str | None = None

    # ── what a rollout server calls ──────────────────────────────────────────────────────────────────────────────────

    def sync(self, model: Any, version: int | None = None, *, progress: Progress | None = None) -> int:
        """Bring the model's weights to a version (the newest by default), verified; returns the version reached.

        On failure the weights are those of `self.version`, as before; None means that they have no name.
        """
        run = self._open()
        want = run.newest() if version is None else version
        if want is None:
            raise RunNotFound(f"the run at {self._store.url} has no version yet")
        self.newest = want if version is None else max(want, self.newest or 0)
        target = self._bind(model, run, want)
        self.timings = {}
        try:
            self._reach(run, target, want, progress)
        except DeltawireError as error:
            self._beat(error=str(error), force=True)
            raise
        self._beat(force=True)
        return want

    def follow(
        self, model: Any, *, poll: float = 1.0, every: bool = False, stop: threading.Event | None = None
    ) -> Iterator[int]:
        """Yield each version reached, for ever or until `stop` is set. Trouble is logged, noted in the heartbeat and
        outlived: the model keeps the version it has. With `every`, no version is skipped over."""
        stop = stop or threading.Event()
        idle = 0
        while not stop.is_set():
            try:
                want = self._next(model, every, probe=idle % PROBE_EVERY == 0)
                if want is not None:
                    self.sync(model, want)
                    idle = 0
                    yield want
                    continue
                self._beat()
            except RunNotFound:
                log.info("waiting for a run at %s", self._store.url)
            except DeltawireError as error:
                if isinstance(error, SchemaError) and (self._target is None or self._target.model is not model):
                    raise  # another model: no later version will fit either
                log.warning("%s stays at version %s: %s", self.id, self.version, error)
                # look again: what was away may be there now
                self._head_etag = None
                self._beat(error=str(error))
            idle += 1
            stop.wait(poll)

    @property
    def lag(self) -> int | None:
        """Versions behind the newest this replica knows of."""
        if self.newest is None:
            return None
        return self.newest - (self.version if self.version is not None else -1)

    # ── finding the way ──────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self) -> Run:
        if self._run is None:
            self._run = Run.open(self._store)
        return self._run

    def _next(self, model: Any, every: bool, probe: bool) -> int | None:
        """The version to go to now, or None. One conditional request when nothing happened."""
        run = self._open()
        if self.version is None or self.newest is None:
            newest = run.newest()
            if newest is None:
                return None
            self.newest = newest
            self._bind(model, run, newest)
            # with `every` go on from the version the model came with, which is said once, like any other
            return self.version if every and self.version is not None else newest
        newest = self._poll_head(run)
        if probe and run.exists(newest + 1):
            newest = run.newest() or newest
        self.newest = max(newest, self.newest)
        if self.newest <= self.version:
            return None
        return self._after(run, self.version) if every else self.newest

    def _after(self, run: Run, version: int) -> int:
        """The next version there is: those between may have been pruned."""
        if run.exists(version + 1):
            return version + 1
        return min(run.timeline(self.newest or 0, since=version + 1))

    def _poll_head(self, run: Run) -> int:
        known = self.newest or 0
        try:
            got = self._store.get_if_changed(keys.HEAD, self._head_etag)
        except ObjectNotFound:
            return known
        if got is None:
            return known
        self._head_etag = got.etag
        try:
            head = parse(got.data, Head, keys.HEAD)
        except ManifestError:
            return known
        if head.run != run.info.run or head.version <= known:
            return known
        if run.exists(head.version):
            return head.version
        # it points at nothing: perhaps at what is not visible yet, so look again
        self._head_etag = None
        return known

    def _bind(self, model: Any, run: Run, want: int) -> Target:
        """Find out which version the model's weights are, if any."""
        if self._target is None or self._target.model is not model:
            self._target, self.version = Target(model, run.schema, strict=self._strict), None
        if self.version is None:
            self._digest = self._target.digest()
            self.version = self._name(run, want)
        return self._target

    def _name(self, run: Run, want: int) -> int | None:
        """The version that has the digest of these weights."""
        found = str(self._digest)
        for version, summary in reversed(run.timeline(want).items()):
            # a summary is hearsay, the manifest counts
            if summary.digest == found and run.manifest(version).digest == found:
                log.info("%s: these weights are version %d already", self.id, version)
                return version
        return None

    def _reach(self, run: Run, target: Target, want: int, progress: Progress | None) -> None:
        """Walk the cheapest path; where a link is bad, note it and plan again around it."""
        failure: DeltawireError | None = None
        # what was bad the last time may have been a bad transfer, or repaired since
        self._bad.clear()
        self._strayed = False
        while self.version != want:
            try:
                steps = self._plan(run, want)
            except MissingBase:
                raise failure or MissingBase(
                    f"no path leads from version {self.version} to {want} in {self._store.url}"
                ) from failure
            failure = self._walk(run, target, steps, progress) or failure

    def _walk(
        self, run: Run, target: Target, steps: list[chain.Step], progress: Progress | None
    ) -> DeltawireError | None:
        """Go as far as the steps are good; returns what was wrong with the one that was not."""
        # a way that leads back first is gone on a copy: weights that are served never fall behind what they are
        leads_back = self.version is not None and steps[0].version < self.version and len(steps) > 1
        copy = State(run.schema) if leads_back else None
        for arrival in arrivals(run, steps, progress):
            step = arrival.step
            try:
                clock = time.perf_counter()
                parcel = arrival.parcel()
                self._note({"fetch": time.perf_counter() - clock})
                if copy is None:
                    self._take(run, target, parcel)
                else:
                    take(run, copy, parcel, self._resolve)
            except _BAD_LINK as error:
                if copy is None and isinstance(error, DigestMismatch) and self._has_strayed(target):
                    return error
                log.warning("%s: cannot use the %s to version %d: %s", self.id, step.kind, step.version, error)
                self._bad.add((step.version, step.kind, step.base))
                return error
        if copy is not None:
            manifest = run.manifest(steps[-1].version)
            self._load(target, manifest, copy)
            self.version = manifest.version
        return None

    def _has_strayed(self, target: Target) -> bool:
        """Whether somebody else changed the weights: then no delta is to blame, and only full weights help."""
        found = target.digest()
        if self._strayed or self.version is None or found == self._digest:
            return False
        log.warning("%s: these weights are no longer version %d: somebody changed them", self.id, self.version)
        self._strayed, self.version, self._digest = True, None, found
        return True

    def _plan(self, run: Run, want: int) -> list[chain.Step]:
        """Ask for as little history as the plan needs: the manifest's own, then back to here, then all of it."""
        manifest = run.manifest(want)
        near = {s.version: s for s in (*manifest.recent, manifest.summary())}
        if self.version in near or (self.version is not None and manifest.parent == self.version):
            try:
                return chain.plan(self.version, want, self._usable(near))
            except MissingBase:
                pass
        if self.version is not None and self.version < want:
            try:
                return chain.plan(self.version, want, self._usable(run.timeline(want, since=self.version)))
            except MissingBase:
                pass
        return chain.plan(self.version, want, self._usable(run.timeline(want)))

    def _usable(self, versions: dict[int, Summary]) -> dict[int, Summary]:
        """Summaries without the links that turned out bad."""
        if not self._bad:
            return versions
        return {
            v: msgspec.structs.replace(s, links=tuple(x for x in s.links if (v, x.kind, x.base) not in self._bad))
            for v, s in versions.items()
        }

    # ── going it ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, run: Run, target: Target, parcel: Parcel) -> None:
        clock = time.perf_counter()
        manifest, link = parcel.manifest, parcel.link
        if link.kind == "delta":
            staged = stage(run, parcel, target, self._digest)
            apply(target, staged, prove=self._prove)
            self._note(staged.timings)
            self._digest = staged.digest
        elif link.kind == "anchor":
            for data in parcel.objects:
                self._load(target, manifest, as_anchor(run, manifest.version, data))
        else:
            self._load(target, manifest, reference_source(run, link, self._resolve))
        self.version = manifest.version
        log.info(
            "%s: v%d  %s  %.1f MB  %.0f ms",
            self.id,
            manifest.version,
            link.kind,
            link.bytes / 1e6,
            (time.perf_counter() - clock) * 1e3,
        )

    def _load(self, target: Target, manifest: Manifest, source: full.Source) -> None:
        """Full weights: proven on disk first, so that nothing is written that might have to be taken back."""
        clock = time.perf_counter()
        found = full.digest_of(source)
        if str(found) != manifest.digest:
            raise DigestMismatch(manifest.version, manifest.digest, str(found), "nothing was changed")
        self._note({"decode": time.perf_counter() - clock})
        clock = time.perf_counter()
        # between the first and the last tensor the weights have no name
        self.version = None
        target.load(source)
        self._digest = target.digest() if self._prove else found
        if self._digest != found:
            raise DigestMismatch(manifest.version, str(found), str(self._digest), "call sync() again")
        self._note({"apply": time.perf_counter() - clock})

    def _note(self, timings: dict[str, float]) -> None:
        for phase, seconds in timings.items():
            self.timings[phase] = self.timings.get(phase, 0.0) + seconds

    def _beat(self, *, error: str = "", force: bool = False) -> None:
        """Say how we are. Never an error of its own: a replica works without being seen."""
        if not self._heartbeat or self._run is None or (not force and now() - self._beat_at < self._heartbeat):
            return
        self._beat_at = now()
        timings = {name: round(seconds, 6) for name, seconds in self.timings.items()}
        beat = Heartbeat(
            self._run.info.run, self.id, self.version, self.newest, not error, self._beat_at, error[:500], timings
        )
        try:
            self._store.put(keys.replica(self.id), dump(beat))
        except StoreError as trouble:
            log.debug("no heartbeat: %s", trouble)
