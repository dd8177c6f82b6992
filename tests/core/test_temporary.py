from __future__ import annotations

import errno
import os
import tempfile
from typing import Any

import numpy as np
import pytest

from deltawire.bucket import fetch
from deltawire.core import sparse
from deltawire.core.errors import FolderError
from deltawire.core.manifest import Blob
from deltawire.core.schema import Schema, TensorSpec
from deltawire.core.temporary import spooling
from deltawire.keeper import skips
from deltawire.store import ObjectStore
from support import diff, encoded, moved_bag, random_bag


class Full:
    """Stands for a temporary file on a disk that has no room left."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_it_names_the_folder_and_the_next_step() -> None:
    with pytest.raises(FolderError) as caught, spooling("a delta"):
        Full()
    for part in ("a delta", tempfile.gettempdir(), "No space left on device", "TMPDIR"):
        assert part in str(caught.value)


def test_no_folder_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """tempfile looks for a folder that can be written; with none, gettempdir() fails as well."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [])
    monkeypatch.setenv("TMPDIR", "/a/full/disk")
    with pytest.raises(FolderError, match="/a/full/disk"), spooling("a delta"), tempfile.TemporaryFile():
        pass


def test_a_large_object_that_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "IN_MEMORY", 0)
    monkeypatch.setattr(tempfile, "TemporaryFile", Full)
    with pytest.raises(FolderError, match=r"cannot write the 8 bytes of anchors/x to temporary files"):
        fetch.fetch(ObjectStore.from_url("memory://full"), Blob("anchors/x", 8, "0" * 32))


def test_what_a_keeper_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", Full)
    with pytest.raises(FolderError, match="skip deltas"):
        skips.ArrayFile().add(np.zeros(skips.IN_MEMORY + 1, np.uint8))


def test_a_delta_that_does_not_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "SPOOL_LIMIT", 1)
    monkeypatch.setattr(tempfile, "TemporaryFile", Full)
    old = random_bag(Schema.build([TensorSpec("w", "F16", (64, 64))]), 1)
    with pytest.raises(FolderError, match="cannot write a delta to temporary files"):
        encoded(old, diff(old, moved_bag(old, 2, 0.5)), "packed")
