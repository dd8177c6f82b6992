"""Runs that a keeper has work with: deltas are small against the weights."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from deltawire.bucket.run import Run
from deltawire.keeper.keeper import Keeper, KeeperOptions, KeptVersion
from deltawire.store import ObjectStore, Store
from deltawire.trainer import Publisher
from support import Model, blank

NO_ANCHORS = {"anchor_ratio": 1e9}
"""A trainer that makes one anchor, of its first version."""


@dataclass
class Kept:
    store: Store
    weights: list[Model]

    @property
    def run(self) -> Run:
        return Run.open(self.store)

    def keep(self, options: KeeperOptions | None = None, id: str = "keeper") -> list[KeptVersion]:
        """Do what is due, as `keep --once` does."""
        keeper = Keeper(self.store, options or KeeperOptions(since=0), id=id)
        try:
            return [*keeper.once()]
        finally:
            keeper.close()

    def blank(self) -> Model:
        return blank(self.weights[0])


def settings(patch: pytest.MonkeyPatch) -> None:
    """Tiny versions, for which threads would take longer than the work, and no waiting for other keepers."""
    patch.setenv("DELTAWIRE_THREADS", "1")
    patch.setattr("deltawire.keeper.lease.SETTLE_S", 0.0)


@cache
def template(count: int = 70) -> Kept:
    return made(count)


def fresh(count: int = 70) -> Kept:
    """A run of its own, without a keeper so far."""
    return Kept(copied(template(count).store), [*template(count).weights])


def empty() -> Store:
    return ObjectStore.from_url(f"memory://{uuid.uuid4()}")


def copied(store: Store) -> Store:
    other = empty()
    for item in store.list():
        other.put(item.key, store.get(item.key).data)
    return other


def large(seed: int = 0) -> Model:
    rng = np.random.default_rng(seed)
    return {"w": rng.integers(0, 1 << 16, (512, 512), np.uint16), "b": rng.standard_normal(64).astype(np.float32)}


def step(weights: Model, seed: int, changes: int = 4) -> Model:
    rng = np.random.default_rng(seed)
    result = {name: array.copy() for name, array in weights.items()}
    where = rng.integers(0, result["w"].size, changes)
    result["w"].reshape(-1)[where] += np.uint16(1)
    return result


def made(count: int) -> Kept:
    store = empty()
    weights = [large()]
    while len(weights) < count:
        weights.append(step(weights[-1], len(weights)))
    publish(store, weights)
    return Kept(store, weights)


def publish(store: Store, weights: list[Model], **options: object) -> None:
    with Publisher(store, **{**NO_ANCHORS, **options}) as publisher:  # type: ignore[arg-type]
        for each in weights:
            publisher.publish(each).result(120)
