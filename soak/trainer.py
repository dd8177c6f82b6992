"""The trainer of the soak: changes weights, writes down what it has, publishes. It is killed at any moment."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from deltawire.core.errors import DeltawireError, PublishFailed
from deltawire.store import object as object_store
from deltawire.trainer import Publisher

from .ledger import Ledger, Weights, blank, entries, hash_of

CHECKPOINT_EVERY = 20


def train(task: dict[str, Any]) -> None:
    # the smallest that S3 allows, so that the anchors of a small model go up in several parts, as those of large ones
    object_store._PART_BYTES = 5 << 20
    ledger = Ledger(task["ledger"])
    known = [entry for entry in entries(task["ledger"]) if entry["what"] == "state"]
    last = max((entry["state"] for entry in known), default=0)
    # never the same number twice, whatever happens
    states = itertools.count(last + 1)
    weights = _restore(Path(task["checkpoint"]))
    dice = random.Random(f"{task['seed']} {last}")
    ledger.note("start", pid=os.getpid(), state=last)
    stop = Path(task["stop"])
    while not stop.exists():
        try:
            publisher = Publisher(
                task["run"],
                anchor_every=task["anchor_every"],
                encoding=dice.choice(["packed", "context", "auto"]),
            )
            _publish(publisher, weights, states, dice, ledger, task, stop)
        except DeltawireError as error:
            # as a supervisor would: start again from what is there
            ledger.note("trouble", error=f"{type(error).__name__}: {error}")
            time.sleep(0.3)


def _publish(
    publisher: Publisher, weights: Weights, states: Iterator[int], dice: random.Random, ledger: Ledger,
    task: dict[str, Any], stop: Path,
) -> None:  # fmt: skip
    waiting: list[tuple[int, Any]] = []
    while not stop.exists():
        began = time.monotonic()
        state = next(states)
        _step(weights, state, dice)
        # written down before anybody else can see it
        ledger.note("state", state=state, hash=hash_of(weights))
        if state % CHECKPOINT_EVERY == 0:
            _save(Path(task["checkpoint"]), weights)
        try:
            waiting.append((state, publisher.publish(weights, step=state, wait=dice.random() < 0.1)))
        except PublishFailed as error:
            ledger.note("trouble", error=f"PublishFailed: {error}")
        waiting = _settle(waiting, ledger)
        time.sleep(max(0.0, task["period"] - (time.monotonic() - began)))
    publisher.close(60)
    _settle(waiting, ledger)


def _settle(waiting: list[tuple[int, Any]], ledger: Ledger) -> list[tuple[int, Any]]:
    """Write down what was committed. Of publishes that were merged into one version the last one counts."""
    done: dict[int, int] = {}
    for state, handle in waiting:
        if handle.done():
            try:
                version = handle.result(0).version
            except DeltawireError as error:
                ledger.note("failed", state=state, error=f"{type(error).__name__}: {error}")
            else:
                done[version] = max(state, done.get(version, 0))
    for version, state in done.items():
        ledger.note("published", version=version, state=state)
    return [(state, handle) for state, handle in waiting if not handle.done()]


def _step(weights: Weights, state: int, dice: random.Random) -> None:
    """As training moves weights: about one in a hundred by an ulp; now and then many of them, anyhow."""
    rng = np.random.default_rng(dice.getrandbits(64))
    dense = dice.random() < 0.02
    for array in weights.values():
        if array.dtype != np.uint16:
            continue
        flat = array.reshape(-1)
        if dense:
            where = np.flatnonzero(rng.random(flat.size) < 0.6)
            flat[where] ^= rng.integers(1, 1 << 16, where.size).astype(np.uint16)
        elif dice.random() < 0.8:
            where = np.unique(rng.integers(0, flat.size, flat.size // 100))
            flat[where] += rng.choice(np.array([1, 0xFFFF], np.uint16), where.size)
    weights["norm.weight"][rng.integers(0, weights["norm.weight"].size, 3)] += np.float32(1e-3)
    weights["state"][0] = state


def _restore(path: Path) -> Weights:
    """The trainer's own checkpoint, which is older than what it published last: that is what trainers have."""
    weights = blank()
    if path.exists():
        with np.load(path) as saved:
            return {name: saved[name].copy() for name in weights}
    rng = np.random.default_rng(1)
    for array in weights.values():
        if array.dtype == np.uint16:
            floats = rng.normal(0.0, 0.02, array.shape).astype(np.float32)
            array[:] = (floats.view(np.uint32) >> 16).astype(np.uint16)
    return weights


def _save(path: Path, weights: Weights) -> None:
    temporary = path.with_suffix(".new.npz")
    np.savez(temporary, **weights)  # type: ignore[arg-type]
    os.replace(temporary, path)
