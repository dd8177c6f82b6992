"""A version as a checkpoint folder that transformers and vLLM load: made beside its place, then moved into it whole."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..core import full
from ..core.errors import FolderError
from ..core.manifest import Blob, File, Manifest
from ..store.local import sync_folder
from .cache import hash_of
from .fetch import PART, Progress, fetch
from .run import Run

_EXCHANGE = 2
_AT_FDCWD = -100


def fill(
    folder: Path,
    run: Run,
    manifest: Manifest,
    source: full.Source,
    *,
    before: Path | None = None,
    progress: Progress | None = None,
) -> None:
    """Weights and companion files of a version into an empty folder; on disk when this returns.

    Files that the folder `before` (an earlier version) has with the same content are not fetched again.
    """
    for file in manifest.files:
        full.check_companion(file.name)
    # peft looks for an adapter's weights under a name of their own
    is_adapter = any(file.name == full.ADAPTER_CONFIG for file in manifest.files)
    full.write_checkpoint(folder, source, stem="adapter_model" if is_adapter else "model", progress=progress)
    for file in manifest.files:
        with open(folder / file.name, "wb") as out:
            for chunk in _content(run, file, before):
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    sync_folder(folder)


def _content(run: Run, file: File, before: Path | None) -> Iterator[bytes]:
    if before is not None and _holds(before / file.name, file):
        with open(before / file.name, "rb") as known:
            while chunk := known.read(PART):
                yield chunk
        return
    with fetch(run.store, Blob(file.key, file.size, file.hash)) as data:
        for start in range(0, file.size, PART):
            yield data.read(start, min(PART, file.size - start))


def _holds(path: Path, file: File) -> bool:
    with suppress(OSError), open(path, "rb") as known:
        return os.fstat(known.fileno()).st_size == file.size and hash_of(known.fileno()) == file.hash
    return False


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Files that cannot be read or written inside are FolderError, which names the folder."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise  # one of ours, which says what is wrong
        raise FolderError(
            f"cannot write {str(place)[:1000]}: {error.strerror or error}; choose another folder, or make room there"
        ) from error


@contextmanager
def scratch(place: Path) -> Iterator[Path]:
    """An empty folder beside `place`, removed on the way out unless it was moved away.

    Its owner holds a lock on it, so what a killed process left behind can be told from what is in use, and is swept.
    """
    with writing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        _sweep(place)
        folder, held = _locked_folder(place)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)


def move_into(folder: Path, place: Path, *, replace: bool) -> None:
    """Give a finished folder its name. Whoever looks finds the old one, or none, or the new one whole.

    With `replace` whatever folder is there goes, else it must be missing or empty.
    """
    if replace and place.is_dir() and any(place.iterdir()):
        _exchange(folder, place)
        # `folder` is now what was there before
        shutil.rmtree(folder)
    else:
        os.rename(folder, place)
    sync_folder(place.parent)


def lock(folder: Path) -> int | None:
    """A descriptor that holds the folder for this process alone until it is closed; None if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _prefix(place: Path) -> str:
    return f".{place.name}.making-"


def _locked_folder(place: Path) -> tuple[Path, int]:
    while True:
        folder = place.parent / f"{_prefix(place)}{secrets.token_hex(4)}"
        folder.mkdir()
        # another process may sweep it away before it is locked: then make another
        with suppress(FileNotFoundError):
            held = lock(folder)
            if held is not None and folder.is_dir():
                return folder, held
            if held is not None:
                os.close(held)


def _sweep(place: Path) -> None:
    for left in [path for path in place.parent.iterdir() if path.name.startswith(_prefix(place))]:
        with suppress(FileNotFoundError, NotADirectoryError):
            held = lock(left)
            if held is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(held)


def _exchange(one: Path, other: Path) -> None:
    """Swap two folders in one step where the system can, else in two, undone when the second fails."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code), str(other))
    aside = one.with_name(one.name + ".old")
    os.rename(other, aside)
    try:
        os.rename(one, other)
    except OSError:
        os.rename(aside, other)
        raise
    os.rename(aside, one)
