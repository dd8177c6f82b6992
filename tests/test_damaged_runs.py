"""A run with damaged objects: whoever can go on goes on, and nobody waits for ever for what is gone."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.core import keys
from deltawire.core.errors import HashMismatch, StoreUnavailable
from deltawire.core.full import write_checkpoint
from deltawire.models import ModelView
from deltawire.replica import Replica
from deltawire.store import Store
from deltawire.trainer import Publisher
from deltawire_wordle.counting import CountingStore
from support import blank, copy, held, history, publish, same, trained

COUNT = 12


def damage(store: Store, version: int, kind: str, base: int | None = None) -> None:
    for blob in Run.open(store).manifest(version).link(kind, base).objects:
        data = bytearray(store.get(blob.key).data)
        data[-1] ^= 1
        store.put(blob.key, bytes(data))


def test_a_checkout_avoids_damaged_objects(store: Store) -> None:
    models = history(COUNT)
    publish(store, models, anchor_ratio=1e6, anchor_every=6)
    damage(store, 6, "anchor")
    assert same(held(checkout(Run.open(store), 8), models[8]), models[8])
    # from a state that it had, too: the delta to 10 is gone, and so is every way
    state = checkout(Run.open(store), 9)
    damage(store, 10, "delta", 9)
    with pytest.raises(HashMismatch):
        checkout(Run.open(store), 11, state)


def test_a_trainer_whose_last_version_nobody_can_read_starts_over_with_an_anchor(store: Store) -> None:
    models = history(COUNT + 3)
    publish(store, models[:COUNT], anchor_ratio=1e6)
    damage(store, 5, "delta", 4)
    with Publisher(store, anchor_ratio=1e6) as publisher:
        for weights in models[COUNT:]:
            publisher.publish(weights).result(60)
    run = Run.open(store)
    assert [link.kind for link in run.manifest(COUNT).links] == ["anchor"]
    assert [link.kind for link in run.manifest(COUNT + 1).links] == ["delta"]
    weights = copy(models[2])
    assert Replica(store, heartbeat=0).sync(weights) == COUNT + 2
    assert same(weights, models[COUNT + 2])


def test_a_follower_of_every_version_passes_over_what_cannot_be_reached(store: Store) -> None:
    models = history(COUNT)
    publish(store, models, anchor_ratio=1e6, anchor_every=6)
    damage(store, 3, "delta", 2)
    weights, stop, seen = blank(models[0]), threading.Event(), []
    replica = Replica(store, heartbeat=0)
    replica.sync(weights, 1)
    for version in replica.follow(weights, every=True, poll=0.01, stop=stop):
        seen.append(version)
        assert same(weights, models[version])
        if version == COUNT - 1:
            stop.set()
    # 4 and 5 need 3; the anchor is at 6
    assert seen == [2, 6, 7, 8, 9, 10, 11]


def test_a_follower_of_every_version_passes_over_what_the_store_cannot_give(store: Store) -> None:
    models = history(COUNT)
    publish(store, models, anchor_ratio=1e6, anchor_every=6)
    key = Run.open(store).manifest(3).link("delta", 2).objects[0].key

    class Rotten(CountingStore):
        def get_range(self, asked_for: str, start: int, length: int) -> bytes:
            if asked_for == key:
                raise StoreUnavailable("500 Internal Server Error")
            return super().get_range(asked_for, start, length)

    weights, stop, seen = copy(models[1]), threading.Event(), []
    for version in Replica(Rotten(store), heartbeat=0).follow(weights, every=True, poll=0.01, stop=stop):
        seen.append(version)
        if version == 7:
            stop.set()
    assert seen == [1, 2, 6, 7]
    assert same(weights, models[7])


def test_an_object_that_the_store_cannot_give_is_gone_round(store: Store) -> None:
    """A server that answers with 500 for one object, for ever, is not a server that is down."""
    models = history(COUNT)
    publish(store, models, anchor_ratio=1e6, anchor_every=4)
    key = Run.open(store).manifest(4).link("delta", 3).objects[0].key
    asked = []

    class Rotten(CountingStore):
        def get_range(self, asked_for: str, start: int, length: int) -> bytes:
            if asked_for == key:
                asked.append(key)
                raise StoreUnavailable("500 Internal Server Error")
            return super().get_range(asked_for, start, length)

    weights = copy(models[3])
    replica = Replica(Rotten(store), heartbeat=0)
    with pytest.raises(StoreUnavailable):
        replica.sync(weights, 4)
    assert same(weights, models[3])
    assert replica.sync(weights, 4) == 4
    assert same(weights, models[4])
    assert len(asked) == 2


def test_a_checkout_with_manifests_of_versions_that_were_replaced(store: Store) -> None:
    """Possible where a store cannot create exclusively: whoever has read the replaced manifest reads it anew."""
    models = history(3)
    publish(store, models[:2], anchor_ratio=1e9)
    run = Run.open(store)
    run.manifest(1)
    for key in [item.key for item in store.list() if "000001" in item.key or item.key == "head.json"]:
        store.delete(key)
    with Publisher(store, anchor_ratio=1e9) as publisher:
        for weights in (trained(models[0], 50), models[2]):
            publisher.publish(weights).result(60)
    assert same(held(checkout(run, 2), models[2]), models[2])


def test_a_checkout_avoids_a_reference_to_another_model(store: Store, tmp_path: Path) -> None:
    models = history(4)
    publish(store, models, anchor_ratio=1e9, anchor_every=3)
    run = json.loads(store.get("versions/000000.json").data)
    run["links"] = [{"kind": "reference", "source": str(tmp_path), "nbytes": 1}]
    store.put("versions/000000.json", json.dumps(run).encode())
    for version in (1, 2, 3):
        manifest = json.loads(store.get(keys.manifest(version)).data)
        manifest["recent"][0][6] = [["reference", None, 1, 0, ""]]
        store.put(keys.manifest(version), json.dumps(manifest).encode())
    # not a checkpoint folder, then one of another model, then one with an index of nonsense; all look cheaper
    for spoil in (lambda: None, lambda: write_checkpoint(tmp_path, ModelView({"x": np.zeros(3, np.float32)}))):
        spoil()
        assert same(held(checkout(Run.open(store), 3), models[3]), models[3])
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_bytes(b'{"weight_map": {"x": "\xff\xfe"}}')
    assert same(held(checkout(Run.open(store), 3), models[3]), models[3])
