"""What an engine adds to a replica: pin, state, naming the version, holding generation while the weights have no name.

Runs in the API server, in a thread of its own, so that fetching never holds up a request.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ...core.digest import StateDigest
from ...core.errors import SchemaError, SchemaMismatch
from ...replica import Replica, Synced
from ...store import Store
from .target import EngineTarget, WorkerError

log = logging.getLogger("deltawire")


class EngineFollower:
    """Keeps the weights of a vLLM server at a version of a run, and says how it is.

    pin         stay at this version, older ones included
    following   go to every new version; else catch up once and then wait for `command`
    on_failure  called when the run turns out to be one that this server can never load
    """

    def __init__(
        self,
        run: str | Store,
        target: EngineTarget,
        *,
        pin: int | None = None,
        following: bool = True,
        reference: str | None = None,
        heartbeat: float = 10.0,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.replica = Replica(
            run, reference=reference, heartbeat=heartbeat, on_version=self._moved, on_name=self._named
        )
        self.target = target
        self.pin = pin
        self.syncs = 0
        """Versions reached since the start."""
        self.phases: dict[str, float] = {}
        """Seconds of the last sync that moved the weights, by phase."""
        self._following = following
        self._on_failure = on_failure
        self._failed = False
        self._served = False
        """Whether the weights ever had a name."""
        self._drafted: int | None = None
        """The version that a draft model was loaded beside."""
        self._stop = threading.Event()

    @property
    def version(self) -> int | None:
        return self.replica.version

    @property
    def state(self) -> str:
        """starting, healthy, degraded (serves a version, but not the one it should), paused (serves nothing) or failed
        (the run is of another model)."""
        if self._failed:
            return "failed"
        if self.version is None and (self._served or self.target.spoiled):
            return "paused"
        if self.version is None or self.target.held:
            return "starting"
        return "degraded" if self.reason else "healthy"

    @property
    def reason(self) -> str:
        return self.replica.trouble or self._stale_draft

    @property
    def _stale_draft(self) -> str:
        """Not wrong, but slower with every version: fewer of the tokens that a draft proposes are taken."""
        if not self.target.has_draft or self.version == self._drafted:
            return ""
        return f"draft model is at version {self._drafted}: the run carries no weights for it"

    def live(self) -> tuple[int | None, StateDigest]:
        """The version, and the digest of the weights that tokens are computed with, while nobody writes them."""
        if self.target.refused:
            raise SchemaMismatch(f"vLLM's weights cannot be read as a checkpoint here: {self.target.refused}")
        with self.replica.lock:
            return self.version, self.target.live_digest()

    def loop(self, poll: float) -> None:
        """Catch up, then follow until `stop`. What goes wrong is outlived, and said by `state` and `reason`."""
        while not self._stop.is_set():
            try:
                for _ in self.replica.follow(self.target, poll=poll, stop=self._stop, pin=self._stay):
                    pass
            except SchemaError as error:
                # another model: no later version will fit either
                self._failed = True
                log.error("this server cannot follow %s: %s", self.replica.url, error)
                self._on_failure()
                return
            except Exception:
                log.exception("following failed, and is tried again")
                self._stop.wait(max(poll, 1.0))

    def stop(self) -> None:
        self._stop.set()

    def command(self, version: int | str | None, *, pin: bool = False) -> None:
        """Go to a version (the newest by default); with `pin`, stay there; a pin of None follows again.

        After an error the pin is what it was, and so are the weights.
        """
        if pin and version is None:
            self.pin = None
            return
        with self.replica.lock:
            reached = self.replica.sync(self.target, version)
            if pin:
                self.pin = reached

    def _stay(self) -> int | None:
        """The version to stay at; None to follow the run."""
        return self.version if self.pin is None and not self._following else self.pin

    def _named(self, version: int | None) -> None:
        """Weights that have a name are served, whatever else went wrong; weights that have lost theirs are not."""
        if version is None:
            if (self._served or self.target.spoiled) and not self.target.held:
                try:
                    self.target.pause()
                except WorkerError:
                    log.exception("weights that have no name are perhaps still being served")
        elif self.target.named != version or self.target.held:
            self.target.name(version)
        if version is not None and not self._served:
            self._served, self._drafted = True, version
            if self.target.has_draft:
                log.warning("the draft model stays at version %d: the run carries no weights for it", version)

    def _moved(self, synced: Synced) -> None:
        self.syncs += 1
        self.phases = {**synced.timings, "total": synced.seconds}
        took = "  ".join(f"{phase} {seconds * 1e3:.0f} ms" for phase, seconds in self.phases.items())
        log.info("serving v%d  %s", synced.version, took)
