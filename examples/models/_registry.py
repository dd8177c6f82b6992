"""Fetch one pinned package from a registry, with the registry's own tool, and check that it is the one we mean."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path


def npm_package(name: str, sha256: str, into: Path) -> Path:
    """The tarball of `name@version`."""
    if shutil.which("npm") is None:
        raise SystemExit(f"{name} is fetched with npm, which is not installed; install Node.js and try again")
    done = _run(["npm", "pack", "--silent", name], into)
    return _checked(into / done.split()[-1], sha256)


def python_wheel(name: str, sha256: str, into: Path) -> Path:
    """The wheel of `name==version`."""
    _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into), name], into)
    return _checked(next(into.glob("*.whl")), sha256)


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed; is the registry reachable?\n{done.stderr.strip()[-2000:]}")
    return done.stdout


def _checked(path: Path, sha256: str) -> Path:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != sha256:
        raise SystemExit(
            f"{path.name} has sha256 {digest.hexdigest()}, not {sha256}: not the package this was written for"
        )
    return path
