"""`python -m soak`: run the fault soak and print what came of it."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .conductor import Conductor, Hang
from .judge import Judge, leftover_processes
from .record import Options


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m soak", description="Break everything, then look what is left.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults are injected (default 10)")
    parser.add_argument("--seed", type=int, default=None, help="which faults; drawn and printed when not given")
    parser.add_argument("--replicas", type=int, default=12)
    parser.add_argument("--period", type=float, default=0.25, help="seconds between two publishes")
    parser.add_argument("--pace", type=float, default=2.0, help="mean seconds between two faults")
    parser.add_argument("--proxy", choices=["nginx"], help="replicas read over HTTP, through this")
    parser.add_argument("--json", type=Path, default=None, help="write the result to this file too")
    parser.add_argument("--keep", type=Path, default=None, help="a folder for logs, kept; else one that is removed")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else int(time.time())
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="deltawire-soak-"))
    folder = folder.absolute()
    print(f"seed {seed}, {arguments.replicas} replicas, {arguments.minutes:g} minutes", flush=True)
    options = Options(
        folder, seed, arguments.minutes, arguments.replicas, arguments.period, arguments.pace,
        proxy=arguments.proxy is not None,
    )  # fmt: skip
    result = soak(options)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    _show(result)
    if arguments.keep is None and not result["failures"]:
        shutil.rmtree(folder, ignore_errors=True)
    elif result["failures"]:
        print(f"logs are in {folder}")
    return 1 if result["failures"] else 0


def soak(options: Options) -> dict[str, Any]:
    conductor = Conductor(options)
    try:
        try:
            conductor.play()
        except Hang as hang:
            conductor.outcome.failures.append(f"hang: {hang}")
            return {"seed": options.seed, "failures": conductor.outcome.failures, "notes": conductor.outcome.notes}
        result = Judge(conductor).verdict()
    finally:
        conductor.close()
    result["failures"] += leftover_processes(options.folder)
    return result


def _show(result: dict[str, Any]) -> None:
    for name, value in result.items():
        if name in ("failures", "notes"):
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{key} {count}" for key, count in value.items())
        print(f"{name.replace('_', ' '):>22}  {value}")
    for note in result["notes"]:
        print(f"{'note':>22}  {note}")
    for failure in result["failures"]:
        print(f"{'FAILURE':>22}  {failure}")
    print("PASSED" if not result["failures"] else f"FAILED, {len(result['failures'])} things are wrong")


if __name__ == "__main__":
    sys.exit(main())
