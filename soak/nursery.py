"""A process that makes the processes to be killed: it imports everything once and forks, so that a start costs nothing.

Lines of JSON in, one line out for each: {"do": "start", "role", "task", "env"} → {"pid"}; {"do": "signal", "pid",
"signal"}; {"do": "ended"} → {"ended": [[pid, exit code], …]}. When its input ends it kills what is left and goes.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import deltawire
from deltawire.bucket.prune import Retention, prune
from deltawire.bucket.run import Run
from deltawire.replica import Replica
from deltawire.trainer import Publisher

from .child import Child
from .ledger import blank
from .replica import serve
from .trainer import train

_PR_SET_PDEATHSIG = 1


def main() -> None:
    # Kernels that are not on disk are compiled by a process of its own, which leaves them there: here neither the
    # bucket client nor the threads that hash may have been at work when a process forks.
    if not any(Path(deltawire.__file__).parent.rglob("*.nbi")):
        subprocess.run([sys.executable, "-m", "soak.nursery", "compile"], check=True, stdin=subprocess.DEVNULL)
    _rehearse(rows=4, columns=16)
    children: set[int] = set()
    _answer({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "start":
            pid = _start(order)
            children.add(pid)
            _answer({"pid": pid})
        elif order["do"] == "signal":
            if order["pid"] in children:
                os.kill(order["pid"], order["signal"])
            _answer({})
        else:
            ended = [(pid, code) for pid in children if (code := _ended(pid)) is not None]
            children -= {pid for pid, _ in ended}
            _answer({"ended": ended})
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _rehearse(**shape: int) -> None:
    """Versions from a trainer to a replica through a folder: sparse, dense, and of several publishes in one."""
    with tempfile.TemporaryDirectory() as folder:
        for encoding in ("packed", "context", "auto"):
            weights, live = blank(**shape), blank(**shape)
            with Publisher(f"{folder}/{encoding}", encoding=encoding) as publisher:
                for step in range(12):
                    for array in weights.values():
                        array.reshape(-1)[step :: 2 if step == 4 else 97] += array.dtype.type(1)
                    handle = publisher.publish(weights, wait=step % 2 == 0 and step < 6)
                    if step < 6:
                        handle.result(300)
                newest = handle.result(300).version
            replica = Replica(f"{folder}/{encoding}", heartbeat=0)
            for version in range(newest + 1):
                replica.sync(live, version)


def _answer(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def _ended(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _start(order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.environ.update(order["env"])
        log = os.open(order["task"]["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s", force=True)
        _work(order["role"], order["task"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _work(role: str, task: dict[str, Any]) -> None:
    if role == "trainer":
        train(task)
    elif role == "replica":
        serve(task)
    else:
        prune(Run.open(task["run"]), Retention(task["last"], grace=task["grace"], lease=task["lease"]))


class Nursery:
    """The other end."""

    def __init__(self, folder: Path) -> None:
        single = {"DELTAWIRE_THREADS": "1", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
        self._child = Child("soak.nursery", log=folder / "nursery.log", env=single)

    def start(self, role: str, task: dict[str, Any], env: dict[str, str]) -> int:
        return int(self._child.ask({"do": "start", "role": role, "task": task, "env": env})["pid"])

    def signal(self, pid: int, number: int) -> None:
        self._child.ask({"do": "signal", "pid": pid, "signal": number})

    def ended(self) -> dict[int, int]:
        return dict(self._child.ask({"do": "ended"})["ended"])

    def close(self) -> None:
        self._child.close(30)


if __name__ == "__main__":
    _rehearse(rows=32, columns=256) if sys.argv[1:] == ["compile"] else main()
