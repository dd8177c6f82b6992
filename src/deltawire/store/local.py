"""A store in a folder: `file://…` or a bare path, shared by any number of processes.

    put             write .tmp-…  → fsync → rename over the key → fsync the folder
    put_if_absent   write .tmp-…  → fsync → link to the key (fails when taken) → drop the temp name → fsync the folder

Both steps that make an object visible are atomic in the kernel, also between processes. A crash leaves a `.tmp-…` file,
which no listing shows and `sweep` removes.

What a folder cannot do and a bucket can: hold an object `a` beside an object `a/b`. Deleting leaves empty folders
behind, because removing one could pull it away under another process's put. Folders that are symlinks are not listed.

An object is a regular file, or a symlink to one. Anything else under a key (a FIFO, a device, a socket) is no object:
it is opened without blocking, looked at, and never read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from deltawire.core.errors import (
    AlreadyExists,
    DeltawireError,
    ObjectNotFound,
    PermissionDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TruncatedFile,
    UnsafeName,
)
from deltawire.store.base import (
    TEMP_PREFIX,
    Chunks,
    Fetched,
    Level,
    ObjectInfo,
    check_key,
    check_listing,
    check_prefix,
    check_range,
    check_size,
    is_key,
)

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
# What network file systems and busy machines answer now and not a second later. ENOENT is among them because it can
# only mean, in a write, that the folder was removed between two steps.
_TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.EMFILE, errno.ENOENT}
# A socket and a circle of symlinks cannot be opened at all.
_NO_OBJECT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ELOOP}
_TICK_NS = 10_000_000
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class LocalStore:
    """A folder, on a local disk or a network file system with hard links."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self.url = self.root.as_uri()
        self.creates_exclusively = True

    def get(self, key: str, *, limit: int | None = None) -> Fetched:
        path = self._path(key)
        with self._border(key, reading=True), self._open(key, path) as file:
            # The open file stays the same object whatever is renamed over its name, so data and etag belong together.
            return self._read(key, file, os.fstat(file.fileno()), limit)

    def get_if_changed(self, key: str, etag: str | None, *, limit: int | None = None) -> Fetched | None:
        path = self._path(key)
        with self._border(key, reading=True), self._open(key, path) as file:
            found = os.fstat(file.fileno())
            return None if _etag(found) == etag else self._read(key, file, found, limit)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        path = self._path(key)
        with self._border(key, reading=True), self._open(key, path) as file:
            size = os.fstat(file.fileno()).st_size
            # Looked up before reading: `length` may come from a hostile header, and read() allocates that much.
            if start + length > size:
                raise TruncatedFile(f"{self._where(key)} ends at byte {size}, before byte {start + length}")
            file.seek(start)
            return file.read(length)

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self._border(key, reading=True):
            found = os.stat(path)
        self._check_regular(key, found)
        return _info(key, found)

    def put(self, key: str, data: bytes | Chunks) -> None:
        path = self._path(key)
        with self._staged(key, path, data) as temp, self._border(key):
            os.replace(temp, path)
            sync_folder(os.path.dirname(path))

    def put_if_absent(self, key: str, data: bytes) -> None:
        path = self._path(key)
        if os.path.lexists(path):
            raise AlreadyExists(f"{self._where(key)} exists already")
        with self._staged(key, path, data) as temp, self._border(key):
            self._link(key, temp, path)
            sync_folder(os.path.dirname(path))

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        return self._walk(check_prefix(prefix), prefix, after or "")

    def folders(self, prefix: str = "") -> Level:
        folder = check_prefix(prefix)
        entries = [(folder + name, found) for name, found in self._entries(folder)]
        return [key for key, found in entries if found is None], [_info(key, x) for key, x in entries if x is not None]

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._border(key):
            try:
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                return
            except OSError:
                if os.path.isdir(path):  # a folder of other keys: under this key there is no object
                    return
                raise
            sync_folder(os.path.dirname(path))

    def sweep(self, older_than_s: float = 86_400.0, *, at: float | None = None) -> int:
        """Remove what crashed writers left behind; returns how many files.

        A live writer touches its file with every chunk: `older_than_s` need only exceed the longest pause in one put.
        """
        horizon = (time.time() if at is None else at) - older_than_s
        removed = 0
        for folder, folders, names in os.walk(self.root):
            inside = os.path.relpath(folder, self.root)
            folders[:] = [name for name in folders if is_key(os.path.normpath(os.path.join(inside, name)))]
            for name in names:
                if name.startswith(TEMP_PREFIX):
                    temp = os.path.join(folder, name)
                    with self._border(name), contextlib.suppress(FileNotFoundError):
                        if os.stat(temp, follow_symlinks=False).st_mtime <= horizon:
                            os.unlink(temp)
                            removed += 1
        return removed

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def _staged(self, key: str, path: str, data: bytes | Chunks) -> Iterator[str]:
        """Write a temp file next to `path` and sync it; removed on the way out unless it was renamed."""
        temp = os.path.join(os.path.dirname(path), f"{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
        try:
            with self._border(key):
                file = os.fdopen(_create(temp), "wb")
            try:
                # Only our own writes are inside the border: an OSError of the producer is the producer's to explain.
                for chunk in data() if callable(data) else (data,):
                    with self._border(key):
                        file.write(chunk)
                with self._border(key):
                    file.flush()
                    os.fsync(file.fileno())
                    _stamp(file.fileno())
            finally:
                # After a failed write, close() flushes again and fails again; the first error is the one to show.
                with contextlib.suppress(OSError):
                    file.close()
            yield temp
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temp)

    def _link(self, key: str, temp: str, path: str) -> None:
        try:
            os.link(temp, path)
        except FileExistsError:
            # NFS may carry a link out, lose the answer and report the repeat as a conflict; a second name is the proof.
            if os.stat(temp).st_nlink < 2:
                raise AlreadyExists(f"{self._where(key)} exists already") from None
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise StoreError(
                    f"{self.url}: this file system has no hard links, without which two writers could both create "
                    f"{key!r}; use a folder on a local disk"
                ) from error
            raise

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self, key: str, path: str) -> BinaryIO:
        """Open an object for reading. Without O_NONBLOCK, opening a FIFO waits until something writes to it."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._check_regular(key, os.fstat(descriptor))
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise

    def _check_regular(self, key: str, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            what = "" if stat.S_ISDIR(found.st_mode) else ": what is there is not a regular file"
            raise ObjectNotFound(f"no object at {self._where(key)}{what}")

    def _read(self, key: str, file: BinaryIO, found: os.stat_result, limit: int | None) -> Fetched:
        check_size(self._where(key), found.st_size, limit)
        # not more than its size now: it may grow while it is read
        return Fetched(file.read(found.st_size), _etag(found))

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
        for name, found in self._entries(folder):
            key = folder + name
            if found is None:
                # All keys below start with `key`, so one comparison tells whether any of them can be wanted.
                wanted = key.startswith(prefix) or prefix.startswith(key)
                # No key leads into folders that are nested more deeply than a key is long.
                if wanted and (key > after or after.startswith(key)) and is_key(key[:-1]):
                    yield from self._walk(key, prefix, after)
            elif key.startswith(prefix) and key > after:
                yield _info(key, found)

    def _entries(self, folder: str) -> Iterable[tuple[str, os.stat_result | None]]:
        """Names in one folder, in key order. Folders end in "/", so that 'a b' sorts before 'a/…', and have no stat."""
        found: dict[str, os.stat_result | None] = {}
        with (
            self._border(folder),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(os.path.join(self.root, folder)) as entries,
        ):
            for entry in entries:
                if not is_key(entry.name):
                    continue
                check_listing(self._where(folder), len(found))
                try:
                    if entry.is_dir(follow_symlinks=False):
                        found[entry.name + "/"] = None
                    elif entry.is_file():
                        found[entry.name] = entry.stat()
                except OSError as error:
                    if error.errno not in _NO_OBJECT:  # deleted while we look, or a circle of symlinks
                        raise
        return sorted(found.items(), key=lambda item: item[0])

    # ── names and errors ─────────────────────────────────────────────────────────────────────────────────────────────

    def _path(self, key: str) -> str:
        return os.path.join(self.root, check_key(key))

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"

    @contextlib.contextmanager
    def _border(self, key: str, *, reading: bool = False) -> Iterator[None]:
        """Translate OSError."""
        try:
            yield
        except OSError as error:
            if reading and error.errno in _NO_OBJECT:
                raise ObjectNotFound(f"no object at {self._where(key)}") from None
            raise _translate(error, self._where(key)) from error


def _translate(error: OSError, where: str) -> DeltawireError:
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return StoreFull(f"{where}: {reason}; free some space or prune old versions")
    if error.errno in _DENIED:
        return PermissionDenied(f"{where}: {reason}")
    if error.errno == errno.ENAMETOOLONG:
        return UnsafeName(f"{where}: {reason}")
    if error.errno in _TRANSIENT:
        return StoreUnavailable(f"{where}: {reason}")
    if isinstance(error, NotADirectoryError | IsADirectoryError):
        return StoreError(f"{where}: in a folder, one name cannot be an object and a prefix of other objects")
    return StoreError(f"{where}: {reason}")


def _create(temp: str) -> int:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    try:
        return os.open(temp, flags, 0o666)  # not 0o600: replicas may run as another user, the umask decides
    except FileNotFoundError:
        _make_folder(os.path.dirname(temp))
        return os.open(temp, flags, 0o666)


def _make_folder(folder: str) -> None:
    """Like makedirs, but each new name is on disk before anything is put below it."""
    try:
        os.mkdir(folder)
    except FileExistsError:
        return
    except FileNotFoundError:
        _make_folder(os.path.dirname(folder))
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
    sync_folder(os.path.dirname(folder))


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Flush the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder, and need not
            raise
    finally:
        os.close(descriptor)


def _stamp(descriptor: int) -> None:
    """Give the file a unique modification time, by the clock of the file system and not of this machine.

    The kernel stamps files once per tick (about 4 ms). Two puts in one tick can get the inode of the object before
    last, and then inode, time and size would all repeat: a reader would take new content for what it already has. So
    what this machine's clock says within a tick is added to the stamp. The stamp itself is kept: on a network file
    system it is the server's, the same for all, while the clocks of the machines that write may be hours apart.
    """
    with contextlib.suppress(OSError):  # a file system that refuses still has the kernel's own stamps
        stamp = os.fstat(descriptor).st_mtime_ns + time.time_ns() % _TICK_NS
        os.utime(descriptor, ns=(stamp, stamp))


def _etag(found: os.stat_result) -> str:
    return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, found.st_size, found.st_mtime, _etag(found))
