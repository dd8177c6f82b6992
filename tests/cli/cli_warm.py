"""Imported by a fork server: after this a forked process follows a run at once."""

from __future__ import annotations

import tempfile
from pathlib import Path

from cli_support import invoke, trained, weights, write_checkpoint

with tempfile.TemporaryDirectory() as _folder:
    for _tensors in (weights(), trained(weights(), seed=1)):
        _checkpoint = write_checkpoint(Path(_folder) / "checkpoint", _tensors)
        invoke("publish", _checkpoint, Path(_folder) / "run")
        invoke("follow", Path(_folder) / "run", "--dir", Path(_folder) / "model", "--once")
