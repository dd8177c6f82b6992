"""Fetch a data object whole and checked. What is small stays in memory, what is large goes to a temporary file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from ..core.errors import HashMismatch, StoreFull, TruncatedFile
from ..core.manifest import Blob
from ..store import Store

IN_MEMORY = 64 << 20
PART = 8 << 20
CONNECTIONS = 8

Progress = Callable[[int], None]


class Fetched:
    """The verified bytes of an object. Close it to remove what it left on disk."""

    def __init__(self, data: bytes | None, path: Path | None, size: int) -> None:
        self._data, self._path, self.size = data, path, size
        self._descriptor = os.open(path, os.O_RDONLY) if path else -1

    def read(self, start: int, length: int) -> bytes:
        if self._data is not None:
            return self._data[start : start + length]
        parts = []
        # one call gives at most 2 GB, and may give less
        while length > 0 and (data := os.pread(self._descriptor, length, start)):
            parts.append(data)
            start, length = start + len(data), length - len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        if self._path is not None:
            os.close(self._descriptor)
            self._path.unlink(missing_ok=True)
            self._path = None

    def __enter__(self) -> Fetched:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fetch(store: Store, blob: Blob, progress: Progress | None = None) -> Fetched:
    """The object a manifest names, or HashMismatch. A bad transfer is tried once more before the object is blamed."""
    try:
        return _fetch_once(store, blob, progress)
    except (HashMismatch, TruncatedFile):
        return _fetch_once(store, blob, None)


def _fetch_once(store: Store, blob: Blob, progress: Progress | None) -> Fetched:
    size = store.head(blob.key).size if blob.size > PART else blob.size
    if size != blob.size:
        raise HashMismatch(f"{blob.key} has {size:,} bytes, its manifest says {blob.size:,}")
    if blob.size <= IN_MEMORY:
        data = _in_memory(store, blob, progress)
        _check(blob, blake3(data).hexdigest(length=16))
        return Fetched(data, None, blob.size)
    handle, name = tempfile.mkstemp(prefix="deltawire-", suffix=".safetensors")
    path = Path(name)
    try:
        os.truncate(handle, blob.size)
        _parts(store, blob, lambda start, data: os.pwrite(handle, data, start), progress)
        _check(blob, _hash_file(handle, blob.size))
        return Fetched(None, path, blob.size)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise StoreFull(f"no room for the {blob.size:,} bytes of {blob.key} in {path.parent}: {error}") from error
        raise
    finally:
        os.close(handle)


def _in_memory(store: Store, blob: Blob, progress: Progress | None) -> bytes:
    if blob.size <= PART:
        data = store.get_range(blob.key, 0, blob.size)
        if progress:
            progress(len(data))
        return data
    whole = bytearray(blob.size)

    def keep(start: int, data: bytes) -> None:
        whole[start : start + len(data)] = data

    _parts(store, blob, keep, progress)
    return bytes(whole)


def _parts(store: Store, blob: Blob, keep: Callable[[int, bytes], object], progress: Progress | None) -> None:
    def one(start: int) -> None:
        data = store.get_range(blob.key, start, min(PART, blob.size - start))
        keep(start, data)
        if progress:
            progress(len(data))

    with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="deltawire-fetch") as pool:
        for _ in pool.map(one, range(0, blob.size, PART)):
            pass


def _hash_file(handle: int, size: int) -> str:
    # read, not mapped: a map of a large anchor would count as our memory
    whole = blake3(max_threads=blake3.AUTO)
    for start in range(0, size, PART):
        whole.update(os.pread(handle, PART, start))
    return whole.hexdigest(length=16)


def _check(blob: Blob, found: str) -> None:
    if found != blob.hash:
        raise HashMismatch(f"{blob.key} has the hash {found}, its manifest says {blob.hash}")
