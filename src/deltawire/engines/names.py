"""Names that all engines share, so that clients work with any of them. docs/serve.md has them in a table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = [
    "ADAPTER_NAME",
    "EXACT_VERSION_HEADER",
    "MIN_VERSION_HEADER",
    "SERVING",
    "STATES",
    "VERSIONS_FIELD",
    "VERSION_HEADER",
    "health",
    "model_name",
    "versions_of",
]

VERSION_HEADER = "deltawire-version"
"""Response header of a completion: the versions that made it, ascending, such as `41` or `41,42`."""

MIN_VERSION_HEADER = "deltawire-min-version"
"""Request header: tokens of this version or a later one are accepted (bounds.py)."""

EXACT_VERSION_HEADER = "deltawire-exact-version"
"""Request header: only tokens of this version are accepted."""

VERSIONS_FIELD = "weight_versions"
"""Field of each choice: `[{"version": 41, "start": 0, "end": 17}, …]`, by output token, `end` exclusive."""

STATES = ("idle", "starting", "healthy", "degraded", "paused", "failed")
"""Values of `state` in GET /deltawire/status and of the label of `deltawire_state`; /health names it too."""

SERVING = ("healthy", "degraded")
"""The states in which GET /health is 200 and completions are answered."""

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,99}")
"""Names of adapters. `@` separates one from a version: policy@41."""


def model_name(run: str) -> str:
    """Return the name of a run's model for clients, unless the server was given another: the name of the run."""
    return run.partition("?")[0].rstrip("/").rpartition("/")[2]


def health(state: str, reason: str = "") -> dict[str, str]:
    """The body of GET /health, whatever its status."""
    return {"state": state, **({"reason": reason} if reason else {})}


def versions_of(choice: Mapping[str, Any]) -> list[int]:
    """The versions that made a choice; empty where the server names none, or one that is not of a run."""
    found = [span.get("version") for span in choice.get(VERSIONS_FIELD) or ()]
    return found if all(isinstance(version, int) for version in found) else []
