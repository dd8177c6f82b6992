"""Training restarted from its own checkpoint goes on with the run, wherever the two stand."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from deltawire import Publisher, Replica
from deltawire.bucket.run import Run
from deltawire.core.errors import SchemaMismatch
from deltawire.core.manifest import Manifest
from deltawire.core.state import State
from deltawire.models import ModelView
from deltawire.store import Store


class Training:
    def __init__(self, width: int = 256) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self) -> None:
        self.model(torch.randn(4, 8)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> dict[str, Any]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy(state)

    @classmethod
    def restored(cls, checkpoint: dict[str, Any]) -> Training:
        training = cls()
        training.model.load_state_dict(checkpoint["model"])
        training.optimizer.load_state_dict(checkpoint["optimizer"])
        return training


def manifests(store: Store) -> list[Manifest]:
    run = Run.open(store)
    return [run.manifest(version) for version in run.listed()]


def first_part(store: Store) -> tuple[dict[str, Any], dict[str, Any]]:
    """Three versions; checkpoints as they were at the second and the third."""
    training = Training()
    checkpoints = []
    with Publisher(store) as publisher:
        for _ in range(3):
            training.step()
            publisher.publish(training.model, wait=True)
            checkpoints.append(training.save())
    return checkpoints[1], checkpoints[2]


def test_from_the_checkpoint_of_the_newest_version_the_next_delta_follows(store: Store) -> None:
    _, newest = first_part(store)
    training = Training.restored(newest)
    with Publisher(store) as publisher:
        assert publisher.resume(training.model) == 2
        training.step()
        publisher.publish(training.model, wait=True)
    found = manifests(store)
    assert [link.base for link in found[3].links if link.kind == "delta"] == [2]
    assert_replica_has(store, training)


def test_from_an_older_checkpoint_the_run_goes_forward_to_what_the_trainer_has(store: Store) -> None:
    older, _ = first_part(store)
    replica, weights = Replica(store, heartbeat=0), State(Run.open(store).schema)
    replica.sync(weights)
    assert replica.version == 2
    training = Training.restored(older)
    with Publisher(store) as publisher:
        publisher.publish(training.model, wait=True)
        found = manifests(store)
        assert (found[3].digest, found[3].parent) == (found[1].digest, 2)
        assert [link.base for link in found[3].links if link.kind == "delta"] == [2]
        assert replica.sync(weights) == 3
        training.step()
        publisher.publish(training.model, wait=True)
    assert replica.sync(weights) == 4
    assert_holds(weights, training)


def test_another_model_is_refused_and_the_run_left_alone(store: Store) -> None:
    first_part(store)
    with Publisher(store) as publisher, pytest.raises(SchemaMismatch):
        publisher.publish(Training(width=13).model)
    assert len(manifests(store)) == 3


def assert_replica_has(store: Store, training: Training) -> None:
    weights = State(Run.open(store).schema)
    Replica(store, heartbeat=0).sync(weights)
    assert_holds(weights, training)


def assert_holds(weights: State, training: Training) -> None:
    for name, bits in ModelView(training.model, "bf16"):
        assert np.array_equal(weights.bits(name), bits)
