"""The thread that keeps the weights of a rollout server at a version of a run. Engines extend `Follower`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ..bucket.run import Run
from ..bucket.versions import exact
from ..core.digest import StateDigest
from ..core.errors import DeltawireError, Misconfigured, RunReplaced, SchemaError
from ..replica import Replica, Synced
from ..replica.model import ModelTarget
from ..replica.target import AnyTarget, Target
from ..store import Store

log = logging.getLogger("deltawire")


class Follower:
    """Keeps the weights of a server at a version of a run, and reports its state. An engine extends it by `arrived`,
    which sets `caught_up`.

    target      the live weights: a model, or a Target
    pin         stay at this version, older ones included
    poll        seconds between two looks at the run, at most
    following   go to every new version; else catch up once and then wait for `command`
    on_failure  called when the run can never be followed; `failure` has the reason
    options     of the replica: id, reference, heartbeat, address, pause
    """

    fatal: ClassVar[tuple[type[DeltawireError], ...]] = (SchemaError, RunReplaced)
    """Errors after which no later version will fit either."""

    def __init__(
        self,
        run: str | Store,
        target: Any,
        *,
        pin: int | None = None,
        poll: float = 1.0,
        following: bool = True,
        on_failure: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> None:
        self.replica = Replica(run, on_version=self._moved, on_name=self._renamed, **options)
        self.pin = pin
        self.syncs = 0
        """Versions reached since the start. Weights that were the newest version from the start are not counted."""
        self.phases: Mapping[str, float] = {}
        """Seconds of the last sync that changed the weights, by phase."""
        self.caught_up = threading.Event()
        """Set once the weights were a version that may be served."""
        self.failure: DeltawireError | None = None
        """Why following has ended."""
        self.listeners: set[Callable[[], None]] = set()
        """Called whenever the version may have changed, by the thread that syncs; they must return quickly."""
        self.target: AnyTarget = target if isinstance(target, Target) else ModelTarget(target)
        self._poll, self._following, self._on_failure = poll, following, on_failure
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.loop, name="deltawire-follower", daemon=True)

    @staticmethod
    def pinned(run: str | Store, version: int | str | None, setting: str = "DELTAWIRE_PIN") -> int | None:
        """Return the version to stay at that a setting names, if it names one."""
        if not isinstance(version, str):
            return version
        try:
            named = exact(version)
            return Run.open(run).resolve(version) if named is None else named
        except DeltawireError as error:
            raise Misconfigured(f"{setting} is {version[:80]!r}: {error}") from error

    def start(self) -> None:
        """Run `loop` in a thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether that thread is running."""
        return self._thread.is_alive()

    @property
    def version(self) -> int | None:
        """The version of the weights; None if they have none."""
        return self.replica.version

    @property
    def state(self) -> str:
        """One of names.STATES.

        starting    no version has been reached yet
        degraded    serves a version, but the run cannot be followed; `reason` says why
        paused      the weights are no version any more; nothing is served
        failed      the run can never be followed
        """
        if self.failure is not None:
            return "failed"
        if not self.caught_up.is_set():
            return "starting"
        if self.version is None:
            return "paused"
        return "degraded" if self.reason else "healthy"

    @property
    def reason(self) -> str:
        """The problem; empty if there is none."""
        return str(self.failure or self.replica.trouble)

    def live(self) -> tuple[int | None, StateDigest]:
        """Return the version and the digest of the live weights, computed while nothing writes them."""
        with self.replica.lock:
            return self.version, self.target.digest()

    def loop(self) -> None:
        """Catch up, then follow until `stop`. Errors are logged and shown by `state`; only `fatal` ones end it."""
        try:
            while not self._stop.is_set():
                try:
                    for version in self.replica.follow(self.target, poll=self._poll, stop=self._stop, pin=self._stay):
                        self.arrived(version)
                        self._tell()
                except self.fatal as error:
                    self.failure = error
                    log.error("this server cannot follow %s: %s", self.replica.url, error)
                    self._on_failure()
                    return
                except Exception:
                    # a write that failed was undone, so the present version is served
                    log.exception("sync failed, still at version %s; retrying", self.version)
                    self._stop.wait(max(self._poll, 1.0))
        finally:
            # the heartbeat counts as fresh for a while, but no client should come any more
            self.replica.leave()

    def stop(self, seconds: float = 0.0) -> None:
        """End `loop` between two requests to the store; wait so long for its thread."""
        self._stop.set()
        if self.alive and seconds:
            self._thread.join(seconds)

    def command(self, version: int | str | None, *, pin: bool = False) -> None:
        """Go to a version (the newest by default). With `pin`, stay there; a pin of None follows again.

        After an error the pin and the weights are unchanged.
        """
        if pin and version is None:
            self.pin = None
            return
        with self.replica.lock:
            reached = self.replica.sync(self.target, version)
            if pin:
                self.pin = reached
            self.arrived(reached)
            self._tell()

    def hurry(self, seconds: float) -> None:
        """Look for versions more often for so many seconds, because somebody waits for one."""
        self.replica.hurry(seconds)

    def _stay(self) -> int | None:
        """Return the version to stay at, or None to follow the run."""
        return self.version if self.pin is None and not self._following else self.pin

    def _moved(self, synced: Synced) -> None:
        """Note a sync that changed the weights."""
        self.phases = {**synced.timings, "total": synced.seconds}
        self.syncs += 1
        took = "  ".join(f"{phase} {seconds * 1e3:.0f} ms" for phase, seconds in self.phases.items())
        log.info("serving v%d  %s", synced.version, took)

    def _renamed(self, version: int | None) -> None:
        self.named(version)
        self._tell()

    def _tell(self) -> None:
        for listener in tuple(self.listeners):
            listener()

    def named(self, version: int | None) -> None:
        """Called after every sync that was tried, and with None as soon as the weights are found to be no version."""

    def arrived(self, version: int) -> None:
        """Called after every sync that succeeded, also where the weights were that version already."""
