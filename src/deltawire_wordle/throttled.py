"""A store behind a link of limited bandwidth, to see what a slow network costs without root or a second machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from deltawire.store import Store
from deltawire_wordle.counting import CountingStore


class ThrottledStore(CountingStore):
    """Wraps a store and lets through `mbit_s` megabits per second in each direction, all threads together. Counts too.

    Only the bytes of objects are counted: requests without them (heads, listings, an unchanged object) take no time.
    """

    def __init__(
        self,
        inner: Store,
        mbit_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._up, self._down = (_Direction(mbit_s * 1e6 / 8, clock, sleep) for _ in range(2))

    def _read(self, size: int) -> None:
        super()._read(size)
        self._down.carry(size)

    def _write(self, size: int) -> None:
        super()._write(size)
        self._up.carry(size)


class _Direction:
    """One direction of a link: transfers follow each other, so that together they are as fast as the link."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._lock = threading.Lock()
        self._free_at = clock()

    def carry(self, size: int) -> None:
        """Return when this many bytes have passed, after those that were there first."""
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now) + size / self._bytes_per_s
            wait = self._free_at - now
        self._sleep(wait)
