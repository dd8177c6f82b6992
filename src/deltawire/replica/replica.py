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

from ..bucket.cache import Cache
from ..bucket.fetch import Progress
from ..bucket.references import resolver
from ..bucket.replay import State
from ..bucket.run import DAMAGE, Run
from ..bucket.versions import address_only, resolve
from ..bucket.walk import Walker
from ..bucket.watch import Watcher, following
from ..core import keys
from ..core.chain import Step
from ..core.digest import StateDigest
from ..core.errors import (
    DeltawireError,
    DigestMismatch,
    NotRestored,
    PermissionDenied,
    RunNotFound,
    RunReplaced,
    SchemaError,
    StoreError,
    StoreUnavailable,
    VersionNotFound,
)
from ..core.full import Source
from ..core.manifest import Heartbeat, Manifest, dump, now, spans
from ..store import Store, open_store
from .model import Model, ModelTarget
from .target import AnyTarget, Delta, Target, Update

log = logging.getLogger("deltawire")

TRIES = 2
"""How often an object that the store fails to give is asked for before another way is looked for, and how often a
follower of every version tries one that cannot be reached before it goes on to the next."""

READING_EVERY = 60.0
"""Seconds, at most, between heartbeats of a replica that reads what prune must leave; `Retention.lease` is longer."""

_UNBOUND = ModelTarget({})


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
    seconds: float
    """Seconds that the sync took in all."""

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
    """Keeps live weights at a version of a run. One per set of live weights. Threads may share it: syncs wait for each
    other.

        with dw.Replica("s3://runs/wordle") as replica:
            replica.sync(model)                        # the newest version, verified
            for version in replica.follow(model):      # and then every new one
                ...

    `model` is a torch module, a state dict or a mapping of writable numpy arrays, with the names and shapes of the run.
    Floats may be wider than the run's: fp32 weights take the values of a bf16 run and are proven on its bits. On any
    error the weights are those of `replica.version`, as before. Weights that are elsewhere, such as those of an engine,
    are passed as a `Target` in place of a model.

    id          name of this replica in heartbeats, as `deltawire log` shows it
    strict      whether weights that the run does not carry are an error (default) or left alone
    on_version  called with a `Synced` after each version that was reached, outside the pause; what it raises is logged
    on_name     called with the version that the weights are, after every sync that was tried, and with None as soon as
                they are found to be none
    prove       recompute the digest of all live weights after every apply (default). Without it the digest is still
                checked before the write, from the delta and the weights it meets.
    heartbeat   seconds between heartbeat objects in the bucket; 0 writes none
    reference   the folder of the checkpoint that version 0 refers to, when the run's own name for it does not work here
    max_model_gb  the largest model that the run may declare; DELTAWIRE_MAX_MODEL_GB, or 4000, by default
    pause       entered exactly for as long as live weights are written and proven, so that nobody computes with them;
                `version` names them again when it is left, or is None when they have no name
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
        pause: Callable[[], AbstractContextManager[object]] = nullcontext,
        on_version: Callable[[Synced], object] | None = None,
        on_name: Callable[[int | None], object] = lambda version: None,
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
        """Why the last sync or the last look at the run failed; empty when all is well."""
        self.failures = 0
        """Syncs that failed."""
        self.lock = threading.RLock()
        """Held by every sync: whoever holds it finds the weights at one version."""
        self._store = open_store(address_only(run))
        # a setting that is wrong is told now, and not as trouble with every version
        Cache.of_this_host(self._store)
        self._run: Run | None = None
        """None while there is no run at the address yet."""
        self._max_model_gb, self._prove, self._strict = max_model_gb, prove, strict
        self._pause, self._on_version, self._on_name = pause, on_version, on_name
        self._resolve = resolver(reference)
        self._target: AnyTarget = _UNBOUND
        self._digest = StateDigest()
        """What the weights had when they were last looked at."""
        self._strayed = False
        """Whether these weights were found changed by somebody else in this sync."""
        self._failed, self._passed = (-1, 0), -1
        """With `every`: the version that could not be reached and how often, and the last one that was passed over."""
        self._away: tuple[Step | None, int] = None, 0
        """A step whose objects the store could not give, and how often in a row."""
        self._fetched = 0
        """Bytes, in this sync."""
        self._closed = threading.Event()
        self._heartbeat = heartbeat
        self._beat_at = 0.0
        self._beating = threading.Lock()
        self._unseen = False
        self._reading: tuple[tuple[int, int], ...] = ()
        """Ranges of versions that prune must leave for us."""

    # ── what a rollout server calls ──────────────────────────────────────────────────────────────────────────────────

    def sync(
        self, model: Model | AnyTarget, version: int | str | None = None, *, progress: Progress | None = None
    ) -> int:
        """Bring the model's weights to a version (the newest by default), verified; returns the version reached.

        `version` is a number, or text as on the command line: "v41", "latest", "-2", or a tag.
        On failure the weights are those of `self.version`, as before; None means that they have no name.
        """
        with self.lock:
            run = self._open()
            want = run.newest() if version is None else resolve(run, version)
            if want is None:
                raise RunNotFound(f"the run at {self._store.url} has no version yet")
            if version is not None:
                # before anything is changed: a version that does not exist must not become the newest one known
                run.manifest(want)
            self.newest = want if version is None else max(want, self.newest or 0)
            clock, self.timings, self._fetched = time.perf_counter(), {}, 0
            try:
                target = self._bind(model, run, want)
                previous = self.version
                self._reach(run, target, want, progress)
            except Exception as error:
                self.failures += 1
                self.trouble = str(error)
                self._reading = ()
                self._beat(error=self.trouble, force=True)
                raise
            finally:
                self._on_name(self.version)
            self.trouble, self._reading = "", ()
            self._beat(force=True)
            if want != previous:
                self._tell(run, want, previous, time.perf_counter() - clock)
            return want

    def _tell(self, run: Run, version: int, previous: int | None, seconds: float) -> None:
        if self._on_version is None:
            return
        try:
            changed, elements, timings = run.manifest(version).changed, run.schema.elements, dict(self.timings)
            self._on_version(
                Synced(version, previous, self.lag or 0, self._fetched, changed, elements, timings, seconds)
            )
        except Exception:
            log.exception("on_version failed for version %d, which is in place all the same", version)

    def follow(
        self,
        model: Model | AnyTarget,
        *,
        poll: float = 1.0,
        every: bool = False,
        stop: threading.Event | None = None,
        pin: Callable[[], int | None] = lambda: None,
    ) -> Iterator[int]:
        """Yield each version reached, until `stop` is set or the replica is closed.

        Trouble is logged, noted in the heartbeat and outlived: the model keeps the version it has. With `every`, no
        version is skipped over that can be reached. Looks when the store announces something, else when a version is
        due, and at least every `poll` seconds. `pin` is asked each time: the version to stay at, or None to follow.

        RunReplaced when another run takes the address: the model keeps its weights, and following the new run is for
        a new Replica.
        """
        stop = stop or threading.Event()
        with Watcher(self._store, poll=poll, stop=stop) as watcher:
            while not stop.is_set() and not self._closed.is_set():
                reached = self._look(model, every, pin, watcher)
                if reached is None:
                    watcher.wait()
                else:
                    yield reached

    def _look(
        self, model: Model | AnyTarget, every: bool, pin: Callable[[], int | None], watcher: Watcher
    ) -> int | None:
        """Go to the next version if there is one; None if there is not, or it could not be reached."""
        want, before = None, self.trouble
        try:
            # held from the choice to the end of the sync: a pin that was set meanwhile is obeyed
            with self.lock:
                pinned = pin()
                if pinned is not None:
                    want = pinned if self.version != pinned else None
                else:
                    want = self._next(model, every, watcher)
                if want is not None:
                    return self.sync(model, want)
            self.trouble = ""
            self._beat()
        except RunNotFound as error:
            if str(error) != before:
                log.info("waiting for a run at %s", self._store.url)
            self.trouble = str(error)
        except RunReplaced as error:
            self.trouble = str(error)
            log.error("%s stays at version %s: %s", self.id, self.version, error)
            raise
        except DeltawireError as error:
            self.trouble = str(error)
            if isinstance(error, SchemaError) and not self._is_bound_to(model):
                raise  # another model: no later version will fit either
            if str(error) != before:
                log.warning("%s stays at version %s: %s", self.id, self.version, error)
            if every and want is not None and isinstance(error, DAMAGE):
                self._note_failure(want)
            watcher.forget()
            self._beat(error=str(error))
        return None

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

    # ── discover ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self) -> Run:
        if self._run is None:
            self._run = Run.open(self._store, max_model_gb=self._max_model_gb)
        return self._run

    def _next(self, model: Model | AnyTarget, every: bool, watcher: Watcher) -> int | None:
        """The version to go to now, or None. One conditional request when nothing happened."""
        run = self._open()
        newest = watcher.look(run, self.newest)
        if newest is None:
            return None
        self.newest = newest
        if self.version is None:
            if every:
                # go on from the version the model came with, which is said once, like any other
                self._bind(model, run, newest)
            return self.version if self.version is not None else newest
        if newest <= self.version:
            return None
        if not every:
            return newest
        before = max(self.version, self._passed)
        return following(run, before, newest) if before < newest else None

    def _is_bound_to(self, model: Model | AnyTarget) -> bool:
        return self._target is model or (isinstance(self._target, ModelTarget) and self._target.model is model)

    def _bind(self, model: Model | AnyTarget, run: Run, want: int) -> AnyTarget:
        """Locate the weights, and find out which version they are, if any."""
        known, target = self._is_bound_to(model), self._target
        if not known:
            target = model if isinstance(model, Target) else ModelTarget(model, strict=self._strict, prove=self._prove)
        self._target = _UNBOUND
        try:
            moved = target.bind(run.schema)
        except BaseException:
            self.version = None
            raise
        self._target = target
        if moved or not known:
            self.version = None
        if self.version is None:
            self._digest = target.digest()
            self.version = self._name(run, want)
        return target

    def _name(self, run: Run, want: int) -> int | None:
        """The version that has the digest of these weights."""
        found = str(self._digest)
        for version, summary in reversed(run.timeline(want).items()):
            # a summary is hearsay, the manifest counts
            if summary.digest == found and run.manifest(version).digest == found:
                log.info("%s: these weights are version %d already", self.id, version)
                return version
        return None

    def _lose_name(self) -> None:
        self.version = None
        self._on_name(None)

    # ── plan, fetch ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _reach(self, run: Run, target: AnyTarget, want: int, progress: Progress | None) -> None:
        walker, self._strayed = Walker(run), False
        copy: State | None = None

        def start() -> int | None:
            return self.version if target.takes_deltas or self.version == want else None

        def begin(steps: list[Step]) -> bool:
            nonlocal copy
            if not self._reserve(run, walker, want, steps):
                return False
            # a way that first leads back is gone on a copy: weights in use never fall behind the version they are
            leads_back = self.version is not None and steps[0].version < self.version
            copy = State(run.schema) if len(steps) > 1 and (leads_back or not target.takes_deltas) else None
            return True

        def told(count: int) -> None:
            # a replica that fetches for long must not look abandoned
            self._beat()
            if progress:
                progress(count)

        for step, pending in walker.walk(start, want, begin=begin, progress=told):
            try:
                clock = time.perf_counter()
                fetched = pending.result()
                waited = time.perf_counter() - clock
                verify = min(waited, sum(data.hashing_s for data in fetched.objects))
                self._note({"fetch": waited - verify, "verify": verify})
                self._fetched += fetched.link.bytes
                if copy is not None:
                    copy.take(fetched, self._resolve)
                    if step.version == want:
                        self._apply(target, fetched.manifest, "copy", copy)
                elif step.kind == "delta":
                    self._apply(
                        target, fetched.manifest, step.kind, Delta(fetched.claim(self._digest), fetched.objects)
                    )
                else:
                    self._apply(target, fetched.manifest, step.kind, fetched.weights(self._resolve))
            except (*DAMAGE, StoreUnavailable) as error:
                if isinstance(error, StoreUnavailable) and not self._stays_away(step):
                    raise
                if self._has_strayed(target, error) or self._was_replaced(run, step):
                    walker.plan_again(error)
                else:
                    walker.reject(step, error)

    def _reserve(self, run: Run, walker: Walker, want: int, steps: list[Step]) -> bool:
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
        marked = [step for step in steps if step.version in pruned]
        walker.leave_out(marked)
        return not marked

    def _stays_away(self, step: Step) -> bool:
        """Whether an object could not be had so often that it is the object, and not the store, that is broken."""
        before, times = self._away
        self._away = step, times + 1 if step == before else 1
        return self._away[1] >= TRIES

    def _has_strayed(self, target: AnyTarget, error: DeltawireError) -> bool:
        """Whether something else changed the weights: then no delta is to blame, and only full weights help."""
        if self._strayed or not isinstance(error, DigestMismatch) or (found := target.digest()) == self._digest:
            return False
        log.warning("%s: the weights were changed by something other than this replica", self.id)
        self._strayed, self._digest = True, found
        self._lose_name()
        return True

    def _was_replaced(self, run: Run, step: Step) -> bool:
        """Whether the version that these weights are was replaced in the bucket: then they have no name any more, and
        only full weights lead on from them."""
        if self.version is not None and self.version == step.base:
            run.forget(self.version)
            with suppress(*DAMAGE):
                if run.manifest(self.version).digest != str(self._digest):
                    log.warning("%s: version %d was replaced in %s", self.id, self.version, self._store.url)
                    self._lose_name()
                    return True
        return False

    # ── stage, swap ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _apply(self, target: AnyTarget, manifest: Manifest, kind: str, content: Delta | Source) -> None:
        clock = time.perf_counter()
        update = Update(manifest.version, StateDigest.parse(manifest.digest), self._digest, content)
        staged = target.stage(update)
        with self._pause():
            try:
                target.swap(staged)
            except BaseException as error:
                named, self.version = self.version, self.version if staged.undoable else None
                if not isinstance(error, NotRestored) and target.digest() == self._digest:
                    self.version = named
                else:
                    self._lose_name()
                raise
            self._digest, self.version = update.digest, update.version
        self._note(staged.timings)
        seconds = time.perf_counter() - clock
        log.info("%s: v%d  %s  %.1f MB  %.0f ms", self.id, update.version, kind, self._fetched / 1e6, 1e3 * seconds)

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
