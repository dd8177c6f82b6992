"""A replica of the soak: follows, and writes down every state it serves."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from deltawire.core.errors import DeltawireError
from deltawire.replica import Replica

from .ledger import Ledger, Weights, blank, hash_of


def serve(task: dict[str, Any]) -> None:
    ledger = Ledger(task["ledger"])
    ledger.note("start", pid=os.getpid())
    weights = blank()
    replica = Replica(task["run"], id=task["id"], heartbeat=task["heartbeat"], heartbeats=task.get("heartbeats"))
    stop = threading.Event()
    threading.Thread(target=_watch, args=(Path(task["stop"]), stop), daemon=True).start()
    if task["by"] == "sync":
        _sync(replica, weights, ledger, stop)
    else:
        for version in replica.follow(weights, poll=0.2, every=task["by"] == "every", stop=stop):
            _note(ledger, version, weights)
    # what it holds at the end, to be looked at from outside
    dump = Path(task["dump"])
    temporary = dump.with_suffix(".new.npz")
    np.savez(temporary, version=np.int64(-1 if replica.version is None else replica.version), **weights)  # type: ignore[arg-type]
    os.replace(temporary, dump)


def _sync(replica: Replica, weights: Weights, ledger: Ledger, stop: threading.Event) -> None:
    """One that asks when it likes, and meets errors itself."""
    before: int | None = None
    while not stop.wait(0.5):
        try:
            version = replica.sync(weights)
        except DeltawireError as error:
            ledger.note("trouble", error=f"{type(error).__name__}: {error}")
            if replica.version is not None:
                # it failed, and says what it holds: that must be true as well
                _note(ledger, replica.version, weights)
        else:
            if version != before:
                _note(ledger, version, weights)
            before = version


def _note(ledger: Ledger, version: int, weights: Weights) -> None:
    ledger.note("serves", version=version, state=int(weights["state"][0]), hash=hash_of(weights))


def _watch(path: Path, stop: threading.Event) -> None:
    while not path.exists():
        time.sleep(0.2)
    stop.set()
