"""What the soak knows without deltawire: lines of JSON that survive SIGKILL, and hashes of weights."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

Weights = dict[str, np.ndarray]
LAYERS = 8


def blank(rows: int = 512, columns: int = 768) -> Weights:
    """About three million weights as the bits of bfloat16, a few as float32, and the number of the trainer's state."""
    weights: Weights = {f"layers.{n}.weight": np.zeros((rows, columns), np.uint16) for n in range(LAYERS)}
    weights["norm.weight"] = np.zeros(columns, np.float32)
    weights["state"] = np.zeros(1, np.int64)
    return weights


def hash_of(weights: Weights) -> str:
    whole = blake3()
    for name in sorted(weights):
        whole.update(name.encode())
        whole.update(weights[name].tobytes())
    return whole.hexdigest()


class Ledger:
    """Appends in one write each, so that a killed process leaves whole lines and at most one half."""

    def __init__(self, path: str | Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # whoever wrote here before was killed inside its last line

    def note(self, what: str, **values: Any) -> None:
        os.write(self._file, (json.dumps({"what": what, "at": time.time(), **values}) + "\n").encode())


def entries(path: str | Path) -> list[dict[str, Any]]:
    """Every whole line so far."""
    try:
        text = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    found = []
    for line in text.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):  # half a line
            found.append(json.loads(line))
    return found
