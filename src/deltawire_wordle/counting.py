"""A store that counts requests and bytes, for tests that limit the cost of an operation."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator

from deltawire.errors import Unsupported
from deltawire.store import Browsing, Chunks, Fetched, Level, ObjectInfo, Store


class CountingStore:
    """Wraps a store and counts its requests and bytes. Thread-safe.

    requests    calls by method, including failed ones; a listing is one call, however many pages it has
    bytes_in    bytes read from the store
    bytes_out   bytes sent to the store, including repeated and failed attempts
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self.creates_exclusively = inner.creates_exclusively
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Set all counters to zero."""
        with self._lock:
            self.requests: Counter[str] = Counter()
            self.bytes_in = 0
            self.bytes_out = 0

    def get(self, key: str, *, limit: int | None = None) -> Fetched:
        self._count("get")
        fetched = self.inner.get(key, limit=limit)
        self._read(len(fetched.data))
        return fetched

    def get_if_changed(self, key: str, etag: str | None, *, limit: int | None = None) -> Fetched | None:
        self._count("get_if_changed")
        fetched = self.inner.get_if_changed(key, etag, limit=limit)
        self._read(len(fetched.data) if fetched else 0)
        return fetched

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._count("get_range")
        data = self.inner.get_range(key, start, length)
        self._read(len(data))
        return data

    def head(self, key: str) -> ObjectInfo:
        self._count("head")
        return self.inner.head(key)

    def put(self, key: str, data: bytes | Chunks) -> None:
        self._count("put")
        if callable(data):
            self.inner.put(key, _counted(data, self._write))
        else:
            self._write(len(data))
            self.inner.put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._count("put_if_absent")
        self._write(len(data))
        self.inner.put_if_absent(key, data)

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        self._count("list")
        return self.inner.list(prefix, after)

    def folders(self, prefix: str = "") -> Level:
        self._count("folders")
        if not isinstance(self.inner, Browsing):
            raise Unsupported(f"{self.url} cannot list one level at a time")
        return self.inner.folders(prefix)

    def delete(self, key: str) -> None:
        self._count("delete")
        self.inner.delete(key)

    def _count(self, verb: str) -> None:
        with self._lock:
            self.requests[verb] += 1

    def _read(self, size: int) -> None:
        with self._lock:
            self.bytes_in += size

    def _write(self, size: int) -> None:
        with self._lock:
            self.bytes_out += size


def _counted(chunks: Chunks, count: Callable[[int], None]) -> Chunks:
    """The same chunks; `count` is called with the bytes of each before it is passed on."""

    def passed() -> Iterator[bytes | memoryview]:
        for chunk in chunks():
            count(memoryview(chunk).nbytes)
            yield chunk

    return passed
