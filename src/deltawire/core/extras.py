"""How to install an optional part of deltawire, for messages about one that is missing."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname


def install_command(extras: str) -> str:
    """The command that adds extras ("rl,serve") to the deltawire that runs, from where that one was installed."""
    clone = Path(__file__).parents[3]
    source = _source()
    if source is None:
        # found by PYTHONPATH, or from a package index
        target = ["-e", f"{clone}[{extras}]"] if (clone / "pyproject.toml").exists() else [f"deltawire[{extras}]"]
    elif source.get("dir_info", {}).get("editable"):
        target = ["-e", f"{url2pathname(urlsplit(source['url']).path)}[{extras}]"]
    else:
        vcs = source.get("vcs_info", {}).get("vcs")
        target = [f"deltawire[{extras}] @ {f'{vcs}+' if vcs else ''}{source['url']}"]
    return "pip install " + shlex.join(target)


def _source() -> dict[str, Any] | None:
    """Where this distribution was installed from, as pip recorded it; None if it did not."""
    try:
        noted = metadata.distribution("deltawire").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    return json.loads(noted) if noted else None
