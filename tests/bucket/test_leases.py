"""`prune` while others read, publish and prune: nobody who reads is broken, and nothing is lost."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deltawire.bucket import prune as pruning
from deltawire.bucket.prune import Retention, prune, survey
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core import keys
from deltawire.core.errors import ManifestError, MissingBase, VersionNotFound
from deltawire.core.manifest import Heartbeat, Pruned, dump
from deltawire.replica import Replica
from deltawire.store import LocalStore, ObjectStore, Retrying, Store
from deltawire_wordle.counting import CountingStore
from support import HookedStore, Model, copy, heartbeats, history, publish, same

COUNT = 24
HOUR = 3600.0
NOW = Retention(last=1, grace=0.0)
"""Everything but the newest version goes at once, but for what replicas say they read."""


@pytest.fixture(scope="module")
def models() -> list[Model]:
    return history(COUNT)


@pytest.fixture
def run(models: list[Model]) -> Store:
    """Anchors at 0 and 16, so that a replica at 2 walks over all deltas or jumps."""
    store = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
    # an anchor costs more than all deltas, or a replica would never walk
    publish(store, models, anchor_ratio=1e6, anchor_every=16)
    return store


class Paused(CountingStore):
    """Does something once, when the first data of a version is asked for; afterwards says which data was asked for."""

    def __init__(self, inner: Store, at: str, then: Callable[[], object]) -> None:
        super().__init__(inner)
        self.at, self.then, self.done = at, then, threading.Lock()
        self.asked: list[str] = []

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.asked.append(key)
        if self.at in key and self.done.acquire(blocking=False):
            self.then()
        return super().get_range(key, start, length)


def walker(store: Store, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Replica:
    """A replica that walks over deltas however long the way: requests cost nothing."""
    monkeypatch.setattr("deltawire.core.chain.REQUEST_COST", 0)
    monkeypatch.setattr("deltawire.core.chain.REQUEST_COST", 0)
    return Replica(store, **options)


def test_what_a_replica_reads_stays(
    run: Store, models: list[Model], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weights = copy(models[18])
    plans = []
    slow = Paused(run, "step_000020", lambda: plans.append(prune(Run.open(run), NOW)))
    replica = walker(slow, monkeypatch, id="slow")
    with caplog.at_level(logging.WARNING, "deltawire"):
        assert replica.sync(weights) == COUNT - 1
    assert same(weights, models[COUNT - 1])
    assert caplog.text == "", "nothing was missing"
    assert plans[0].kept[20] == "a replica reads it now"
    assert 5 in plans[0].going
    assert verify(Run.open(run)).ok
    # it has what it wanted, and says so
    assert heartbeats(Run.open(run))[0].reading == ()
    assert prune(Run.open(run), NOW).kept[20] == "on the way to one that stays"


def test_what_was_marked_before_it_said_so_is_left_alone(
    run: Store, models: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its plan and its word another one marks: it looks again, and goes another way."""
    asked: list[str] = []
    info = Run.open(run).info.run

    def hook(moment: str, verb: str, key: str) -> None:
        if verb == "get_range":
            asked.append(key)
        if (moment, verb) == ("before", "put") and key.startswith(keys.REPLICAS):
            run.put(keys.PRUNED, dump(Pruned.of(info, range(12))))

    weights = copy(models[2])
    assert walker(HookedStore(run, hook), monkeypatch).sync(weights) == COUNT - 1
    assert same(weights, models[COUNT - 1])
    assert asked
    assert not [key for key in asked if int(key.split("_")[1][:6]) < 12]


def test_without_heartbeats_it_finds_another_way(
    run: Store, models: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a sleeper meets that woke up too late."""
    weights = copy(models[2])
    slow = Paused(run, "step_000004", lambda: prune(Run.open(run), NOW))
    assert walker(slow, monkeypatch, heartbeat=0).sync(weights) == COUNT - 1
    assert same(weights, models[COUNT - 1])


def test_a_version_that_is_marked_is_not_begun(run: Store, models: list[Model]) -> None:
    run.put(keys.PRUNED, dump(Pruned.of(Run.open(run).info.run, range(12))))
    weights = copy(models[2])
    with pytest.raises(VersionNotFound):
        Replica(run).sync(weights, 10)
    assert same(weights, models[2])


def test_a_follower_of_every_version_skips_one_that_was_pruned(run: Store, models: list[Model]) -> None:
    weights, stop, seen = copy(models[2]), threading.Event(), []
    slow = Paused(run, "step_000005", lambda: prune(Run.open(run), NOW))
    for version in Replica(slow, heartbeat=0).follow(weights, every=True, poll=0.01, stop=stop):
        seen.append(version)
        assert same(weights, models[version])
        if version == COUNT - 1:
            stop.set()
    # the delta was on its way when it went: it arrived, or 16 is the next there is
    assert seen[:3] == [2, 3, 4]
    assert seen[-8:] == list(range(16, COUNT))


def test_a_word_that_is_too_old_counts_no_more(run: Store) -> None:
    info = Run.open(run).info.run
    run.put(keys.replica("gone"), dump(Heartbeat(info, "gone", 2, 23, True, 0.0, reading=((3, 9),))))
    assert survey(Run.open(run), NOW).kept[7] == "a replica reads it now"
    assert 7 not in survey(Run.open(run), NOW, time.time() + 1000).kept


@pytest.mark.parametrize("reading", [((9, 3),), ((3, 9), (5, 7)), ((-4, 2),)])
def test_an_invalid_heartbeat_is_no_lease(run: Store, reading: Any) -> None:
    info = Run.open(run).info.run
    liar = msgspec.to_builtins(Heartbeat(info, "liar", 2, 23, True, 0.0)) | {"reading": reading}
    run.put(keys.replica("liar"), msgspec.json.encode(liar))
    assert heartbeats(Run.open(run)) == []
    assert 7 not in survey(Run.open(run), NOW).kept


def test_a_claim_on_everything_costs_nothing_to_read(run: Store) -> None:
    info = Run.open(run).info.run
    run.put(keys.replica("greedy"), dump(Heartbeat(info, "greedy", 2, 23, True, 0.0, reading=((0, keys.MAX_VERSION),))))
    assert survey(Run.open(run), NOW).marked == ()
    run.delete(keys.replica("greedy"))
    run.put(keys.PRUNED, dump(Pruned(info, ((0, 12), (14, 14)))))
    assert list(Run.open(run).timeline(23)) == [13, *range(15, 24)]
    run.put(keys.PRUNED, b'{"run": "%s", "versions": [[4, 2]]}' % info.encode())
    with pytest.raises(ManifestError, match="4 to 2"):
        Run.open(run).timeline(23)


# ── marks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_marked_goes_after_the_grace_period_and_not_before(tmp_path: Path, models: list[Model]) -> None:
    store = LocalStore(tmp_path)
    publish(store, models, anchor_ratio=1e6, anchor_every=16)
    rule = Retention(last=1, grace=60.0)
    assert prune(Run.open(store), rule).marked == (), "all versions are young"
    _age(tmp_path, 100)
    first = prune(Run.open(store), rule)
    assert (first.marked, first.objects) == (tuple(range(16)), ())
    assert list(Run.open(store).timeline(23)) == list(range(16, 24))
    assert verify(Run.open(store)).ok
    again = prune(Run.open(store), rule)
    assert (again.marked, again.waiting, again.objects) == ((), tuple(range(16)), ())
    _age(tmp_path, 100)
    last = prune(Run.open(store), rule)
    assert last.going == tuple(range(16))
    assert Run.open(store).listed() == list(range(16, 24))
    assert verify(Run.open(store)).ok
    assert not (tmp_path / keys.CLOCK).exists()


def _age(folder: Path, seconds: float) -> None:
    for path in folder.rglob("*.*"):
        then = path.stat().st_mtime - seconds
        os.utime(path, (then, then))


def test_the_clock_of_this_machine_does_not_matter(run: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "now", lambda: time.time() + 1e6)
    assert prune(Run.open(run), Retention(last=1)).marked == ()
    assert survey(Run.open(run), Retention(last=1)).marked, "one that only looks has no other clock"


def test_clocks_of_machines_that_share_a_folder(
    tmp_path: Path, models: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica two hours and a prune four hours ahead of the others: what a fresh heartbeat reads stays."""
    store = LocalStore(tmp_path)
    publish(store, models, anchor_ratio=1e6, anchor_every=16)
    # marked, and the grace period is over
    store.put(keys.PRUNED, dump(Pruned.of(Run.open(store).info.run, range(16))))
    _age(tmp_path, 2 * HOUR)
    real = time.time_ns
    with monkeypatch.context() as replica:
        replica.setattr(time, "time_ns", lambda: real() + int(2 * HOUR * 1e9))
        beat = Heartbeat(Run.open(store).info.run, "reads", 2, 23, True, 0.0, reading=((3, 9),))
        store.put(keys.replica("reads"), dump(beat))
    abandoned = tmp_path / "deltas" / ".tmp-1-alive"
    abandoned.write_bytes(b"half an object")
    monkeypatch.setattr(time, "time_ns", lambda: real() + int(4 * HOUR * 1e9))
    monkeypatch.setattr(time, "time", lambda: real() / 1e9 + 4 * HOUR)
    plan = prune(Run.open(store), Retention(last=1, unfinished=HOUR))
    assert plan.waiting == tuple(range(3, 10))
    assert set(Run.open(store).listed()) == {*range(3, 10), *range(16, COUNT)}
    assert abandoned.exists(), "begun a moment ago"


def test_several_prunes_at_once(run: Store, models: list[Model]) -> None:
    errors: list[BaseException] = []

    def work(keep: int) -> None:
        try:
            for _ in range(3):
                prune(Run.open(run), Retention(last=keep, grace=0.0))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(keep,)) for keep in (1, 2, 5, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    result = verify(Run.open(run))
    assert result.failure is None, result.failure
    assert Run.open(run).listed() == list(range(16, COUNT))
    assert Run.open(run).pruned().versions == ((0, 15),)


class HalfPruned(CountingStore):
    """One of which another prune has deleted the manifest of version 2; those up to 15 go when the next prune looks for
    the second time, if it goes on. Its marks were lost."""

    def __init__(self, inner: Store, goes_on: bool) -> None:
        super().__init__(inner)
        self._looks, self._going = 0, range(16) if goes_on else range(0)
        inner.delete(keys.manifest(2))

    def put(self, key: str, *args: Any, **options: Any) -> Any:
        self._looks += key == keys.CLOCK
        if self._looks == 2:
            for version in self._going:
                self.delete(keys.manifest(version))
        return super().put(key, *args, **options)


def test_a_prune_looks_again_where_another_is_halfway(run: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "_HALFWAY_S", 0.0)
    prune(Run.open(HalfPruned(run, goes_on=True)), Retention(last=9, grace=0.0))
    assert Run.open(run).listed() == list(range(16, COUNT))


def test_a_prune_stops_where_a_version_that_stays_has_no_way(run: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "_HALFWAY_S", 0.0)
    with pytest.raises(MissingBase, match="no anchor leads there"):
        prune(Run.open(HalfPruned(run, goes_on=False)), Retention(last=9, grace=0.0))
    assert Run.open(run).listed() == [v for v in range(COUNT) if v != 2]


def test_marks_that_another_prune_lost_are_made_again(run: Store) -> None:
    info = Run.open(run).info.run

    def hook(moment: str, verb: str, key: str) -> None:
        if (moment, verb, key) == ("before", "delete", keys.manifest(15)):
            run.put(keys.PRUNED, dump(Pruned.of(info, [3])))

    prune(Run.open(HookedStore(run, hook)), NOW)
    assert Run.open(run).pruned().versions == ((0, 15),)
    assert verify(Run.open(run)).failure is None


def test_leftovers_of_crashed_writers_are_deleted(tmp_path: Path, models: list[Model]) -> None:
    store = LocalStore(tmp_path)
    publish(store, models[:2])
    old, young = tmp_path / "deltas" / ".tmp-1-dead", tmp_path / "deltas" / ".tmp-2-alive"
    for path in (old, young):
        path.write_bytes(b"half an object")
    os.utime(old, (0, 0))
    prune(Run.open(Retrying(store)), Retention())
    assert not old.exists()
    assert young.exists()
