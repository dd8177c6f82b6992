"""The versions of engines that deltawire was run with. docs/compatibility.md and the extras name the same."""

from __future__ import annotations

from importlib import metadata

VERSIONS = {"vllm": ("0.29", "0.30", "0.31", "0.32", "0.33"), "sglang": ("0.5.23",)}
"""Releases by engine; each stands for those that only add to it, such as 0.32.1."""


def untested(engine: str) -> str:
    """A line about the installed version of an engine if it is none of `VERSIONS`; else empty."""
    try:
        installed = metadata.version(engine)
    except metadata.PackageNotFoundError:
        return ""
    release = installed.partition("+")[0]
    if any(f"{release}.".startswith(f"{run}.") for run in VERSIONS[engine]):
        return ""
    return (
        f"{engine} {installed} was not tested with deltawire, only {listed(engine)}: compare some answers with those "
        "of a server that was started with the same weights"
    )


def listed(engine: str) -> str:
    """The tested versions as documents have them: `0.29 to 0.32`, or the only one."""
    first, *_, last = [VERSIONS[engine][0], *VERSIONS[engine]]
    return first if first == last else f"{first} to {last}"
