"""SIGKILL at any point of an apply: whatever the weights are left as, a new replica brings them to the right bits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltawire.bucket.run import Run
from deltawire.core import full
from deltawire.models import ModelView
from deltawire.replica import Replica
from deltawire.trainer import Publisher
from killing import Killer, mapped, quick_folder, weights
from support import copy, same

KILLED = -9


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    place = quick_folder(tmp_path)
    yield place
    shutil.rmtree(place)


VERSIONS = 12
BY_EVENT = 25
BY_TIME = 10


def test_a_replica_killed_at_any_point_of_an_apply(folder: Path) -> None:
    place, path = str(folder / "run"), folder / "weights"
    with Publisher(place, anchor_every=4) as publisher:
        for step in range(VERSIONS):
            publisher.publish(weights(step), step=step).result(120)
    run = Run.open(place)
    digests = [run.manifest(version).digest for version in range(VERSIONS)]
    live = mapped(path)
    torn = 0
    with Killer(seed=2) as killer:
        dice = killer.dice
        for number in range(BY_EVENT + BY_TIME):
            where = [dice.randrange(VERSIONS) for _ in range(40 if number >= BY_EVENT else 2)]
            if number < BY_EVENT:
                ended = killer.run("apply", run=place, weights=str(path), versions=where, die=dice.randint(1, 60))
            else:
                ended = killer.run(
                    "apply", run=place, weights=str(path), versions=where, after=dice.uniform(0.001, 0.05)
                )
            assert ended["code"] in (KILLED, 0), ended["said"]
            torn += str(full.digest_of(ModelView(live))) not in digests
            want = dice.randrange(VERSIONS)
            replica = Replica(place, heartbeat=0)
            assert replica.sync(live, want) == want
            assert replica.version == want
            assert same(live, weights(want)), f"killed at {ended['said']!r}"
    assert torn > 8, "the kills missed the moments that matter"
    # and left to itself it arrives
    assert same(copy(live), weights(want))
