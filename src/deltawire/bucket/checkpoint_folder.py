"""Write a version as a checkpoint folder that transformers and vLLM load.

`fill` writes it into an empty folder: one beside its place, moved there when it is whole (`scratch`, `move_into`), or
one of a `CurrentFolder`, which is replaced by each new version.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from ..core import full
from ..core.chain import Step
from ..core.errors import FolderError, SchemaMismatch
from ..core.manifest import File, Manifest
from ..store.local import sync_folder
from .cache import hash_of, try_lock
from .fetch import PART, Progress, fetch
from .references import Reference, Resolve
from .replay import checkout
from .run import Run

ADAPTER_STEM = "adapter_model"
"""What peft looks for as an adapter's weights."""

_EXCHANGE = 2
_AT_FDCWD = -100

_OWN = re.compile(r"[0-9]{6,18}(\.[0-9a-f]{4})?|\.making-[0-9a-f]{8}|\.link-[0-9a-f]{8}")
"""Names in the folder of a `CurrentFolder`. Others are of somebody else, and stay."""


def fill(
    folder: Path,
    run: Run,
    manifest: Manifest,
    source: full.Source,
    *,
    before: Path | None = None,
    progress: Progress | None = None,
) -> None:
    """Write weights and companion files of a version into an empty folder; on disk when this returns.

    Files that the folder `before` (an earlier version) has with the same content are not fetched again.
    """
    for file in manifest.files:
        full.check_companion(file.name)
    is_adapter = any(file.name == full.ADAPTER_CONFIG for file in manifest.files)
    full.write_checkpoint(folder, source, stem=ADAPTER_STEM if is_adapter else "model", progress=progress)
    fill_companions(folder, run, manifest, before=before)


def fill_companions(folder: Path, run: Run, manifest: Manifest, *, before: Path | None = None) -> None:
    """Write the companion files of a version beside its weights, as `fill` does."""
    for file in manifest.files:
        full.check_companion(file.name)
    for file in manifest.files:
        with open(full.companion_path(folder, file.name), "wb") as out:
            for chunk in content(run, file, before):
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    for place in full.folders_of(folder):
        sync_folder(place)


def fill_for_engine(folder: Path, run: Run, version: int, resolve: Resolve) -> None:
    """Check out a version into an empty folder. SchemaMismatch if no config.json was published with it."""
    manifest = run.manifest(version)
    if run.info.base is not None:
        raise SchemaMismatch(
            f"{run.store.url} has adapters of {run.info.base.model or 'a model'}, not a model: deltawire serve "
            f"--engine vllm {run.info.base.model or 'MODEL'} --adapter policy={run.store.url}, or "
            "publish merged_weights(model) to another run"
        )
    if not any(file.name == "config.json" for file in manifest.files):
        raise SchemaMismatch(
            f"version {version} of {run.store.url} carries no config.json, so it cannot say which model it is: publish "
            "it with files=<checkpoint folder>, or name a model (serve MODEL --run RUN)"
        )
    fill(folder, run, manifest, checkout(run, version, reference=resolve))


def checkout_folder(
    folder: str | os.PathLike[str],
    run: Run,
    version: int,
    *,
    replace: bool = False,
    reference: Reference = None,
    progress: Callable[[str, int, int], None] = lambda phase, n, total: None,
    planned: Callable[[list[Step]], object] = lambda steps: None,
) -> None:
    """Write a version as a checkpoint folder, bit for bit what was published, with its companion files.

        dw.checkout_folder("models/chat", *dw.Run.at("s3://runs/chat@best"))

    The folder appears whole or not at all: it is made beside its place and renamed when every byte is proven and on
    disk. One that is there and not empty stays, which raises FolderError, unless `replace` is set. `progress` is called
    with "fetch" or "write", the bytes since the last call and the bytes in all; the rest as in `checkout`.
    """
    place, total = Path(folder), run.schema.nbytes
    with scratch(place) as made:
        state = checkout(run, version, reference=reference, progress=partial(progress, "fetch"), planned=planned)
        fill(made, run, run.manifest(version), state, progress=lambda n: progress("write", n, total))
        move_into(made, place, replace=replace)


def content(run: Run, file: File, before: Path | None = None) -> Iterator[bytes]:
    if before is not None and _holds(known_as := full.companion_path(before, file.name), file):
        with open(known_as, "rb") as known:
            while chunk := known.read(PART):
                yield chunk
        return
    with run.anywhere(lambda: fetch(run.store, file)) as data:
        yield from data.chunks()


def _holds(path: Path, file: File) -> bool:
    with suppress(OSError), open(path, "rb") as known:
        return os.fstat(known.fileno()).st_size == file.size and hash_of(known.fileno()) == file.hash
    return False


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Raise FolderError, which names the folder, where a file inside cannot be read or written."""
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
    """Make an empty folder beside `place`, removed on the way out unless it was moved away.

    Its owner holds a lock on it: folders without one were left by killed processes, and are removed. Raises FolderError
    where `place` is a link: the folder it leads to would stay, and be named no more.
    """
    if place.is_symlink():
        raise FolderError(f"{place} is a link: name the folder that it leads to, or another one")
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
    """Give a finished folder its name. A reader finds the old one, or none, or the new one whole.

    With `replace` the folder that is there is removed, else there must be none or an empty one.
    """
    if replace and place.is_dir() and any(place.iterdir()):
        _exchange(folder, place)
        # `folder` is now what was there before
        shutil.rmtree(folder)
    else:
        os.rename(folder, place)
    sync_folder(place.parent)


def lock(folder: Path) -> int | None:
    """Lock a folder for this process until the descriptor is closed; returns None if another process has it.

    Raises NotADirectoryError where it is a link.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if try_lock(descriptor):
        return descriptor
    os.close(descriptor)
    return None


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
    own = re.compile(re.escape(_prefix(place)) + r"[0-9a-f]{8}(\.old)?")
    for left in [path for path in place.parent.iterdir() if own.fullmatch(path.name)]:
        with suppress(FileNotFoundError, NotADirectoryError):
            held = lock(left)
            if held is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(held)


def _exchange(one: Path, other: Path) -> None:
    """Swap two folders in one step where the system can, else in two, undone unless both are done."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code), str(other))
    aside = one.with_name(one.name + ".old")
    try:
        os.rename(other, aside)
        os.rename(one, other)
    except BaseException:
        if aside.exists() and not other.exists():
            os.rename(aside, other)
        raise
    os.rename(aside, one)


class CurrentFolder:
    """A folder DIR that always is a whole version: a symlink, replaced by rename when the next version is on disk.

    DIR → .DIR.versions/000041       what readers open
          .DIR.versions/000040       the one before, for readers still in it
          .DIR.versions/.making-…    being written; removed at the next start if it was never finished

        with dw.CurrentFolder("models/chat") as current:
            current.write(run, 41, dw.checkout(run, 41))

    Owns DIR and its versions until closed; no second process can. Raises FolderError where `.DIR.versions` is a link or
    no folder. Nothing but names of the forms above is ever removed from it.
    """

    def __init__(self, link: str | os.PathLike[str]) -> None:
        self.link = Path(os.path.abspath(link))
        self._versions = self.link.parent / f".{self.link.name}.versions"
        with writing(self.link):
            self._check_place()
            self._make_versions()
            held = lock(self._versions)
        if held is None:
            raise BlockingIOError(f"another process keeps {link} current; a folder follows one run at a time")
        self._lock = held
        self._previous: str | None = None
        self._tidy()

    @property
    def folder(self) -> Path | None:
        """The folder that DIR points to now."""
        if not self.link.is_symlink():
            return None
        target = self.link.parent / os.readlink(self.link)
        return target if target.is_dir() else None

    def holds(self, version: int) -> bool:
        """Whether DIR was made as this version."""
        return self.folder is not None and self.folder.name.partition(".")[0] == f"{version:06d}"

    def put(self, version: int, fill: Callable[[Path], None]) -> Path:
        """Make the folder of a version by `fill`, then point DIR to it. A reader sees the old one or the new one.

        Raises FolderError where that fails: DIR stays what it was.
        """
        with writing(self.link):
            self._check_versions()
            made = self._versions / f".making-{secrets.token_hex(4)}"
            made.mkdir()
            try:
                fill(made)
            except BaseException:
                shutil.rmtree(made, ignore_errors=True)
                raise
            place = self._versions / f"{version:06d}"
            if place.exists():
                # the same number of another run, or of a folder that was changed: readers may be in it
                place = place.with_name(f"{place.name}.{secrets.token_hex(2)}")
            os.rename(made, place)
            sync_folder(self._versions)
            before = self.folder
            link = self._versions / f".link-{secrets.token_hex(4)}"
            link.symlink_to(Path(self._versions.name) / place.name)
            if self.link.is_dir() and not self.link.is_symlink():
                self.link.rmdir()  # an empty folder; a rename replaces a symlink, not a folder
            os.rename(link, self.link)
            sync_folder(self.link.parent)
            self._previous = before.name if before else None
            self._tidy()
            return place

    def write(self, run: Run, version: int, source: full.Source) -> Path:
        """Make DIR this version: its weights, and its companion files as far as they are not there already."""
        manifest, before = run.anywhere(lambda: run.manifest(version)), self.folder
        return self.put(version, lambda made: fill(made, run, manifest, source, before=before))

    def close(self) -> None:
        os.close(self._lock)

    def __enter__(self) -> CurrentFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_place(self) -> None:
        if self.link.is_symlink():
            if Path(os.readlink(self.link)).parent != Path(self._versions.name):
                raise FileExistsError(f"{self.link} is a symlink to somewhere else: remove it or choose another name")
        elif self.link.exists() and not (self.link.is_dir() and not any(self.link.iterdir())):
            raise FileExistsError(f"{self.link} is there already and not empty: remove it or choose another name")

    def _make_versions(self) -> None:
        self._versions.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self._versions.mkdir()
        if not stat.S_ISDIR(self._versions.lstat().st_mode):
            raise FolderError(
                f"{self._versions} is a link or a file, and the versions of {self.link} would be written and removed "
                "there: remove it, or choose another name"
            )

    def _check_versions(self) -> None:
        """Raise FolderError if the folder of versions is not the one that was locked."""
        with suppress(FileNotFoundError):
            if os.path.samestat(self._versions.lstat(), os.fstat(self._lock)):
                return
        raise FolderError(f"{self._versions} was replaced while {self.link} was kept there: start again")

    def _tidy(self) -> None:
        """Remove all versions but the one that DIR is and the one before it, and what a killed process left."""
        self._check_versions()
        now = self.folder
        names = {name for name in os.listdir(self._lock) if _OWN.fullmatch(name)}
        if self._previous is None and now is not None:
            # after a restart: the newest of the older ones
            self._previous = max((n for n in names if not n.startswith(".") and n < now.name), default=None)
        for name in names - {now.name if now else None, self._previous}:
            path = self._versions / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
