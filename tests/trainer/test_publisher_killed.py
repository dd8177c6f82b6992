"""SIGKILL at any point of a publish: the run stays readable, every digest holds, the next publish goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core import full
from deltawire.core.state import State
from deltawire.store import LocalStore
from killing import Killer, quick_folder, weights
from support import held, same

KILLED = -9


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    place = quick_folder(tmp_path)
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    with Killer(seed=1) as started:
        yield started


PLACES = (
    "before put_if_absent run.json", "after put_if_absent run.json",
    "before put deltas/", "during put deltas/", "after put deltas/",
    "before put anchors/", "during put anchors/", "after put anchors/",
    "before put history/", "after put history/",
    "before put_if_absent versions/", "after put_if_absent versions/", "before put head.json", "after put head.json",
    "before fsync", "after fsync", "before replace", "after replace", "before link", "after link",
)  # fmt: skip
"""In the order of a publish: the store operations, and inside them the system calls that make data durable."""

BY_EVENT = 12
BY_TIME = 12


class Watch:
    """Reads the run after every kill, from where it had read before; now and then from the beginning."""

    def __init__(self, folder: Path) -> None:
        self.store = LocalStore(folder)
        self.state: State | None = None
        self.versions = 0

    def look(self, *, everything: bool = False) -> None:
        if not (self.store.root / "run.json").exists():
            assert self.versions == 0
            return
        run = Run.open(self.store)
        newest = run.newest()
        count = 0 if newest is None else newest + 1
        assert count >= self.versions, "a committed version is gone"
        steps = [run.manifest(version).step for version in range(count)]
        assert steps == sorted(set(steps)), "every version carries a later step"
        for version in range(self.versions, count):
            self.state = checkout(run, version, self.state)
            assert str(full.digest_of(self.state)) == run.manifest(version).digest
            expected = weights(steps[version])
            assert same(held(self.state, expected), expected), f"version {version} is not what was published"
        self.versions = count
        if everything and count:
            found = verify(run)
            assert found.ok, found.failure
            assert found.versions == count


def test_a_publisher_killed_at_any_point(folder: Path, killer: Killer) -> None:
    run = folder / "run"
    watch = Watch(run)
    dice = killer.dice

    def go(**task: Any) -> dict[str, Any]:
        ended = killer.run("publish", run=str(run), encoding=dice.choice(["packed", "packed", "raw"]), **task)
        assert ended["code"] == KILLED, ended["said"]
        watch.look()
        return ended

    for place in PLACES:
        ended = go(count=40, place=place, die=1 if "run.json" in place else dice.randint(1, 2))
        assert ended["said"].startswith(place)
    watch.look(everything=True)
    for _ in range(BY_EVENT):
        go(count=40, die=dice.randint(1, 150))
    watch.look(everything=True)
    for _ in range(BY_TIME):
        go(count=10**6, after=dice.uniform(0.001, 0.06))
    watch.look(everything=True)
    before = watch.versions
    ended = killer.run("publish", run=str(run), encoding="packed", count=3)
    assert ended["code"] == 0, ended["said"]
    watch.look(everything=True)
    assert watch.versions == before + 3
    assert watch.versions > 40, "too few versions between the kills for this to mean much"


def test_a_publisher_killed_at_every_event_of_its_first_publish(folder: Path, killer: Killer) -> None:
    """A fresh folder each time: what is left is no run yet, or a run without versions, or a run with version 0."""
    seen = set()
    for die in range(1, 100):
        run = folder / str(die)
        ended = killer.run("publish", run=str(run), encoding="packed", count=1, die=die)
        watch = Watch(run)
        watch.look(everything=True)
        seen.add(watch.versions)
        if ended["code"] == 0:
            break
        assert ended["code"] == KILLED, ended["said"]
        if die % 5 == 0:
            assert killer.run("publish", run=str(run), encoding="packed", count=2)["code"] == 0
            watch.look(everything=True)
            assert watch.versions >= 2
    assert ended["code"] == 0, "a first publish has fewer than a hundred events"
    assert die > 15
    assert seen == {0, 1}
