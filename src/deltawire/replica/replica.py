"""The rollout side: follow a run and keep a model's live weights at a version that can be named and proven."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..bucket.ahead import Parcel, arrivals
from ..bucket.cache import Cache
from ..bucket.fetch import Progress
from ..bucket.replay import State, as_anchor, reference_source, resolver, take
from ..bucket.run import Run
from ..bucket.versions import address_only, resolve
from ..bucket.watch import Watcher, following
from ..core import chain, full, keys
from ..core.digest import StateDigest
from ..core.errors import (
    ChainError,
    DeltawireError,
    DigestMismatch,
    FormatError,
    MissingBase,
    ObjectNotFound,
    PermissionDenied,
    RunNotFound,
    RunReplaced,
    SchemaError,
    StoreError,
    StoreUnavailable,
    VersionNotFound,
)
from ..core.manifest import Heartbeat, Manifest, Summary, dump, now, spans
from ..models import whereabouts
from ..store import Store, open_store
from .target import Target, open_target
from .transaction import apply, stage

log = logging.getLogger("deltawire")

TRIES = 2
"""How often an object that the store fails to give is asked for before another way is looked for, and how often a
follower of every version tries one that cannot be reached before it goes on to the next."""

READING_EVERY = 60.0
"""Seconds, at most, between heartbeats of a replica that reads what prune must leave; `Retention.lease` is longer."""

_BAD_LINK = (FormatError, SchemaError, ChainError, ObjectNotFound)
"""What makes a replica try another way to the same version."""


@dataclass(frozen=True, slots=True)
class Synced:
    """A version that a replica's weights have become, as `on_version` gets it."""

    version: int
    previous: int | None
    """The version before; None where the weights were none."""
    lag: int
    """Versions behind the newest that is known."""
    bytes: int
    """Bytes fetched to get here."""
    changed: int
    """Number of weights that differ between this version and the one published before it."""
    elements: int
    """Number of weights of the model."""
    timings: dict[str, float]
    """Seconds by phase: fetch, verify, decode, stage, apply, prove."""

    @property
    def density(self) -> float:
        """Share of the weights that differ from the version published before, 0 to 1."""
        return self.changed / max(self.elements, 1)

    def report(self) -> dict[str, float]:
        """Figures under the names `deltawire/…`, as `wandb.log` and `log` of a trackio run take them."""
        return {
            "deltawire/version": float(self.version),
            "deltawire/lag": float(self.lag),
            "deltawire/density": self.density,
            "deltawire/bytes": float(self.bytes),
            **{f"deltawire/{name}_ms": 1e3 * seconds for name, seconds in self.timings.items()},
        }


class Replica:
    """Keeps live weights at a version of a run. One per set of live weights, used by one thread at a time.

        with dw.Replica("s3://runs/wordle") as replica:
            replica.sync(model)                        # the newest version, verified
            for version in replica.follow(model):      # and then every new one
                ...

    `model` is a torch module, a state dict or a mapping of writable numpy arrays, with the names and shapes of the run.
    Floats may be wider than the run's: fp32 weights take the values of a bf16 run and are proven on its bits. On any
    error the weights are those of `replica.version`, as before.

    id          name of this replica in heartbeats, as `deltawire log` shows it
    strict      whether weights that the run does not carry are an error (default) or left alone
    on_version  called with a `Synced` after each version that was reached, outside the pause; what it raises is logged
    prove       recompute the digest of all live weights after every apply (default). Without it the digest is still
                checked before the write, from the delta and the weights it meets.
    heartbeat   seconds between heartbeat objects in the bucket; 0 writes none
    reference   the folder of the checkpoint that version 0 refers to, when the run's own name for it does not work here
    max_model_gb  the largest model that the run may declare; DELTAWIRE_MAX_MODEL_GB, or 4000, by default
    pause       entered exactly for as long as live weights are written and proven, so that nobody computes with them;
                `version` names them again when it is left, or is None when they have no name
    target      how live weights are read and written, for engines that keep them in another form than the run's
    """

    def __init__(
        self,
        run: str | Path | Store,
        *,
        id: str | None = None,
        prove: bool = True,
        heartbeat: float = 10.0,
        reference: str | Path | None = None,
        max_model_gb: float | None = None,
        strict: bool = True,
        pause: Callable[[], AbstractContextManager[Any]] = nullcontext,
        target: Callable[..., Target] = open_target,
        on_version: Callable[[Synced], object] | None = None,
    ) -> None:
        self.id = id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        keys.replica(self.id)
        self.version: int | None = None
        """The version that the weights are, by their digest; None if they are none."""
        self.newest: int | None = None
        """The newest version that this replica knows of."""
        self.timings: dict[str, float] = {}
        """Seconds of the last sync, by phase."""
        self.trouble: str = ""
        """Why `follow` does not get on at the moment; empty when all is well."""
        self._store = open_store(address_only(run))
        # a setting that is wrong is told now, and not as trouble with every version
        Cache.of_this_host(self._store)
        self._run: Run | None = None
        self._max_model_gb = max_model_gb
        self._prove = prove
        self._strict = strict
        self._pause = pause
        self._make_target = target
        self._resolve = resolver(reference)
        self._target: Target | None = None
        self._where: dict[str, Any] | None = None
        # the memory that the target writes to
        self._digest = StateDigest()
        self._bad: set[tuple[int, str, int | None]] = set()
        self._replaced: set[int] = set()
        # versions that were found replaced in the bucket in this sync
        self._strayed = False
        # these weights were found changed by somebody else in this sync
        self._heartbeat = heartbeat
        self._beat_at = 0.0
        self._failed, self._passed = (-1, 0), -1
        # with `every`: the version that could not be reached, how often, and the last one given up
        self._away: dict[tuple[int, str, int | None], int] = {}
        # a link whose objects the store could not give, and how often in a row
        self._on_version = on_version
        self._fetched = 0
        # bytes, in this sync
        self._closed = threading.Event()
        self._beating = threading.Lock()
        self._unseen = False
        self._reading: tuple[tuple[int, int], ...] = ()
        # ranges of versions that prune must leave for us

    # ── what a rollout server calls ──────────────────────────────────────────────────────────────────────────────────

    def sync(self, model: Any, version: int | str | None = None, *, progress: Progress | None = None) -> int:
        """Bring the model's weights to a version (the newest by default), verified; returns the version reached.

        `version` is a number, or text as on the command line: "v41", "latest", "-2", or a tag.
        On failure the weights are those of `self.version`, as before; None means that they have no name.
        """
        run = self._open()
        want = run.newest() if version is None else resolve(run, version)
        if want is None:
            raise RunNotFound(f"the run at {self._store.url} has no version yet")
        if version is not None:
            # before anything is changed: a version that does not exist must not become the newest one known
            run.manifest(want)
        self.newest = want if version is None else max(want, self.newest or 0)
        target = self._bind(model, run, want)
        self.timings, self._fetched, previous = {}, 0, self.version
        try:
            self._reach(run, target, want, progress)
        except DeltawireError as error:
            self._reading = ()
            self._beat(error=str(error), force=True)
            raise
        self._reading = ()
        self._beat(force=True)
        if want != previous:
            self._tell(run, want, previous)
        return want

    def _tell(self, run: Run, version: int, previous: int | None) -> None:
        if self._on_version is None:
            return
        try:
            changed, elements = run.manifest(version).changed, run.schema.elements
            timings = dict(self.timings)
            self._on_version(Synced(version, previous, self.lag or 0, self._fetched, changed, elements, timings))
        except Exception:
            log.exception("on_version failed for version %d, which is in place all the same", version)

    def follow(
        self, model: Any, *, poll: float = 1.0, every: bool = False, stop: threading.Event | None = None
    ) -> Iterator[int]:
        """Yield each version reached, until `stop` is set or the replica is closed.

        Trouble is logged, noted in the heartbeat and outlived: the model keeps the version it has. With `every`, no
        version is skipped over that can be reached. Looks when the store announces something, else when a version is
        due, and at least every `poll` seconds.

        RunReplaced when another run takes the address: the model keeps its weights, and following the new run is for
        a new Replica.
        """
        stop = stop or threading.Event()
        with Watcher(self._store, poll=poll, stop=stop) as watcher:
            yield from self._follow(model, every, stop, watcher)

    def _follow(self, model: Any, every: bool, stop: threading.Event, watcher: Watcher) -> Iterator[int]:
        while not stop.is_set() and not self._closed.is_set():
            want = None
            try:
                want = self._next(model, every, watcher)
                if want is not None:
                    self.sync(model, want)
                    self.trouble = ""
                    yield want
                    continue
                self.trouble = ""
                self._beat()
            except RunNotFound as error:
                if str(error) != self.trouble:
                    log.info("waiting for a run at %s", self._store.url)
                self.trouble = str(error)
            except RunReplaced as error:
                self.trouble = str(error)
                log.error("%s stays at version %s: %s", self.id, self.version, error)
                raise
            except DeltawireError as error:
                if isinstance(error, SchemaError) and (self._target is None or self._target.model is not model):
                    raise  # another model: no later version will fit either
                if str(error) != self.trouble:
                    log.warning("%s stays at version %s: %s", self.id, self.version, error)
                self.trouble = str(error)
                if every and want is not None and isinstance(error, _BAD_LINK):
                    self._note_failure(want)
                watcher.forget()
                self._beat(error=str(error))
            watcher.wait()

    def _note_failure(self, want: int) -> None:
        """With `every`: a lost object must not hold us up for ever, so what stays out of reach is passed over."""
        failed, times = self._failed
        self._failed = (want, times + 1 if failed == want else 1)
        if self._failed[1] >= TRIES:
            log.warning("%s passes over version %d, which cannot be reached", self.id, want)
            self._passed = want

    def close(self) -> None:
        """End `follow`, at its next look. The weights stay as they are."""
        self._closed.set()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        version = "no version yet" if self.version is None else f"at version {self.version}"
        return f"<Replica of {self._store.url}, {version}>"

    @property
    def url(self) -> str:
        """Where the run is, fit to be shown."""
        return self._store.url

    @property
    def lag(self) -> int | None:
        """Versions behind the newest this replica knows of."""
        if self.newest is None:
            return None
        return self.newest - (self.version if self.version is not None else -1)

    # ── finding the way ──────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self) -> Run:
        if self._run is None:
            self._run = Run.open(self._store, max_model_gb=self._max_model_gb)
        return self._run

    def _next(self, model: Any, every: bool, watcher: Watcher) -> int | None:
        """The version to go to now, or None. One conditional request when nothing happened."""
        run = self._open()
        newest = watcher.look(run, self.newest)
        if newest is None:
            return None
        self.newest = newest
        if self.version is None:
            self._bind(model, run, newest)
            # with `every` go on from the version the model came with, which is said once, like any other
            return self.version if every and self.version is not None else newest
        if newest <= self.version:
            return None
        if not every:
            return newest
        before = max(self.version, self._passed)
        return following(run, before, newest) if before < newest else None

    def _bind(self, model: Any, run: Run, want: int) -> Target:
        """Find out which version the model's weights are, if any."""
        where = whereabouts(model)
        if self._target is None or self._target.model is not model or where != self._where:
            # `model.to(…)` and the like leave the module what it is and its weights elsewhere
            self._target = self.version = None
            self._target, self._where = self._make_target(model, run.schema, strict=self._strict), where
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
        self._replaced.clear()
        self._strayed = False
        for _ in range(chain.MAX_PLANS):
            if self.version == want:
                return
            try:
                steps = self._plan(run, want)
            except MissingBase:
                if failure is not None and not isinstance(failure, StoreUnavailable):
                    raise failure from None
                # an object that stays away is as good as lost
                raise MissingBase(
                    f"no path leads from version {self.version} to {want} in {self._store.url}"
                    + (f": {failure}" if failure else "")
                ) from failure
            if self._reserve(run, want, steps):
                failure = self._walk(run, target, steps, progress) or failure
        if self.version != want:
            raise chain.gave_up(want, self._store.url, failure) from failure

    def _reserve(self, run: Run, want: int, steps: list[chain.Step]) -> bool:
        """Say what we are about to read, so that prune leaves it there. False if some of it is to go: plan again.

        Prune marks and then looks who reads; we say what we read and then look what is marked: one sees the other.
        A single delta needs no such care. Where it is gone, which takes seconds of bad luck, there is another way.
        """
        if not self._heartbeat or (len(steps) == 1 and steps[0].kind == "delta"):
            return True
        self._reading = spans(step.version for step in steps)
        self._beat(force=True)
        pruned = run.pruned()
        if want in pruned:
            run.forget(want)
            raise VersionNotFound(f"version {want} of {self._store.url} was pruned")
        marked = {(step.version, step.kind, step.base) for step in steps if step.version in pruned}
        self._bad |= marked
        return not marked

    def _walk(
        self, run: Run, target: Target, steps: list[chain.Step], progress: Progress | None
    ) -> DeltawireError | None:
        """Go as far as the steps are good; returns what was wrong with the one that was not."""
        # a way that leads back first is gone on a copy: weights that are served never fall behind what they are
        leads_back = self.version is not None and steps[0].version < self.version and len(steps) > 1
        copy = State(run.schema) if leads_back else None

        def told(count: int) -> None:
            # what takes long must not look abandoned
            self._beat()
            if progress:
                progress(count)

        for arrival in arrivals(run, steps, told):
            step = arrival.step
            try:
                clock = time.perf_counter()
                parcel = arrival.parcel()
                waited = time.perf_counter() - clock
                verify = min(waited, sum(data.hashing for data in parcel.objects))
                self._note({"fetch": waited - verify, "verify": verify})
                if copy is None:
                    self._take(run, target, parcel)
                else:
                    take(run, copy, parcel, self._resolve)
            except (*_BAD_LINK, StoreUnavailable) as error:
                if isinstance(error, StoreUnavailable) and not self._stays_away(step):
                    raise
                if copy is None and isinstance(error, DigestMismatch) and self._has_strayed(target):
                    return error
                log.warning("%s: cannot use the %s to version %d: %s", self.id, step.kind, step.version, error)
                if not self._was_replaced(run, step):
                    self._bad.add((step.version, step.kind, step.base))
                return error
        if copy is not None:
            manifest = run.manifest(steps[-1].version)
            self._load(target, manifest, copy)
        return None

    def _stays_away(self, step: chain.Step) -> bool:
        """Whether an object could not be had so often that it is the object, and not the store, that is broken."""
        link = (step.version, step.kind, step.base)
        self._away = {link: self._away.get(link, 0) + 1}
        return self._away[link] >= TRIES

    def _has_strayed(self, target: Target) -> bool:
        """Whether somebody else changed the weights: then no delta is to blame, and only full weights help."""
        found = target.digest()
        if self._strayed or found == self._digest:
            return False
        log.warning("%s: these weights are no longer what they were: somebody changed them", self.id)
        self._strayed, self.version, self._digest = True, None, found
        return True

    def _was_replaced(self, run: Run, step: chain.Step) -> bool:
        """Whether a version of this step was replaced in the bucket since its manifest was read, once per version.

        Weights that are a replaced version have no name any more: only full weights lead on from them.
        """
        replaced = {v for v in (step.version, step.base) if v is not None and run.renew(v)} - self._replaced
        if self.version is not None and self.version == step.base:
            with suppress(*_BAD_LINK):
                if run.manifest(self.version).digest != str(self._digest):
                    log.warning("%s: version %d was replaced in %s", self.id, self.version, self._store.url)
                    replaced.add(self.version)
                    self.version = None
        self._replaced |= replaced
        return bool(replaced)

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
        self._fetched += link.bytes
        if link.kind == "delta":
            staged = stage(run, parcel, target, self._digest)
            with self._pause():
                try:
                    apply(target, staged, prove=self._prove)
                except BaseException:
                    # it was undone; should that have failed as well, these weights have no name
                    if target.digest() != self._digest:
                        self.version = None
                    raise
                self._digest, self.version = staged.digest, manifest.version
            self._note(staged.timings)
        elif link.kind == "anchor":
            self._load(target, manifest, as_anchor(run, manifest.version, parcel.objects))
        else:
            self._load(target, manifest, reference_source(run, link, self._resolve))
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
        target.check(source)
        self._note({"decode": time.perf_counter() - clock})
        clock = time.perf_counter()
        with self._pause():
            # between the first and the last tensor the weights have no name
            self.version = None
            target.load(source)
            self._digest = target.digest() if self._prove else found
            if self._digest != found:
                raise DigestMismatch(manifest.version, str(found), str(self._digest), "call sync() again")
            self.version = manifest.version
        self._note({"apply": time.perf_counter() - clock})

    def _note(self, timings: dict[str, float]) -> None:
        for phase, seconds in timings.items():
            self.timings[phase] = self.timings.get(phase, 0.0) + seconds

    def _beat(self, *, error: str = "", force: bool = False) -> None:
        """Say how we are. Never an error of its own: a replica works without being seen."""
        if not self._heartbeat or self._run is None:
            return
        every = min(self._heartbeat, READING_EVERY) if self._reading else self._heartbeat
        # threads that fetch come here too; one of them says it for all
        if (not force and now() - self._beat_at < every) or not self._beating.acquire(blocking=force):
            return
        try:
            self._beat_at = now()
            timings = {name: round(seconds, 6) for name, seconds in dict(self.timings).items()}
            beat = Heartbeat(
                self._run.info.run, self.id, self.version, self.newest, not error, self._beat_at, error[:500], timings,
                self._reading,
            )  # fmt: skip
            self._store.put(keys.replica(self.id), dump(beat))
        except PermissionDenied as trouble:
            # reading is all a replica needs; said once
            level = logging.DEBUG if self._unseen else logging.WARNING
            log.log(level, "%s sends no heartbeats, so prune and log do not see it: %s", self.id, trouble)
            self._unseen = True
        except StoreError as trouble:
            log.debug("no heartbeat: %s", trouble)
        finally:
            self._beating.release()
