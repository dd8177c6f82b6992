"""The rollout side: follow a run and keep a model's live weights at a version that can be named and proven."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..bucket.addresses import checked_address
from ..bucket.cache import shared_cache
from ..bucket.fetch import Progress
from ..bucket.references import resolver
from ..bucket.replay import State
from ..bucket.run import DAMAGE, Run
from ..bucket.trust import KeysLike, Trust
from ..bucket.versions import address_only, resolve
from ..bucket.walk import TRIES, Walker
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
    SchemaMismatch,
    StoreError,
    StoreUnavailable,
    VersionNotFound,
    VersionRefused,
)
from ..core.full import Source
from ..core.manifest import Heartbeat, Manifest, SyncRecord, dump, now, spans
from ..metrics import VersionFigures
from ..store import MirroredStore, Store, open_store
from .model import Model, ModelTarget
from .target import AnyTarget, Delta, Target, Update

log = logging.getLogger("deltawire")

READING_EVERY = 60.0
"""Seconds, at most, between heartbeats of a replica that reads what prune must leave; `Retention.lease` is longer."""

REFUSED_S = 60.0
"""Seconds until a version that the target has refused is tried again; a later version is tried at once."""

SYNCS = 24
"""Number of recent syncs that a heartbeat tells of; fewer where it would be larger than its readers allow."""

_UNBOUND = ModelTarget({})


@dataclass(frozen=True, slots=True)
class Synced(VersionFigures):
    """A version that a replica has reached, as `on_version` gets it."""

    version: int
    previous: int | None
    """The version before; None where the weights had none."""
    lag: int
    """Number of versions behind the newest that is known."""
    bytes: int
    """Bytes fetched to get here."""
    changed: int
    """Number of weights that differ between this version and the one published before it."""
    elements: int
    """Number of weights of the model."""
    timings: dict[str, float]
    """Seconds by phase: fetch, verify, decode, stage, apply, prove."""
    seconds: float
    """Seconds the sync took in all."""

    def report(self) -> dict[str, float]:
        """Return the figures of a published version, and how far this replica is behind."""
        # not super(): slots=True makes a second class, and super() refers to the first
        return {**VersionFigures.report(self), "deltawire/lag": float(self.lag)}


def _as_text(error: str) -> str:
    """Return the error as valid UTF-8: a path in a message may hold bytes that are not text."""
    return error.encode(errors="replace").decode()


@dataclass(frozen=True, slots=True)
class _Refused:
    """A version that the target has refused."""

    reason: str
    until: float
    """When it is tried again, by the monotonic clock."""
    has_ended: Callable[[], bool]
    """Whether the cause is gone, so that it is tried before that."""


class _Repeated:
    """Counts how often in a row the same thing has failed."""

    def __init__(self) -> None:
        self._last: object = None
        self._times = 0

    def count(self, failed: object) -> int:
        self._last, self._times = failed, self._times + 1 if failed == self._last else 1
        return self._times


class Replica:
    """Keeps live weights at a version of a run. One per set of live weights.

        with dw.Replica("s3://runs/wordle") as replica:
            replica.sync(model)                        # the newest version, verified
            for version in replica.follow(model):      # then every new one
                ...

    `model` is a torch module, a state dict or a mapping of writable numpy arrays, with the names and shapes of the run.
    Floats may be wider than the run's: fp32 weights get the values of a bf16 run and are verified by its bits. After
    any error the weights are still those of `replica.version`. For weights in another process, such as an engine's,
    pass a `Target` instead of a model.

    Thread safety: every method may be called from any thread. Syncs run one at a time, under `lock`; the callbacks and
    `pause` are called by the thread that syncs, with the lock held. The properties can be read at any time.

    id          name of this replica in heartbeats, as `deltawire log` shows it
    strict      whether weights that are not in the run are an error (default) or ignored
    on_version  called with a `Synced` after each version that was reached, outside the pause; errors in it are logged
    on_name     called with the version of the weights after every sync that was tried, and with None as soon as they
                are found to have none
    prove       recompute the digest of all live weights after every apply (default). Without it the digest is still
                checked before the write, from the delta and the weights it meets.
    heartbeat   seconds between heartbeat objects in the bucket; 0 writes none
    address     where clients reach the server of these weights, host:port, for the heartbeat
    reference   folder of the checkpoint that version 0 refers to, if the run's own name for it does not work here
    max_model_gb  the largest model that the run may declare; DELTAWIRE_MAX_MODEL_GB, or 4000, by default
    trust       public keys whose signatures are accepted: text, a file with one per line, or several; by default
                DELTAWIRE_TRUST. With one, nothing else is applied, and following never goes below the newest signed
                version that this host has seen (docs/signed.md). Without one, signatures are not checked.
    refuse_delegated  whether to use only links that the trainer's own key signed, and none that a keeper has added; by
                default DELTAWIRE_REFUSE_DELEGATED
    pause       context manager, entered while live weights are written and verified, so that nothing computes with
                them; when it is left, `version` is current, or None if the weights are no version
    """

    def __init__(
        self,
        run: str | Path | Store,
        *,
        id: str | None = None,
        prove: bool = True,
        heartbeat: float = 10.0,
        address: str = "",
        reference: str | Path | None = None,
        max_model_gb: float | None = None,
        trust: Trust | KeysLike | None = None,
        refuse_delegated: bool | None = None,
        strict: bool = True,
        pause: Callable[[], AbstractContextManager[object]] = nullcontext,
        on_version: Callable[[Synced], object] | None = None,
        on_name: Callable[[int | None], object] = lambda version: None,
    ) -> None:
        self._id = id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        keys.replica(self._id)
        self._store = open_store(address_only(run))
        # a wrong setting is an error now, not with every version
        shared_cache(self._store)
        self._trust = Trust.of(trust, refuse_delegated)
        self._max_model_gb, self._prove, self._strict = max_model_gb, prove, strict
        self._pause, self._on_version, self._on_name = pause, on_version, on_name
        self._resolve = resolver(reference)
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._run: Run | None = None
        """None while there is no run at the address yet."""
        self._target: AnyTarget = _UNBOUND
        self._version: int | None = None
        self._served: int | None = None
        """The version that clients get, which some targets tell from that of the weights in host memory."""
        self._newest: int | None = None
        self._timings: dict[str, float] = {}
        self._trouble = ""
        self._failures = 0
        self._digest = StateDigest()
        """Digest of the weights when they were last looked at."""
        self._strayed = False
        """Whether the weights were found changed by something else in this sync."""
        self._refused: dict[int, _Refused] = {}
        self._failed, self._skipped = _Repeated(), -1
        """With `every`: the version that could not be reached, and the last one that was skipped for that."""
        self._unavailable = _Repeated()
        """A step whose objects the store could not give: after some attempts the object is to blame, not the store."""
        self._fetched = 0
        """Bytes fetched in this sync."""
        self._syncs: deque[SyncRecord] = deque(maxlen=SYNCS)
        self._heartbeat = heartbeat
        self._address = checked_address(address) if address else ""
        self._hurry_until = 0.0
        """Until when somebody waits for a version, by the monotonic clock."""
        self._beat_at = 0.0
        self._beating = threading.Lock()
        self._may_not_beat = False
        self._reading: tuple[tuple[int, int], ...] = ()
        """Ranges of versions that prune must leave for this replica."""
        self.rejected: list[tuple[Step, DeltawireError]] = []
        """Links that the last sync could not use, and why; it found another way around them, or failed."""
        self.note = ""
        """Trouble that heartbeats report besides that of the last sync."""
        self.role = ""
        """Role of this process in heartbeats (core/manifest.py)."""

    # ── state ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def id(self) -> str:
        """Name of this replica in heartbeats."""
        return self._id

    @property
    def url(self) -> str:
        """Address of the run, without credentials."""
        return self._store.url

    @property
    def signatures(self) -> Literal["unchecked", "checked", "own"]:
        """What is asked of signatures: nothing, because no key is trusted; that a trusted key, or one to which it
        delegated, made them; or, with `refuse_delegated`, that the run's own key made them."""
        if self._trust is None:
            return "unchecked"
        return "own" if self._trust.refuse_delegated else "checked"

    @property
    def version(self) -> int | None:
        """The version of the weights, by their digest; None if they have none."""
        return self._version

    @property
    def digest(self) -> StateDigest:
        """The state digest of the weights when they were last looked at."""
        return self._digest

    @property
    def newest(self) -> int | None:
        """The newest version that this replica knows of."""
        return self._newest

    @property
    def lag(self) -> int | None:
        """Number of versions behind the newest that this replica knows of."""
        if self._newest is None:
            return None
        served = self._served()
        return self._newest - (served if served is not None else -1)

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of the last sync by phase: fetch, verify, decode, stage, apply, prove."""
        return self._timings

    @property
    def trouble(self) -> str:
        """Why the last sync or poll failed; empty if it succeeded."""
        return self._trouble

    @property
    def failures(self) -> int:
        """Number of syncs that failed."""
        return self._failures

    @property
    def lock(self) -> threading.RLock:
        """Held during every sync: while you hold it, the weights do not change."""
        return self._lock

    # ── sync, follow ─────────────────────────────────────────────────────────────────────────────────────────────────

    def sync(
        self, model: Model | AnyTarget, version: int | str | None = None, *, progress: Progress | None = None
    ) -> int:
        """Bring the model's weights to a version (the newest by default), verify them, and return the version.

        `version` is a number, or text as on the command line: "v41", "latest", "-2", or a tag.
        On failure the weights are those of `replica.version`, as before, or None where they were lost.
        """
        with self._lock:
            run = self.opened()
            return run.anywhere(lambda: self._sync(run, model, version, progress))

    def _sync(self, run: Run, model: Model | AnyTarget, version: int | str | None, progress: Progress | None) -> int:
        want = run.newest() if version is None else resolve(run, version)
        if want is None:
            raise RunNotFound(f"the run at {self._store.url} has no version yet")
        if version is None and isinstance(self._store, MirroredStore):
            # the bucket in use may be behind the one before
            want = max(want, -1 if self._version is None else self._version)
        self._newest = want if version is None else max(want, self._newest or 0)
        clock, self._timings, self._fetched = time.perf_counter(), {}, 0
        previous = self._version
        try:
            target = self._bind(model, run, want)
            if self._version == want != self._served():
                # passed through on the way to another version: no delta leads to where the weights are
                self._version = None
            previous = self._version
            self._reach(run, target, want, progress)
        except Exception as error:
            self._failures += 1
            self._trouble = str(error)
            self._record(want, previous, time.perf_counter() - clock, self._trouble)
            self._reading = ()
            self._beat(error=self._trouble, force=True)
            raise
        finally:
            self._on_name(self._version)
        self._trouble, self._reading = "", ()
        self._refused = {version: refused for version, refused in self._refused.items() if version > want}
        seconds = time.perf_counter() - clock
        if want != previous:
            self._record(want, previous, seconds)
        self._beat(force=True)
        if want != previous:
            self._tell(run, want, previous, seconds)
        return want

    def _record(self, version: int, previous: int | None, seconds: float, error: str = "") -> None:
        """Keep a sync for the heartbeats. A failure that repeats is one record."""
        error, times = _as_text(error)[:160], 1
        if error and self._syncs and (self._syncs[-1].version, self._syncs[-1].error) == (version, error):
            times += self._syncs.pop().times
        timings = {name: round(spent, 6) for name, spent in self._timings.items()}
        self._syncs.append(
            SyncRecord(version, previous, now(), round(seconds, 6), self._fetched, timings, error, times)
        )

    def _tell(self, run: Run, version: int, previous: int | None, seconds: float) -> None:
        if self._on_version is None:
            return
        try:
            changed, elements, timings = run.manifest(version).changed, run.schema.elements, dict(self._timings)
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

        A failed sync is logged, noted in the heartbeat and retried; meanwhile the model keeps its version. Polls when
        the store announces a change, when a version is due, and at least every `poll` seconds.

        every   sync to every version that can be reached, instead of the newest one
        pin     called before each poll; returns the version to stay at, or None to follow the run

        Raises RunReplaced if another run is at the address: the model keeps its weights, and the new run needs a new
        Replica. Raises SchemaMismatch if the model is not the run's.
        """
        stop = stop or threading.Event()
        with Watcher(self._store, poll=poll, stop=stop, hurry=lambda: time.monotonic() < self._hurry_until) as watcher:
            while not stop.is_set() and not self._closed.is_set():
                reached = self._look(model, every, pin, watcher)
                if reached is None:
                    watcher.wait()
                else:
                    yield reached

    def _look(
        self, model: Model | AnyTarget, every: bool, pin: Callable[[], int | None], watcher: Watcher
    ) -> int | None:
        """Sync to the next version if there is one; returns None if there is not, or it could not be reached."""
        want, before = None, self._trouble
        try:
            # held from the choice to the end of the sync, so that a pin set meanwhile is obeyed
            with self._lock:
                pinned = pin()
                if pinned is not None:
                    want = pinned if self._served() != pinned and not self._is_refused(pinned) else None
                else:
                    want = self._next(model, every, watcher)
                if want is not None:
                    return self.sync(model, want)
            due = self._newest if pinned is None else pinned
            refused = None if due is None else self._refused.get(due)
            self._trouble = refused.reason if refused else ""
            self._beat(error=self._trouble)
        except RunNotFound as error:
            if str(error) != before:
                log.info("waiting for a run at %s", self._store.url)
            self._trouble = str(error)
        except DeltawireError as error:
            self._trouble = str(error)
            if isinstance(error, RunReplaced) or (isinstance(error, SchemaError) and not self._is_bound_to(model)):
                raise  # another run or another model: no later version will fit either
            if str(error) != before:
                log.warning("%s: sync failed, still at version %s: %s", self._id, self._version, error)
            if every and want is not None and isinstance(error, DAMAGE) and self._failed.count(want) >= TRIES:
                log.warning("%s: skipping version %d, which cannot be reached", self._id, want)
                self._skipped = want
            if want is not None and isinstance(error, VersionRefused):
                self._refused[want] = _Refused(str(error), time.monotonic() + REFUSED_S, error.has_ended)
            watcher.forget()
            self._beat(error=str(error))
        except Exception as error:
            self._trouble = f"{type(error).__name__}: {error}"
            raise
        return None

    def hurry(self, seconds: float) -> None:
        """Let `follow` look for new versions more often for so many seconds, because somebody waits for one."""
        self._hurry_until = max(self._hurry_until, time.monotonic() + seconds)

    def leave(self) -> None:
        """Take the server's address out of the heartbeat, so that no proxy sends clients there any more."""
        if self._address:
            self._address = ""
            self._beat(force=True)

    def beat(self) -> None:
        """Write a heartbeat if one is due. Only needed by callers of `sync` that do not use `follow`."""
        self._beat(error=self._trouble)

    def close(self) -> None:
        """End `follow` at its next poll. The weights do not change."""
        self._closed.set()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        version = "no version yet" if self._version is None else f"at version {self._version}"
        return f"<Replica of {self._store.url}, {version}>"

    # ── discover ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def opened(self) -> Run:
        """Return the run, opened with this replica's limits. Raises RunNotFound while there is none."""
        with self._lock:
            if self._run is None:
                self._run = Run.open(self._store, max_model_gb=self._max_model_gb, trust=self._trust)
            return self._run

    def _next(self, model: Model | AnyTarget, every: bool, watcher: Watcher) -> int | None:
        """Return the version to go to now, or None. One conditional request when nothing happened."""
        run = self.opened()
        newest = watcher.look(run, self._newest)
        if newest is None:
            return None
        self._newest = newest
        if self._version is None:
            if self._is_refused(newest):
                return None
            if every:
                # continue from the version the model came with, which is yielded once, like any other
                self._bind(model, run, newest)
            return self._version if self._version is not None else newest
        if newest < self._version or newest == self._served():
            return None
        if not every:
            return None if self._is_refused(newest) else newest
        want = max(self._version, self._skipped)
        while want < newest:
            want = following(run, want, newest)
            if not self._is_refused(want):
                return want
        return None

    def _is_refused(self, version: int) -> bool:
        """Whether this version is not to be tried now."""
        refused = self._refused.get(version)
        return refused is not None and time.monotonic() < refused.until and not refused.has_ended()

    def _is_bound_to(self, model: Model | AnyTarget) -> bool:
        return self._target is model or (isinstance(self._target, ModelTarget) and self._target.model is model)

    def _bind(self, model: Model | AnyTarget, run: Run, want: int) -> AnyTarget:
        """Locate the weights and identify their version, if they have one."""
        known, target = self._is_bound_to(model), self._target
        if not known:
            target = model if isinstance(model, Target) else ModelTarget(model, strict=self._strict, prove=self._prove)
        self._target = _UNBOUND
        try:
            moved = target.bind(run)
        except BaseException:
            self._version = None
            raise
        self._target = target
        if moved or not known:
            self._version = None
        if self._version is None:
            self._digest = target.digest()
            self._version = run.identify(self._digest, want)
            if self._version is not None:
                log.info("%s: the weights are version %d already", self._id, self._version)
        return target

    def _served(self) -> int | None:
        """The version that clients get, which some targets tell from that of the weights in host memory."""
        found: int | None = getattr(self._target, "served", self._version)
        return found

    def _lose_version(self) -> None:
        self._version = None
        self._on_name(None)

    # ── plan, fetch ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _reach(self, run: Run, target: AnyTarget, want: int, progress: Progress | None) -> None:
        walker, self._strayed, self.rejected = Walker(run), False, []
        copy: State | None = None

        def start() -> int | None:
            return self._version if target.takes_deltas or self._version == want else None

        def begin(steps: list[Step]) -> bool:
            nonlocal copy
            if not self._reserve(run, walker, want, steps):
                return False
            # a way that first leads back is gone on a copy: weights in use never fall behind the version they are
            leads_back = self._version is not None and steps[0].version < self._version
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
                    delta = Delta(run.schema, fetched.claim(self._digest), fetched.objects)
                    self._apply(target, fetched.manifest, step.kind, delta, step.version == want)
                else:
                    weights = fetched.weights(self._resolve)
                    self._apply(target, fetched.manifest, step.kind, weights, step.version == want)
            except (*DAMAGE, StoreUnavailable) as error:
                if isinstance(error, StoreUnavailable) and self._unavailable.count(step) < TRIES:
                    raise
                if self._has_strayed(target, error) or self._was_replaced(run, step):
                    walker.plan_again(error)
                else:
                    walker.reject(step, error)
                    self.rejected.append((step, error))

    def _reserve(self, run: Run, walker: Walker, want: int, steps: list[Step]) -> bool:
        """Announce in the heartbeat what is about to be read, so that prune leaves it. False if some of it is marked.

        Prune marks and then looks at heartbeats; a replica writes its heartbeat and then looks at the marks: one of the
        two sees the other. A single delta needs no such care: if it is gone, another way is planned.
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

    def _has_strayed(self, target: AnyTarget, error: DeltawireError) -> bool:
        """Whether something else changed the weights: then no delta is to blame, and only full weights help."""
        if self._strayed or not isinstance(error, DigestMismatch) or (found := target.digest()) == self._digest:
            return False
        log.warning("%s: the weights were changed by something other than this replica", self._id)
        # first: no weights have a digest and the name of another one
        self._lose_version()
        self._strayed, self._digest = True, found
        return True

    def _was_replaced(self, run: Run, step: Step) -> bool:
        """Whether the version of the weights was replaced in the bucket: then only full weights lead on from them."""
        if self._version is not None and self._version == step.base:
            run.forget(self._version)
            with suppress(*DAMAGE):
                if run.manifest(self._version).digest != str(self._digest):
                    log.warning("%s: version %d was replaced in %s", self._id, self._version, self._store.url)
                    self._lose_version()
                    return True
        return False

    # ── stage, swap ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _apply(
        self, target: AnyTarget, manifest: Manifest, kind: str, content: Delta | Source, final: bool = True
    ) -> None:
        clock = time.perf_counter()
        update = Update(
            manifest.version, StateDigest.parse(manifest.digest), self._digest, content, final, self._store.url
        )
        staged = target.stage(update)
        with self._pause():
            try:
                target.swap(staged)
                # within: where this is interrupted, the weights say which version they are
                self._digest, self._version = update.digest, update.version
            except BaseException as error:
                named, self._version = self._version, self._version if staged.undoable else None
                if not isinstance(error, NotRestored) and target.digest() == self._digest:
                    self._version = named
                else:
                    self._lose_version()
                raise
        self._note(staged.timings)
        seconds = time.perf_counter() - clock
        log.info("%s: v%d  %s  %.1f MB  %.0f ms", self._id, update.version, kind, self._fetched / 1e6, 1e3 * seconds)

    def _note(self, timings: dict[str, float]) -> None:
        for phase, seconds in timings.items():
            self._timings[phase] = self._timings.get(phase, 0.0) + seconds

    def _beat(self, *, error: str = "", force: bool = False) -> None:
        """Write a heartbeat if one is due. Never raises: a replica works without heartbeats."""
        if not self._heartbeat or self._run is None:
            return
        error = error or self.note
        every = min(self._heartbeat, READING_EVERY) if self._reading else self._heartbeat
        # called by the threads that fetch too; one of them writes for all
        if (not force and now() - self._beat_at < every) or not self._beating.acquire(blocking=force):
            return
        try:
            self._beat_at = now()
            timings = {name: round(seconds, 6) for name, seconds in dict(self._timings).items()}
            beat = Heartbeat(
                self._run.info.run, self._id, self._served(), self._newest, not error, self._beat_at,
                _as_text(error)[:500], timings, self._reading, tuple(self._syncs), self._address,
                self.role,
            )  # fmt: skip
            while len(data := dump(beat)) > keys.limit(keys.REPLICAS) and beat.syncs:
                beat = msgspec.structs.replace(beat, syncs=beat.syncs[len(beat.syncs) // 2 + 1 :])
            self._store.put(keys.replica(self._id), data)
        except PermissionDenied as trouble:
            # a replica only needs to read; warn once
            level = logging.DEBUG if self._may_not_beat else logging.WARNING
            log.log(level, "%s sends no heartbeats, so prune and log do not see it: %s", self._id, trouble)
            self._may_not_beat = True
        except StoreError as trouble:
            log.debug("no heartbeat: %s", trouble)
        finally:
            self._beating.release()
