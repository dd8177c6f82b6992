"""The error for a folder of temporary files that has no room."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import FolderError


@contextmanager
def spooling(what: str) -> Iterator[None]:
    """Raise FolderError, which names the folder, if temporary files cannot be written. `what` is to be kept there."""
    try:
        yield
    except OSError as error:
        # gettempdir() fails if no folder can be written at all
        folder = tempfile.tempdir or os.environ.get("TMPDIR") or "/tmp"
        raise FolderError(
            f"cannot write {what} to temporary files in {folder}: {error.strerror or error}; make room there, or name "
            "another folder in TMPDIR"
        ) from error
