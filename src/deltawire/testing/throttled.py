"""A store behind a link of limited bandwidth, to see what a slow network costs without root or a second machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from deltawire.store.base import Chunks, Fetched, ObjectInfo, Store, counted


class ThrottledStore:
    """Wraps a store and lets through `mbit_s` megabits per second in each direction, all threads together.

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
        self.inner = inner
        self.url = inner.url
        self.creates_exclusively = inner.creates_exclusively
        self._up, self._down = (_Direction(mbit_s * 1e6 / 8, clock, sleep) for _ in range(2))

    def get(self, key: str, *, limit: int | None = None) -> Fetched:
        fetched = self.inner.get(key, limit=limit)
        self._down.carry(len(fetched.data))
        return fetched

    def get_if_changed(self, key: str, etag: str | None, *, limit: int | None = None) -> Fetched | None:
        fetched = self.inner.get_if_changed(key, etag, limit=limit)
        self._down.carry(len(fetched.data) if fetched else 0)
        return fetched

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = self.inner.get_range(key, start, length)
        self._down.carry(len(data))
        return data

    def head(self, key: str) -> ObjectInfo:
        return self.inner.head(key)

    def put(self, key: str, data: bytes | Chunks) -> None:
        if callable(data):
            self.inner.put(key, counted(data, self._up.carry))
        else:
            self._up.carry(len(data))
            self.inner.put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._up.carry(len(data))
        self.inner.put_if_absent(key, data)

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        return self.inner.list(prefix, after)

    def delete(self, key: str) -> None:
        self.inner.delete(key)


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
