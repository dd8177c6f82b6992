"""What every benchmark prints first and writes last: machine, versions, command; JSON."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any


def about() -> dict[str, Any]:
    """Enough to judge a figure, and to get it again."""
    versions = {}
    for name in ("deltawire", "numpy", "numba", "zstandard", "torch", "triton"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "command": shlex.join(["python", *_arguments()]),
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def _arguments() -> list[str]:
    """As given, but for where the results go, which says something of this machine and nothing of them."""
    words = list(sys.argv)
    for option in ("--out", "--log"):
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    return words


def print_about(facts: dict[str, Any]) -> None:
    print(f"$ {facts['command']}")
    print(f"{facts['machine']}; Python {facts['python']}; ", end="")
    print(", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    print()


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")
    print(f"wrote {path}")


def best(work: Callable[[], Any], repeats: int = 5, seconds: float = 10.0) -> float:
    """The fastest of several runs, in seconds: on a shared machine the others measure the neighbours."""
    work()
    fastest, began = float("inf"), time.perf_counter()
    for _ in range(repeats):
        clock = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - clock)
        if time.perf_counter() - began > seconds:
            break
    return fastest


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
