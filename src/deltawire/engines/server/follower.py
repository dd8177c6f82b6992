"""The thread that keeps the weights current: everything but the write itself happens while tokens are made."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.digest import StateDigest
from ...core.errors import DeltawireError
from ...replica import Replica
from ...replica.model import ModelTarget
from ...store import Store

log = logging.getLogger("deltawire")


@dataclass(frozen=True, slots=True)
class Sync:
    """How the weights came to a version."""

    version: int
    pause_s: float
    """Seconds in which no token was made because of it."""
    total_s: float
    timings: dict[str, float]

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase, with the pause and the total among them."""
        return {**self.timings, "pause": self.pause_s, "total": self.total_s}


class Follower:
    """A control.Follower. `hold` keeps the weights from being computed with while they are written."""

    def __init__(
        self,
        run: str | Store,
        model: Any,
        *,
        hold: Callable[[], AbstractContextManager[None]],
        pin: int | None = None,
        poll: float = 1.0,
        id: str | None = None,
        reference: Path | None = None,
        on_sync: Callable[[Sync], None] = lambda sync: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.replica = Replica(run, id=id, reference=reference, pause=self._pause)
        self.last: Sync | None = None
        self.caught_up = threading.Event()
        """Set once the newest version of the time (or the pinned one) was reached."""
        self.syncs = 0
        self.failure: Exception | None = None
        """The thread has ended because of it: no later version will fit either."""
        self.still = threading.Lock()
        """Held while weights are written, and by whoever reads them all and wants one version."""
        self._target, self._hold = ModelTarget(model), hold
        self.pin, self._poll = pin, poll
        """`pin` is a version to stay at."""
        self._on_sync, self._on_failure = on_sync, on_failure
        self._paused_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deltawire-follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, seconds: float = 5.0) -> None:
        """Ends between two requests to the store; one that hangs is not waited for any longer."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    @property
    def version(self) -> int | None:
        return self.replica.version

    @property
    def state(self) -> str:
        """starting, healthy, degraded (serving, but the bucket cannot be followed), paused (waiting for a version that
        can be proven) or failed."""
        if self.failure is not None:
            return "failed"
        if not self.caught_up.is_set():
            return "starting"
        if self.version is None:
            return "paused"
        return "degraded" if self.replica.trouble else "healthy"

    @property
    def reason(self) -> str:
        """What is wrong; empty where nothing is."""
        return str(self.failure or self.replica.trouble)

    @property
    def phases(self) -> dict[str, float]:
        return {} if self.last is None else self.last.phases

    def live(self) -> tuple[int | None, StateDigest]:
        with self.still:
            return self.version, self._target.digest()

    def command(self, version: int | str | None, *, pin: bool = False) -> None:
        """Go to a version (the newest by default); with `pin`, stay there; a pin of None follows again."""
        if pin and version is None:
            self.pin = None
            return
        with self.replica.lock:
            clock, before = time.perf_counter(), self.version
            reached = self.replica.sync(self._target, version)
            if pin:
                self.pin = reached
            if reached != before:
                self._reached(reached, time.perf_counter() - clock)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        with self.still, self._hold():
            clock = time.perf_counter()
            try:
                yield
            finally:
                self._paused_s += time.perf_counter() - clock

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._follow()
                return
            except DeltawireError as error:
                # another model: no later version will fit either
                self.failure = error
                log.error("following the run has ended: %s", error)
                self._on_failure()
                return
            except Exception as error:
                # a write that failed was undone, so this version goes on; perhaps the next attempt has more luck
                self.replica.trouble = f"{type(error).__name__}: {error}"
                log.exception("%s stays at version %s", self.replica.id, self.version)
            self._stop.wait(self._poll)

    def _follow(self) -> None:
        clock = time.perf_counter()
        for version in self.replica.follow(self._target, poll=self._poll, stop=self._stop, pin=lambda: self.pin):
            self._reached(version, time.perf_counter() - clock)
            if self._stop.is_set():
                return
            clock = time.perf_counter()

    def _reached(self, version: int, seconds: float) -> None:
        self.syncs += 1
        timings = dict(self.replica.timings)
        # the wait for the version is no part of how it came
        spent = min(seconds, sum(timings.values()))
        self.last = Sync(version, self._paused_s, spent, timings)
        self._paused_s = 0.0
        self.caught_up.set()
        took = "  ".join(f"{name} {value * 1e3:.0f} ms" for name, value in timings.items())
        log.info("serving v%d  pause %.1f ms  %s", version, self.last.pause_s * 1e3, took)
        self._on_sync(self.last)
