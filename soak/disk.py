"""A small file system for the server, which can be filled to the last byte. Needs root; without it there is none."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_LEFT = 64 << 10


class Disk:
    """A tmpfs in a mount namespace of this process and its children: when they are gone, so is it."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.why_not = _mount(folder, megabytes)
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        free = os.statvfs(self.folder)
        with open(self._ballast, "wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(free.f_bavail * free.f_frsize - _LEFT, 1))

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        if not self.why_not:
            subprocess.run(["umount", "-l", str(self.folder)], check=False)


def _mount(folder: Path, megabytes: int) -> str:
    """Empty when it worked, else why it did not."""
    if os.geteuid() != 0:
        return "needs root"
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        return f"no mount namespace: {os.strerror(ctypes.get_errno())}"
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return done.stderr.strip() or f"{command[0]} failed"
    return ""
