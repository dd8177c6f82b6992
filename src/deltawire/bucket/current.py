"""A folder that always is a whole version: DIR is a symlink, swapped by rename when the next version is on disk.

DIR → .DIR.versions/000041       what readers open
      .DIR.versions/000040       the one before, for readers still in it
      .DIR.versions/.making-…    on its way; removed at the next start if it never gets there
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from ..store.local import sync_folder
from . import folder


class CurrentFolder:
    """Owns DIR and its versions until closed; no second process can."""

    def __init__(self, link: Path) -> None:
        self.link = Path(os.path.abspath(link))
        self._versions = self.link.parent / f".{self.link.name}.versions"
        with folder.writing(self.link):
            self._check_place()
            self._versions.mkdir(parents=True, exist_ok=True)
            held = folder.lock(self._versions)
        if held is None:
            raise BlockingIOError(f"another process keeps {link} current; a folder follows one run at a time")
        self._lock = held
        self._previous: str | None = None
        self._tidy()

    @property
    def folder(self) -> Path | None:
        """The folder that DIR is now, under its own name."""
        if not self.link.is_symlink():
            return None
        target = self.link.parent / os.readlink(self.link)
        return target if target.is_dir() else None

    def holds(self, version: int) -> bool:
        """Whether DIR was made as this version."""
        return self.folder is not None and self.folder.name.partition(".")[0] == f"{version:06d}"

    def put(self, version: int, fill: Callable[[Path], None]) -> Path:
        """Make the folder of a version by `fill`, then let DIR be it. A reader sees the old one or the new one.

        FolderError where that fails: DIR is what it was.
        """
        with folder.writing(self.link):
            return self._put(version, fill)

    def _put(self, version: int, fill: Callable[[Path], None]) -> Path:
        made = self._versions / f".making-{secrets.token_hex(4)}"
        made.mkdir()
        try:
            fill(made)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        place = self._versions / f"{version:06d}"
        if place.exists():
            # the same number of another run, or of a folder that somebody changed: readers may be in it
            place = place.with_name(f"{place.name}.{secrets.token_hex(2)}")
        os.rename(made, place)
        sync_folder(self._versions)
        before = self.folder
        self._point_at(place)
        self._previous = before.name if before else None
        self._tidy()
        return place

    def _point_at(self, place: Path) -> None:
        link = self._versions / f".link-{secrets.token_hex(4)}"
        link.symlink_to(Path(self._versions.name) / place.name)
        if self.link.is_dir() and not self.link.is_symlink():
            self.link.rmdir()  # an empty folder; a rename replaces a symlink, not a folder
        os.rename(link, self.link)
        sync_folder(self.link.parent)

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

    def _tidy(self) -> None:
        """Remove everything but the version that DIR is and the one before it."""
        now = self.folder
        names = {path.name for path in self._versions.iterdir()}
        if self._previous is None and now is not None:
            # after a restart: the newest of the older ones
            self._previous = max((n for n in names if not n.startswith(".") and n < now.name), default=None)
        for name in names - {now.name if now else None, self._previous}:
            path = self._versions / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
