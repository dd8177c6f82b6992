"""The follower of the built-in server: it stages beside generation and writes between two steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ...core.digest import StateDigest
from ...replica.model import ModelTarget
from ...store import Store
from ..follower import Follower

OnVersion = Callable[[int, Mapping[str, float]], object]


class ServerFollower(Follower):
    """A follower of a model of this process.

    hold        entered around each write, so that nothing computes with the weights meanwhile
    wake        called whenever the weights are a version that may be served: what waits for one can go on
    on_version  called with each version that is served from now on, and the seconds by phase that it took to get there
    """

    def __init__(
        self,
        run: str | Store,
        model: Any,
        *,
        hold: Callable[[], AbstractContextManager[None]],
        wake: Callable[[], None],
        on_version: OnVersion = lambda version, timings: None,
        **options: Any,
    ) -> None:
        super().__init__(run, ModelTarget(model), pause=self._pause, **options)
        self.still = threading.Lock()
        """Held while weights are written, and by readers that need all of them at one version."""
        self._hold, self._wake, self._on_version = hold, wake, on_version
        self._served: int | None = None
        self._paused_s = 0.0
        """Seconds without tokens since the last version that was reached, those of writes that failed included."""

    def live(self) -> tuple[int | None, StateDigest]:
        # not replica.lock, which a sync holds while it fetches
        with self.still:
            return self.version, self._target.digest()

    @contextmanager
    def _pause(self) -> Iterator[None]:
        with self.still, self._hold():
            clock, timings = time.perf_counter(), self.replica.timings
            try:
                yield
            finally:
                self._paused_s += time.perf_counter() - clock
                timings["pause"] = self._paused_s

    def _arrived(self, version: int) -> None:
        self.caught_up.set()
        self._wake()
        if version != self._served:
            self._served, self._paused_s = version, 0.0
            self._on_version(version, dict(self.replica.timings))
