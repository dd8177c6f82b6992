"""Fetch a data object, whole or those parts of it that a reader needs, and check it.

Small objects stay in memory, larger ones in a file in memory, large ones go to a temporary file. Where the processes of
a host share a cache, objects are kept and read there, whole.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path

from blake3 import blake3

from ..core.errors import HashMismatch, ObjectNotFound, TruncatedFile
from ..core.manifest import Blob, File
from ..core.parallel import for_each
from ..core.temporary import spooling
from ..store import Store
from ..store.base import Cached, Settling
from .cache import hash_of, shared_cache

SMALL = 1 << 20
"""Bytes of an object that Python itself may copy. It holds its lock meanwhile, for which the threads of a server wait:
tens of milliseconds for 64 MB."""
IN_MEMORY = 64 << 20
"""Bytes of an object up to which no disk is needed."""
PART = 8 << 20
CONNECTIONS = 8

Progress = Callable[[int], None]
"""Called with the number of bytes that have arrived since the last call, from any thread."""


class FetchedObject:
    """The bytes of an object: in memory, or in an open file where there is a descriptor; or of some parts of it."""

    def __init__(self, size: int, descriptor: int = -1, *, in_memory: bool = False) -> None:
        """`in_memory`: whether the descriptor is of a file in memory, which can always be mapped."""
        self.size = size
        self.hashing_s = 0.0
        """Seconds of the fetch spent on the hash; 0 where another process of this host has done it."""
        self.fetched = size
        """Bytes that were fetched for it."""
        self.parts: list[tuple[int, int]] | None = None
        """First and last byte + 1 of the ranges that are here, ascending; None for all of it."""
        self._data = bytearray(size if descriptor < 0 else 0)
        self._descriptor = descriptor
        self._in_memory = in_memory

    def read(self, start: int, length: int) -> bytes:
        """Return bytes of it. RuntimeError for bytes that were not fetched."""
        if self.parts is not None:
            at = bisect_right(self.parts, start, key=lambda part: part[0]) - 1
            if length and (at < 0 or start + length > self.parts[at][1]):
                end = start + length
                raise RuntimeError(f"bytes {start:,} to {end:,} were not fetched: what they change is not held")
        if self._descriptor < 0:
            return bytes(memoryview(self._data)[start : start + length])
        parts = []
        # one call gives at most 2 GB, and may give less
        while length > 0 and (data := os.pread(self._descriptor, length, start)):
            parts.append(data)
            start, length = start + len(data), length - len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def chunks(self) -> Iterator[bytes]:
        """Yield all bytes, a few megabytes at a time."""
        for start in range(0, self.size, PART):
            yield self.read(start, min(PART, self.size - start))

    def save(self, path: Path) -> None:
        """Write it to a file, with holes where it was not fetched."""
        with open(path, "wb") as out:
            out.truncate(self.size)
            for first, end in [(0, self.size)] if self.parts is None else self.parts:
                out.seek(first)
                for start in range(first, end, PART):
                    out.write(self.read(start, min(PART, end - start)))

    def write(self, start: int, data: bytes) -> None:
        if self._descriptor < 0:
            self._data[start : start + len(data)] = data
            return
        rest = memoryview(data)
        while rest:
            done = os.pwrite(self._descriptor, rest, start)
            rest, start = rest[done:], start + done

    def hash(self) -> str:
        if self._descriptor < 0:
            return blake3(self._data).hexdigest(length=16)
        # a store that sent too little is told by the hash
        if not self._in_memory or os.fstat(self._descriptor).st_size != self.size:
            return hash_of(self._descriptor)
        # one call: in a busy server every other one would wait for the interpreter's lock
        with mmap.mmap(self._descriptor, self.size, access=mmap.ACCESS_READ) as mapped:
            return blake3(mapped).hexdigest(length=16)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> FetchedObject:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fetch(
    store: Store, blob: Blob | File, progress: Progress | None = None, *, shared: bool = True, open_objects: int = 1
) -> FetchedObject:
    """Fetch the object that a manifest names. Raises HashMismatch if it is not that object.

    shared         allow the cache of this host, if there is one (cache.py)
    open_objects   number of objects that are fetched and kept open at the same time: they share memory and connections
    """
    cache = shared_cache(store) if shared else None
    if cache is not None:
        moved = False

        def download(descriptor: int) -> None:
            nonlocal moved
            moved = True
            _download(store, blob, FetchedObject(blob.size, descriptor), progress, open_objects)

        descriptor = cache.obtain(blob, download)
        if descriptor is not None:
            if progress and not moved:
                progress(blob.size)
            return FetchedObject(blob.size, descriptor)
        if moved:
            progress = None  # already reported
    if blob.size <= IN_MEMORY // open_objects:
        descriptor = _file_in_memory() if blob.size > SMALL else -1
        fetched = FetchedObject(blob.size, descriptor, in_memory=True)
        return _download_or_close(store, blob, fetched, progress, open_objects)
    with spooling(f"the {blob.size:,} bytes of {blob.key}"):
        return _download_or_close(store, blob, FetchedObject(blob.size, _temporary()), progress, open_objects)


def room_for(blob: Blob | File, size: int, open_objects: int) -> FetchedObject:
    """Make room for so many bytes of an object, of which the others take none: in memory if these are few."""
    descriptor = _file_in_memory() if size <= IN_MEMORY // open_objects else -1
    with spooling(f"{size:,} bytes of {blob.key}"):
        into = FetchedObject(blob.size, descriptor if descriptor >= 0 else _temporary())
        try:
            os.truncate(into._descriptor, blob.size)
        except BaseException:
            into.close()
            raise
        return into


def _file_in_memory() -> int:
    """Descriptor of a file in memory, or -1: only Linux has them, and a host may forbid them."""
    try:
        return os.memfd_create("deltawire")
    except (AttributeError, OSError):
        return -1


def _temporary() -> int:
    """Descriptor of a file on the disk that has no name: nothing is left of it, whatever happens."""
    with tempfile.TemporaryFile(prefix="deltawire-") as file:
        return os.dup(file.fileno())


def _download_or_close(
    store: Store, blob: Blob | File, into: FetchedObject, progress: Progress | None, open_objects: int
) -> FetchedObject:
    try:
        return _download(store, blob, into, progress, open_objects)
    except BaseException:
        into.close()
        raise


def _download(
    store: Store, blob: Blob | File, into: FetchedObject, progress: Progress | None, open_objects: int
) -> FetchedObject:
    """Download all parts and check the hash. A bad transfer is repeated once before the object is blamed.

    A manifest names the object, so it has been put: a store that shows objects late is given that time.
    """

    def part(start: int) -> None:
        data = store.get_range(blob.key, start, min(PART, blob.size - start))
        into.write(start, data)
        if progress:
            progress(len(data))

    connections = max(1, min(CONNECTIONS // open_objects, -(-blob.size // PART)))
    visible_at = time.monotonic() + (store.settles_s if isinstance(store, Settling) else 0.0)
    pause, repeated = 0.1, False
    while True:
        try:
            # worth a request of its own only where the download would be several
            if blob.size > PART and (size := store.head(blob.key).size) != blob.size:
                raise HashMismatch(f"{blob.key} has {size:,} bytes, its manifest says {blob.size:,}")
            for_each(part, range(0, blob.size, PART), connections)
            clock = time.perf_counter()
            if (found := into.hash()) != blob.hash:
                raise HashMismatch(f"{blob.key} has the hash {found}, its manifest says {blob.hash}")
            into.hashing_s = time.perf_counter() - clock
            return into
        except ObjectNotFound:
            if repeated or time.monotonic() + pause > visible_at:
                raise
            time.sleep(pause)
            pause *= 2
        except (HashMismatch, TruncatedFile):
            if repeated:
                raise
            if isinstance(store, Cached):
                store.doubt(blob.key)
            repeated, progress = True, None
