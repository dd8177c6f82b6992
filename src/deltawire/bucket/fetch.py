"""Fetch a data object whole and checked.

What is small stays in memory, what is large goes to a temporary file. Where replicas of a host share a cache, all of
it goes there, and is read from there.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from blake3 import blake3

from ..core.errors import HashMismatch, ObjectNotFound, StoreFull, TruncatedFile
from ..core.manifest import Blob
from ..store import Store
from ..store.base import Settling
from .cache import Cache, hash_of

T = TypeVar("T")

IN_MEMORY = 64 << 20
PART = 8 << 20
CONNECTIONS = 8

Progress = Callable[[int], None]


class Fetched:
    """The verified bytes of an object: in memory, in a file that has no name, or in one that the host shares."""

    def __init__(self, data: bytes | bytearray | None, descriptor: int, size: int, hashing: float = 0.0) -> None:
        self._data, self._descriptor, self.size = data, descriptor, size
        self.hashing = hashing
        # seconds of the fetch that went into the hash; none where another process of this host did it

    def read(self, start: int, length: int) -> bytes:
        if isinstance(self._data, bytes):
            return self._data[start : start + length]
        if self._data is not None:
            return bytes(memoryview(self._data)[start : start + length])
        parts = []
        # one call gives at most 2 GB, and may give less
        while length > 0 and (data := os.pread(self._descriptor, length, start)):
            parts.append(data)
            start, length = start + len(data), length - len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Fetched:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fetch(
    store: Store, blob: Blob, progress: Progress | None = None, *, shared: bool = True, one_of: int = 1
) -> Fetched:
    """The object a manifest names, or HashMismatch. A bad transfer is tried once more before the object is blamed.

    `shared` lets it come from the cache of this host, if there is one (see cache.py). `one_of` is how many objects are
    fetched at the same time and stay open: they share the memory and the connections that one would have.
    """
    cache = Cache.of_this_host(store) if shared else None
    if cache is not None:
        moved = False

        def download(handle: int) -> None:
            nonlocal moved
            moved = True
            _twice(store, lambda again: _into_file(store, blob, handle, None if again else progress, one_of))

        handle = cache.obtain(blob, download)
        if handle is not None:
            if progress and not moved:
                progress(blob.size)
            return Fetched(None, handle, blob.size)
        if moved:
            # it is only told once
            progress = None
    return _twice(store, lambda again: _fetch(store, blob, None if again else progress, one_of))


def _twice(store: Store, work: Callable[[bool], T]) -> T:
    try:
        return _when_there(store, lambda: work(False))
    except (HashMismatch, TruncatedFile):
        return work(True)


def _when_there(store: Store, work: Callable[[], T]) -> T:
    """A manifest names the object, so it was put; a store that takes its time to show it is given that time."""
    end = time.monotonic() + (store.settles_s if isinstance(store, Settling) else 0.0)
    pause = 0.1
    while True:
        try:
            return work()
        except ObjectNotFound:
            if time.monotonic() + pause > end:
                raise
        time.sleep(pause)
        pause *= 2


def _fetch(store: Store, blob: Blob, progress: Progress | None, one_of: int) -> Fetched:
    if blob.size <= IN_MEMORY // one_of:
        _check_size(store, blob)
        data = _in_memory(store, blob, progress, one_of)
        return Fetched(data, -1, blob.size, _check(blob, lambda: blake3(data).hexdigest(length=16)))
    try:
        # it has no name: nothing is left of it, however we end
        with tempfile.TemporaryFile(prefix="deltawire-") as file:
            hashing = _into_file(store, blob, file.fileno(), progress, one_of)
            return Fetched(None, os.dup(file.fileno()), blob.size, hashing)
    except OSError as error:
        raise StoreFull(
            f"no room for the {blob.size:,} bytes of {blob.key} in {tempfile.gettempdir()}: {error}"
        ) from error


def _into_file(store: Store, blob: Blob, handle: int, progress: Progress | None, one_of: int) -> float:
    _check_size(store, blob)
    if os.fstat(handle).st_size != blob.size:
        os.truncate(handle, blob.size)
    _parts(store, blob, lambda start, data: _write(handle, data, start), progress, one_of)
    return _check(blob, lambda: hash_of(handle))


def _write(handle: int, data: bytes, start: int) -> None:
    rest = memoryview(data)
    while rest:
        done = os.pwrite(handle, rest, start)
        rest, start = rest[done:], start + done


def _check_size(store: Store, blob: Blob) -> None:
    """What has the wrong size need not be fetched. Worth a request of its own only where it would be several."""
    if blob.size > PART and (size := store.head(blob.key).size) != blob.size:
        raise HashMismatch(f"{blob.key} has {size:,} bytes, its manifest says {blob.size:,}")


def _in_memory(store: Store, blob: Blob, progress: Progress | None, one_of: int) -> bytes | bytearray:
    if blob.size <= PART:
        data = store.get_range(blob.key, 0, blob.size)
        if progress:
            progress(len(data))
        return data
    whole = bytearray(blob.size)

    def keep(start: int, data: bytes) -> None:
        whole[start : start + len(data)] = data

    _parts(store, blob, keep, progress, one_of)
    return whole


def _parts(
    store: Store, blob: Blob, keep: Callable[[int, bytes], object], progress: Progress | None, one_of: int
) -> None:
    def one(start: int) -> None:
        data = store.get_range(blob.key, start, min(PART, blob.size - start))
        keep(start, data)
        if progress:
            progress(len(data))

    with ThreadPoolExecutor(max(1, CONNECTIONS // one_of), thread_name_prefix="deltawire-fetch") as pool:
        for _ in pool.map(one, range(0, blob.size, PART)):
            pass


def _check(blob: Blob, hash: Callable[[], str]) -> float:
    """HashMismatch, or the seconds it took to find out that there is none."""
    clock = time.perf_counter()
    found = hash()
    if found != blob.hash:
        raise HashMismatch(f"{blob.key} has the hash {found}, its manifest says {blob.hash}")
    return time.perf_counter() - clock
