"""The rollout side: follow a run and keep a model's live weights at a version that can be named and proven."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from ..bucket.cache import shared_cache
from ..bucket.fetch import Progress
from ..bucket.references import resolver
from ..bucket.run import Run
from ..bucket.trust import KeysLike, Trust
from ..bucket.versions import address_only
from ..bucket.watch import Watcher, following
from ..core.chain import Step
from ..core.digest import StateDigest
from ..core.errors import DAMAGE, DeltawireError, RunNotFound, RunReplaced, SchemaError, VersionRefused
from ..core.protocols import implements
from ..metrics import VersionFigures
from ..store import MirroredStore, Store, open_store
from .attempt import Attempt
from .failures import Failures
from .heartbeats import Heartbeats, Status
from .live_weights import LiveWeights
from .model import Model, ModelTarget
from .target import AnyTarget, Target

log = logging.getLogger("deltawire")


@dataclass(frozen=True, slots=True)
class Synced(VersionFigures):
    """A version that a replica has reached, as `on_version` gets it.

    dw.Replica("s3://runs/chat", on_version=lambda synced: print(synced.version, synced.bytes))
    """

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
    on_name     called with the version of the weights after every attempt to sync, and with None as soon as the weights
                are found to be no version
    prove       recompute the digest of all live weights after every apply (default). Without it the digest is still
                checked before the write, from the delta and the weights it meets.
    heartbeat   seconds between heartbeat objects in the bucket; 0 writes none
    heartbeats  bucket of the run, for heartbeats, where the run is read from an address that takes none (https://); by
                default that which it is read from
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
        heartbeats: str | Path | Store | None = None,
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
        self._store = open_store(address_only(run))
        # a wrong setting is an error now, not with every version
        shared_cache(self._store)
        name = id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        beats = self._store if heartbeats is None else open_store(address_only(heartbeats))
        self.heartbeats = Heartbeats(beats, name, heartbeat, address, self._status)
        """The heartbeats of this replica."""
        self._trust, self._max_model_gb = Trust.of(trust, refuse_delegated), max_model_gb
        self._resolve = resolver(reference)
        self._as_target = partial(ModelTarget, strict=strict, prove=prove)
        self._on_version = on_version
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._run: Run | None = None
        """None while there is no run at the address yet."""
        self._newest: int | None = None
        self._weights = LiveWeights(name, pause, on_name)
        self._failures = Failures()
        self._attempt: Attempt | None = None
        """The last one."""
        self._hurry_until = 0.0
        """Until when somebody waits for a version, by the monotonic clock."""

    # ── state ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def id(self) -> str:
        """Name of this replica in heartbeats."""
        return self.heartbeats.id

    @property
    def url(self) -> str:
        """Address of the run, without credentials."""
        return self._store.url

    @property
    def signatures(self) -> Literal["unchecked", "checked", "own"]:
        """Which signatures this replica requires: none, because no key is trusted; that of a trusted key, or of one
        to which it delegated; or, with `refuse_delegated`, that of the run's own key."""
        if self._trust is None:
            return "unchecked"
        return "own" if self._trust.refuse_delegated else "checked"

    @property
    def version(self) -> int | None:
        """The version of the weights, by their digest; None if they have none."""
        return self._weights.version

    @property
    def digest(self) -> StateDigest:
        """The state digest of the weights when they were last looked at."""
        return self._weights.digest

    @property
    def newest(self) -> int | None:
        """The newest version that this replica knows of."""
        return self._newest

    @property
    def lag(self) -> int | None:
        """Number of versions behind the newest that this replica knows of."""
        if self._newest is None:
            return None
        served = self._weights.served
        return self._newest - (served if served is not None else -1)

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of the last sync by phase: fetch, verify, decode, stage, apply, prove."""
        return {} if self._attempt is None else self._attempt.timings

    @property
    def trouble(self) -> str:
        """Why the last sync or poll failed; empty if it succeeded."""
        return self._failures.trouble

    @property
    def failures(self) -> int:
        """Number of syncs that failed."""
        return self._failures.count

    @property
    def rejected(self) -> list[tuple[Step, DeltawireError]]:
        """Links that the last sync could not use, and why; it found another way around them, or failed."""
        return [] if self._attempt is None else self._attempt.rejected

    @property
    def lock(self) -> threading.RLock:
        """Held during every sync: while you hold it, the weights do not change."""
        return self._lock

    # ── sync, follow ─────────────────────────────────────────────────────────────────────────────────────────────────

    def sync(
        self, model: Model | AnyTarget, version: int | str | None = None, *, progress: Progress | None = None
    ) -> int:
        """Bring the model's weights to a version (the newest by default), verify them, and return the version.

        Weights that are this version already are verified too: if something else wrote to them, they are loaded anew.

        `version` is a number, or text as on the command line: "v41", "latest", "-2", or a tag.
        After a failure the weights are still those of `replica.version`, which is None if they were lost.
        """
        with self._lock:
            run = self.opened()
            return run.anywhere(lambda: self._sync(run, model, version, progress))

    def _sync(self, run: Run, model: Model | AnyTarget, version: int | str | None, progress: Progress | None) -> int:
        clock, weights, failures, beats = time.perf_counter(), self._weights, self._failures, self.heartbeats
        want = run.newest() if version is None else run.resolve(version)
        if want is None:
            raise RunNotFound(f"the run at {self._store.url} has no version yet")
        if version is None and isinstance(self._store, MirroredStore):
            # the bucket in use may be behind the one before
            want = max(want, -1 if weights.version is None else weights.version)
        self._newest = want if version is None else max(want, self._newest or 0)
        attempt = self._attempt = Attempt(run, want, weights, failures, beats)
        previous = weights.version
        try:
            self._bind(model, run, want)
            previous = weights.start(want)
            attempt.reach(self._resolve, progress)
        except Exception as error:
            failures.failed(error)
            seconds = time.perf_counter() - clock
            beats.record(want, previous, seconds, attempt.fetched, attempt.timings, failures.trouble)
            beats.beat(failures.trouble, force=True)
            raise
        finally:
            weights.tell()
        failures.reached(want)
        seconds = time.perf_counter() - clock
        if want != previous:
            beats.record(want, previous, seconds, attempt.fetched, attempt.timings)
        beats.beat(force=True)
        if want != previous:
            self._tell(run, attempt, want, previous, seconds)
        return want

    def _tell(self, run: Run, attempt: Attempt, version: int, previous: int | None, seconds: float) -> None:
        if self._on_version is None:
            return
        try:
            changed, elements, timings = run.manifest(version).changed, run.schema.elements, dict(attempt.timings)
            self._on_version(
                Synced(version, previous, self.lag or 0, attempt.fetched, changed, elements, timings, seconds)
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
        Replica. Raises SchemaMismatch if the model is not the run's. What is no DeltawireError is raised too: a mistake
        in a target, an error of the device.
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
        weights, failures = self._weights, self._failures
        want, before = None, failures.trouble
        try:
            # held from the choice to the end of the sync, so that a pin set meanwhile is obeyed
            with self._lock:
                pinned = pin()
                if pinned is not None:
                    want = pinned if weights.served != pinned and not failures.is_refused(pinned) else None
                else:
                    want = self._next(model, every, watcher)
                if want is not None:
                    return self.sync(model, want)
            due = self._newest if pinned is None else pinned
            failures.trouble = failures.why_refused(due)
            self.heartbeats.beat(failures.trouble)
        except RunNotFound as error:
            if str(error) != before:
                log.info("waiting for a run at %s", self._store.url)
            failures.trouble = str(error)
        except DeltawireError as error:
            failures.trouble = str(error)
            if isinstance(error, RunReplaced) or (isinstance(error, SchemaError) and not self._is_bound_to(model)):
                raise  # another run or another model: no later version will fit either
            if str(error) != before:
                log.warning("%s: sync failed, still at version %s: %s", self.id, weights.version, error)
            if every and want is not None and isinstance(error, DAMAGE) and failures.skip(want):
                log.warning("%s: skipping version %d, which cannot be reached", self.id, want)
            if want is not None and isinstance(error, VersionRefused):
                failures.refuse(want, error)
            watcher.failed(error)
            self.heartbeats.beat(str(error))
        except Exception as error:
            failures.trouble = f"{type(error).__name__}: {error}"
            raise
        return None

    def hurry(self, seconds: float) -> None:
        """Let `follow` poll more often for so many seconds, because a request waits for a version."""
        self._hurry_until = max(self._hurry_until, time.monotonic() + seconds)

    def leave(self) -> None:
        """Take the server's address out of the heartbeat, so that no proxy sends clients there any more."""
        self.heartbeats.leave()

    def beat(self) -> None:
        """Write a heartbeat if one is due. Only needed by callers of `sync` that do not use `follow`."""
        self.heartbeats.beat(self._failures.trouble)

    def close(self) -> None:
        """End `follow` at its next poll. The weights do not change."""
        self._closed.set()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        version = "no version yet" if self.version is None else f"at version {self.version}"
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
        weights, failures = self._weights, self._failures
        if weights.version is None:
            if failures.is_refused(newest):
                return None
            if every:
                # continue from the version the model came with, which is yielded once, like any other
                self._bind(model, run, newest)
            return weights.version if weights.version is not None else newest
        if newest < weights.version or newest == weights.served:
            return None
        if not every:
            return None if failures.is_refused(newest) else newest
        want = max(weights.version, failures.skipped)
        while want < newest:
            want = following(run, want, newest)
            if not failures.is_refused(want):
                return want
        return None

    def _bind(self, model: Model | AnyTarget, run: Run, want: int) -> None:
        if self._is_bound_to(model):
            target = self._weights.target
        elif isinstance(model, Target):
            target = model
        else:
            # a model in memory may have one of these names, as `State` has
            implements(Target, model)
            target = self._as_target(model)
        self._weights.bind(target, run, want)

    def _is_bound_to(self, model: Model | AnyTarget) -> bool:
        target = self._weights.target
        return target is model or (isinstance(target, ModelTarget) and target.model is model)

    def _status(self) -> Status | None:
        """The content of the next heartbeat."""
        return None if self._run is None else (self._run.info.run, self._weights.served, self._newest, self.timings)
