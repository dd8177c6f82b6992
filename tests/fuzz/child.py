"""The process that runs cases, under limits. Its parent tells it on stdin what to run and reads a line per case.

    {"kind": "head", "seed": 1, "first": 0, "seconds": 2}   run cases from number 0, for so long
    {"replay": "path"}                                        run one kept case

Answers: {"at": number} before a case, {"did": …} or {"found": …} after it, {"end": number of the next} after a batch.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from broken import Broken
from foreign_versions import ForeignVersions
from services import Environments, Rollouts
from targets import Case, Deltas, Folders, Parts, Runs, SignedRuns, Target

from deltawire.core.errors import DeltawireError
from web import Web

GIGABYTE = 1 << 30
DECLARED = 256 << 20
"""Bytes of the largest model that a run may declare to the processes under test."""
FAMILIES: dict[str, tuple[type[Target], ...]] = {
    "files": (Deltas, Parts, Runs, SignedRuns, Folders, ForeignVersions),
    "rollouts": (Rollouts,),
    "environment": (Environments,),
    "web": (Web,),
    "broken": (Broken,),
}
"""Targets that share a process."""
KINDS = {kind: family for family, targets in FAMILIES.items() for target in targets for kind in target.kinds}


def started(family: str) -> list[Target]:
    return [target() for target in FAMILIES[family]]


def case_of(made: list[Target], kind: str, seed: int, number: int) -> tuple[Target, Case]:
    """The target and the case with this number; always the same one."""
    target = next(target for target in made if kind in target.kinds)
    return target, target.make(Random(f"{seed}/{kind}/{number}"), kind)


def peak() -> int:
    """The most memory this process has had since `reset_peak`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def guarded(target: Target, case: Case, resting: int) -> dict[str, Any]:
    """Run a case. "found" in the answer is what is wrong; "did" is what the input was answered with."""
    reset_peak()
    began = time.process_time()
    try:
        target.run(case)
        answer = {"did": "ok"}
    except DeltawireError as error:
        name = type(error).__name__
        answer = {"did": str(error) if name in ("Answered", "Refused") else name}
    except BaseException as error:
        where = "".join(traceback.format_exception(error)[-12:])
        answer = {"found": f"{type(error).__name__}: {str(error)[:300]}", "where": where[-3000:]}
    grown = peak() - resting
    if grown > GIGABYTE + DECLARED and "found" not in answer:
        answer = {"found": f"took {grown >> 20} MB"}
    return {**answer, "cpu_s": round(time.process_time() - began, 3), "grown": max(grown, 0)}


def serve(family: str) -> None:
    """Serve the parent until it closes stdin."""
    say = _speaker()
    logging.disable(logging.CRITICAL)
    made = started(family)
    gc.collect()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    # above what is measured: an allocation of many gigabytes fails here, instead of taking the machine's memory
    resource.setrlimit(resource.RLIMIT_AS, (size + DECLARED + 2 * GIGABYTE, resource.RLIM_INFINITY))
    reset_peak()
    resting = peak()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    say({"ready": family})
    for line in sys.stdin:
        _work(json.loads(line), made, resting, say)
    # servers may be in the middle of something; the parent removes what is on disk
    os._exit(0)


def _work(order: dict[str, Any], made: list[Target], resting: int, say: Callable[[dict[str, Any]], None]) -> None:
    if "replay" in order:
        case = Case.load(Path(order["replay"]).read_text())
        target = next(target for target in made if case.kind in target.kinds)
        say({"at": 0})
        say(guarded(target, case, resting))
        say({"end": 0})
        return
    number, end = order["first"], time.monotonic() + order["seconds"]
    while time.monotonic() < end:
        target, case = case_of(made, order["kind"], order["seed"], number)
        say({"at": number})
        answer = guarded(target, case, resting)
        say({**answer, "case": case.dump(found=answer["found"])} if "found" in answer else answer)
        number += 1
    say({"end": number})


def _speaker() -> Callable[[dict[str, Any]], None]:
    """Lines to the parent over what was stdout, which nobody else in this process has from now on."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(value: dict[str, Any]) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    return say
