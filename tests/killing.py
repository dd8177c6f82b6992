"""A process that makes processes to be killed: it imports everything once, then forks a child per line of input.

    {"job": "publish" | "apply" | "take", "run": path, …, "die": n or null, "place": text, "after": seconds or null}

A child kills itself with SIGKILL at its n-th event, or its n-th event that starts with `place`: a store operation, a
chunk of an upload, a system call that makes data durable or visible, a write to a weight. Or it is killed from outside
after a while. The answer is a line of JSON: how the child ended and at which event. `Killer` is the other end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from deltawire.bucket.run import Run
from deltawire.foreign import Importer
from deltawire.replica import Replica, host
from deltawire.replica.host import HostShard
from deltawire.store import LocalStore
from deltawire.trainer import Publisher
from support import HookedStore, Model, model


def weights(step: int) -> Model:
    """The model at a step, whoever asks, in whatever order."""
    result = model(0)
    rng = np.random.default_rng(step)
    for array in result.values():
        flat = array.reshape(-1).view(f"u{min(array.itemsize, 4)}")
        if flat.size:
            flat[rng.integers(0, flat.size, 6)] ^= flat.dtype.type(1 + rng.integers(0, 200))
    return result


def mapped(path: Path) -> Model:
    """Live weights in a file: what a killed process wrote to them stays written."""
    whole = np.memmap(
        path, np.uint8, "r+" if path.exists() else "w+", shape=(sum(a.nbytes for a in model(0).values()),)
    )
    result, at = {}, 0
    for name, array in sorted(model(0).items(), key=lambda item: -item[1].itemsize):
        result[name] = whole[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
        at += array.nbytes
    return result


# ── in the child ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Death:
    def __init__(self, at: int | None, place: str, tell: int) -> None:
        self.at, self.place, self.tell, self.count = at, place, tell, 0

    def __call__(self, *event: str) -> None:
        said = " ".join(event)
        self.count += said.startswith(self.place)
        if self.count == self.at and said.startswith(self.place):
            os.write(self.tell, said.encode())
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # it takes a moment


def around(death: Death, owner: Any, name: str) -> None:
    """Die before or after a call."""
    inner = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        death("before", name)
        result = inner(*args, **kwargs)
        death("after", name)
        return result

    setattr(owner, name, wrapped)


def publish(task: dict[str, Any], death: Death) -> None:
    for name in ("fsync", "replace", "link"):
        around(death, os, name)
    store = HookedStore(LocalStore(task["run"]), death)
    with Publisher(store, anchor_every=5, encoding=task["encoding"]) as publisher:
        newest = None if publisher.version is None else Run.open(task["run"]).manifest(publisher.version)
        step = -1 if newest is None else int(newest.step or 0)
        for number in range(step + 1, step + 1 + task["count"]):
            publisher.publish(weights(number), step=number, wait=number % 3 == 0).result(60)


def apply(task: dict[str, Any], death: Death) -> None:
    scatter = host.scatter

    def slowly(bits: Any, positions: Any, values: Any, *geometry: int) -> None:
        # weight by weight, as the kernel does
        for i in range(positions.size):
            scatter(bits, positions[i : i + 1], values[i : i + 1], *geometry)
            death("weight")

    host.scatter = slowly
    around(death, HostShard, "put")
    around(death, HostShard, "load")
    live = mapped(Path(task["weights"]))
    replica = Replica(LocalStore(task["run"]), heartbeat=0)
    newest = Run.open(task["run"]).newest() or 0
    for version in task["versions"]:
        replica.sync(live, min(version, newest))


def take(task: dict[str, Any], death: Death) -> None:
    """Import what another system wrote."""
    for name in ("fsync", "replace", "link"):
        around(death, os, name)
    with Importer(task["source"], HookedStore(LocalStore(task["run"]), death), base=task["base"]) as importer:
        for _ in importer.follow(once=True):
            death("imported")


JOBS: dict[str, Callable[[dict[str, Any], Death], None]] = {"publish": publish, "apply": apply, "take": take}


def child(task: dict[str, Any], tell: int) -> None:
    try:
        JOBS[task["job"]](task, Death(task["die"], task["place"], tell))
        code = 0
    except BaseException as error:
        os.write(tell, f"{type(error).__name__}: {error}"[:500].encode())
        code = 1
    os._exit(code)


def answer(task: dict[str, Any]) -> dict[str, Any]:
    read, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        child(task, tell)
    os.close(tell)
    if task["after"] is not None:
        time.sleep(task["after"])
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    said = os.read(read, 1000).decode()
    os.close(read)
    return {"code": os.waitstatus_to_exitcode(status), "said": said}


def main() -> None:
    # once, so that children neither compile nor import
    with tempfile.TemporaryDirectory() as folder:
        for encoding in ("packed", "raw"):
            task = {"run": f"{folder}/{encoding}", "encoding": encoding, "count": 6}
            with Publisher(task["run"], encoding=encoding) as publisher:
                for step in range(6):
                    publisher.publish(weights(step), wait=step % 2 == 0).result(60)
            live = mapped(Path(folder) / f"{encoding}.weights")
            for version in range(6):
                Replica(task["run"], heartbeat=0).sync(live, version)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


# ── on the other end ─────────────────────────────────────────────────────────────────────────────────────────────────


def quick_folder(fallback: Path) -> Path:
    """A folder in memory where there is one: these tests wait for fsync more than for anything else."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="deltawire-test-", dir=memory)) if os.access(memory, os.W_OK) else fallback


class Killer:
    """Starts the process above and gives it jobs, one after the other."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        here = Path(__file__).parent
        self.process = subprocess.Popen(
            [sys.executable, str(here / "killing.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}",
                "DELTAWIRE_THREADS": "1",
                # those that were killed are waited for
                "DELTAWIRE_WRITER_RENEWAL": "0.02",
            },
        )

    def __enter__(self) -> Killer:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(120)

    def run(
        self, job: str, *, die: int | None = None, place: str = "", after: float | None = None, **task: Any
    ) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"job": job, "die": die, "place": place, "after": after, **task}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


if __name__ == "__main__":
    main()
