"""Weights that something else changed, and versions that were replaced: never taken for what they are not."""

from __future__ import annotations

import uuid

import numpy as np
import pytest

from deltawire.core.errors import DigestMismatch, VersionRefused
from deltawire.replica import Replica
from deltawire.replica.host import HostShard
from deltawire.replica.model import ModelTarget, StagedModel
from deltawire.replica.shard import PieceChange
from deltawire.replica.target import Update
from deltawire.store import Store, open_store
from deltawire.trainer import Publisher
from support import Model, blank, copy, heartbeats, history, publish, same, trained


def untouched(a: Model, b: Model) -> tuple[str, int]:
    """A weight that the delta from a to b does not change."""
    flat = (a["embed.weight"] == b["embed.weight"]).reshape(-1)
    return "embed.weight", int(np.flatnonzero(flat)[3])


@pytest.mark.parametrize("anchor", [False, True], ids=["deltas-only", "with-anchor"])
def test_a_weight_changed_behind_its_back(store: Store, anchor: bool) -> None:
    versions = history(4)
    publish(store, versions, anchor_every=3 if anchor else None, anchor_ratio=1e9)
    live = copy(versions[2])
    replica = Replica(store, heartbeat=0)
    assert replica.sync(live, 2) == 2
    name, at = untouched(versions[2], versions[3])
    live[name].reshape(-1)[at] ^= 0x10
    assert replica.sync(live) == 3
    assert replica.version == 3
    assert same(live, versions[3])


def test_a_sync_to_the_version_that_the_weights_were_looks_at_them(store: Store) -> None:
    """As people sync again to undo what they tried."""
    versions = history(3)
    publish(store, versions, anchor_ratio=1e9)
    live = copy(versions[1])
    replica = Replica(store, heartbeat=0)
    assert replica.sync(live, 1) == 1
    live["layer.weight"][0, 0] += 1
    assert replica.sync(live, 1) == 1
    assert same(live, versions[1])


@pytest.mark.parametrize("prove", [False, True])
def test_a_weight_that_the_delta_changes_was_changed_already(store: Store, prove: bool) -> None:
    """Found before a weight is touched, with or without the proof afterwards."""
    versions = history(3)
    publish(store, versions, anchor_ratio=1e9)
    live = copy(versions[1])
    replica = Replica(store, heartbeat=0, prove=prove)
    replica.sync(live, 1)
    at = np.flatnonzero((versions[1]["embed.weight"] != versions[2]["embed.weight"]).reshape(-1))[0]
    live["embed.weight"].reshape(-1)[at] ^= 0x10
    assert replica.sync(live) == 2
    assert same(live, versions[2])


def test_weights_that_somebody_keeps_changing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Say, a model that is being trained elsewhere: it ends with an error, not never."""
    versions = history(3)
    publish(store, versions, anchor_ratio=1e9)
    live = copy(versions[1])
    replica = Replica(store, heartbeat=0)
    replica.sync(live, 1)
    real = HostShard.put

    def interfered(self: HostShard, item: PieceChange) -> None:
        real(self, item)
        live["layer.weight"][0, 0] += 1

    monkeypatch.setattr(HostShard, "put", interfered)
    with pytest.raises(DigestMismatch):
        replica.sync(live)


def replaced_run(store: Store) -> tuple[list[Model], dict[str, bytes]]:
    """A run of four versions, and all objects of another trainer's versions 2 and 3 of the same run."""
    models = history(4)
    publish(store, models[:2], anchor_ratio=1e9)
    before = {item.key: store.get(item.key).data for item in store.list()}
    other = open_store(f"memory://{uuid.uuid4()}")
    for key, data in before.items():
        other.put(key, data)
    theirs = [trained(models[1], 90), trained(models[1], 91)]
    with Publisher(other, anchor_ratio=1e9) as publisher:
        for weights in theirs:
            publisher.publish(weights).result(120)
    publish_more(store, models[2:])
    found = {item.key: other.get(item.key).data for item in other.list()}
    return [*models[:2], *theirs], {key: data for key, data in found.items() if before.get(key) != data}


def publish_more(store: Store, models: list[Model]) -> None:
    with Publisher(store, anchor_ratio=1e9) as publisher:
        for weights in models:
            publisher.publish(weights).result(120)


@pytest.mark.parametrize("reached", [1, 2, 3])
def test_a_version_that_is_replaced_under_a_replica(store: Store, reached: int) -> None:
    """Possible where a store cannot create exclusively. The replica had read, or even applied, the replaced ones."""
    theirs, objects = replaced_run(store)
    live = blank(theirs[0])
    replica = Replica(store, heartbeat=0)
    replica.sync(live, reached)
    run = replica.opened()
    for version in (2, 3):
        run.manifest(version)
    for link in run.manifest(3).links:
        for blob in link.objects:
            store.delete(blob.key)
    for key, data in objects.items():
        store.put(key, data)
    # the next version makes it look: it is built on what the bucket has now
    newest = trained(theirs[3], 92)
    publish_more(store, [newest])
    assert replica.sync(live) == 4
    assert same(live, newest)
    # and back to the version before
    assert replica.sync(live, 3) == 3
    assert same(live, theirs[3])


class Passing(ModelTarget):
    """Keeps a version that is only on the way to another one to itself."""

    fails = False

    def stage(self, update: Update) -> StagedModel:
        if self.fails and update.final:
            raise VersionRefused("not now")
        staged = super().stage(update)
        staged.served = update.final
        return staged


def test_a_version_that_clients_never_got_is_loaded_anew(store: Store) -> None:
    versions = history(4)
    publish(store, versions, anchor_ratio=1e9)
    live = copy(versions[1])
    target, replica = Passing(live), Replica(store, id="r")
    replica.sync(target, 1)
    target.fails = True
    with pytest.raises(VersionRefused):
        replica.sync(target, 3)
    # the weights are version 2, clients are left at 1
    assert (replica.version, replica.lag) == (2, 2)
    assert same(live, versions[2])
    (beat,) = heartbeats(replica.opened())
    assert beat.version == 1
    target.fails = False
    assert replica.sync(target, 2) == 2
    assert (replica.version, replica.lag) == (2, 1)
    # full weights: no delta leads to where the weights were already
    (beat,) = heartbeats(replica.opened())
    assert beat.syncs[-1].previous is None
