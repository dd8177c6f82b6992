"""Other environments for tests against packages that do not belong into ours; made once per set of pins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "deltawire-tests"


def environment(name: str, *steps: Sequence[str]) -> Path:
    """The Python of an environment in which each step's packages were installed, one step after the other."""
    key = sha256(json.dumps([steps, sys.version_info[:2]]).encode()).hexdigest()[:12]
    folder = CACHE / f"{name}-{key}"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        for packages in steps:
            subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)
        (folder / "ready").touch()
    return python
