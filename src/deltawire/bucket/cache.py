"""Verified objects that the processes of one host share: `DELTAWIRE_CACHE=/path`, off where it is not set.

    <cache>/<hash>         an object, named by the hash its manifest states; its mtime says when it was last used
    <cache>/<hash>.part    an object being fetched; the process that fetches it holds an flock on it

The part file is the lock. The kernel frees it when its holder dies, and the next process writes the same file from the
start. After waiting for a lock a process checks that the name still means the locked file: if not, it has become the
object, or was removed. Files are removed by unlink alone, so a process that has one open reads it to the end.

A cache saves transfers and is never required: where it is full, cannot be written, or the process that fetches an
object makes no progress, the others fetch for themselves and log it once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from ..core.errors import Misconfigured
from ..core.manifest import Blob, File
from ..core.parallel import default_threads
from ..core.settings import gigabytes
from ..store import Store

log = logging.getLogger("deltawire")

DEFAULT_GB = 20.0
PATIENCE_S = 30.0
"""How long to wait for another process that fetches an object while it writes nothing."""

_POLL_S = 0.02
_READ = 8 << 20
_PART = ".part"

_said: set[str] = set()


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder of verified objects."""

    folder: Path
    limit: int
    """Bytes, objects being fetched included."""

    def obtain(self, blob: Blob | File, download: Callable[[int], None]) -> int | None:
        """Return an open file with exactly this object, fetched by `download(descriptor)` if no other process has it.

        None if the cache cannot be used. `download` checks what it writes; its errors are raised.
        """
        if blob.size > self.limit:
            _warn_once(f"{blob.size:,} bytes", f"{blob.key} is larger than the whole cache {self.folder}: not kept")
            return None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while True:
                if (handle := self._open(blob)) is not None:
                    return handle
                with self._claimed(self.folder / (blob.hash + _PART)) as part:
                    if part is None:
                        return None
                    if self._fetch(blob, part, download):
                        return os.dup(part)
        except OSError as error:
            why = "is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"cannot be used: {error.strerror}"
            _warn_once(why, f"the cache {self.folder} {why}; fetching without it")
            return None

    def _open(self, blob: Blob | File) -> int | None:
        """Open the object if it is here and unchanged: disks fail, and others can write here too."""
        path = self.folder / blob.hash
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            if os.fstat(handle).st_size == blob.size and hash_of(handle) == blob.hash:
                with contextlib.suppress(PermissionError):
                    os.utime(handle)
                return os.dup(handle)
        finally:
            os.close(handle)
        log.warning("%s was damaged in the cache %s: fetching it again", blob.key, self.folder)
        path.unlink(missing_ok=True)
        return None

    def _fetch(self, blob: Blob | File, part: int, download: Callable[[int], None]) -> bool:
        """Fill the locked part file, unless another process was first."""
        path, final = self.folder / (blob.hash + _PART), self.folder / blob.hash
        if not _is_named(part, path):
            return False
        try:
            if final.exists():
                path.unlink()
                return False
            if os.fstat(part).st_size != blob.size:
                # only where needed: those who wait take every write for progress
                os.truncate(part, blob.size)
            self._make_room(keep=path)
            download(part)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        os.replace(path, final)
        return True

    @contextlib.contextmanager
    def _claimed(self, path: Path) -> Iterator[int | None]:
        """Lock the part file; yields None if the process that holds it has stopped writing."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            progress, since = 0, time.monotonic()
            while not try_lock(handle):
                if (written := os.fstat(handle).st_mtime_ns) != progress:
                    progress, since = written, time.monotonic()
                elif time.monotonic() - since > PATIENCE_S:
                    log.warning("another process fetches %s and makes no progress: not waiting for it", path)
                    yield None
                    return
                time.sleep(_POLL_S)
            yield handle
            # also for the copy of the descriptor that outlives this one
            fcntl.flock(handle, fcntl.LOCK_UN)
        finally:
            os.close(handle)

    def _make_room(self, keep: Path) -> None:
        """Remove what crashed processes left, then the least recently used objects, down to the limit."""
        found: list[tuple[float, int, str]] = []
        total = 0
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError, PermissionError):  # gone meanwhile, or another user's
                    stat = entry.stat()
                    if not entry.name.endswith(_PART):
                        found.append((stat.st_mtime, stat.st_size, entry.path))
                    elif entry.path != str(keep) and _swept(entry.path):
                        continue
                    total += stat.st_size
        for _, size, path in sorted(found):
            if total <= self.limit:
                return
            with contextlib.suppress(FileNotFoundError, PermissionError):
                os.unlink(path)
                total -= size


def shared_cache(store: Store) -> Cache | None:
    """Return the cache that DELTAWIRE_CACHE names; None for a store in a folder, which would only be copied."""
    folder = cache_folder()
    if folder is None or store.url.startswith("file:"):
        return None
    return Cache(folder, gigabytes("DELTAWIRE_CACHE_GB", DEFAULT_GB))


def cache_folder() -> Path | None:
    """Return the folder that DELTAWIRE_CACHE names; None where it is not set. Raises Misconfigured for an address."""
    named = os.environ.get("DELTAWIRE_CACHE", "")
    if "://" in named:
        raise Misconfigured(
            f"DELTAWIRE_CACHE is {named.partition('://')[0][:20]}://…: it is a folder of this host. The servers of a "
            "site share a proxy: read the run from its address (docs/https.md)"
        )
    return Path(named).expanduser() if named else None


def hash_of(handle: int) -> str:
    """blake3 of an open file, from its start. Read, not mapped: a map of a large anchor would count as our memory."""
    whole = blake3(max_threads=default_threads())
    start = 0
    while data := os.pread(handle, _READ, start):
        whole.update(data)
        start += len(data)
    return whole.hexdigest(length=16)


def try_lock(handle: int) -> bool:
    """Lock an open file or folder for this process; False if another process has it locked."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_named(handle: int, path: Path | str) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _swept(path: str) -> bool:
    """Remove a part file that no process has locked."""
    handle = os.open(path, os.O_RDWR)
    try:
        if not try_lock(handle) or not _is_named(handle, path):
            return False
        os.unlink(path)
        return True
    finally:
        os.close(handle)


def _warn_once(what: str, message: str) -> None:
    if what not in _said:
        _said.add(what)
        log.warning(message)
