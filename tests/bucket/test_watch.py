"""Who watches a run learns of new versions: by announcement, by head, by looking past it."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import deltawire as dw
from deltawire.bucket.prune import Retention, prune
from deltawire.bucket.run import Run
from deltawire.bucket.watch import PROBE_EVERY, Rhythm, Watcher, wait_for_run
from deltawire.core import keys
from deltawire.core.errors import ObjectNotFound, ObjectTooLarge, RunReplaced, StoreUnavailable, Unsupported
from deltawire.core.manifest import Head, dump
from deltawire.replica import Replica
from deltawire.store import LocalStore, Retrying, Store
from deltawire.store.base import Fetched
from deltawire.trainer import Publisher
from deltawire_wordle.counting import CountingStore
from support import blank, copy, heartbeats, history, publish, same

FOREVER = 10_000.0


class Announcer(CountingStore):
    """A store that tells what changes, for as long as nobody cuts the line."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.lines: list[queue.Queue[str | Exception]] = []
        self.calls = 0
        self.deaf = threading.Event()

    def announcements(self, stop: threading.Event) -> Iterator[str]:
        self.calls += 1
        line: queue.Queue[str | Exception] = queue.Queue()
        self.lines.append(line)
        line.put("")
        while not stop.is_set():
            try:
                said = line.get(timeout=0.01)
            except queue.Empty:
                continue
            if isinstance(said, Exception):
                self.lines.remove(line)
                raise said
            yield said

    def tell(self, said: str | Exception) -> None:
        for line in [*self.lines]:
            line.put(said)


def add(store: Store, weights: dict) -> None:
    with Publisher(store) as publisher:
        publisher.publish(weights).result(120)


# ── what it yields ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_newest_first_then_what_comes(store: Store) -> None:
    versions = history(6)
    publish(store, versions[:3])
    watching = dw.watch(store, poll=0.0)
    assert next(watching) == 2
    add(store, versions[3])
    assert next(watching) == 3
    add(store, versions[4])
    add(store, versions[5])
    assert next(watching) == 5, "several at once are one event"


def test_every_version_since(store: Store) -> None:
    versions = history(9)
    publish(store, versions)
    assert [*itertools.islice(dw.watch(store, since=3, every=True, poll=0.0), 5)] == [4, 5, 6, 7, 8]
    assert [*itertools.islice(dw.watch(store, since=-1, every=True, poll=0.0), 2)] == [0, 1]


def test_what_was_pruned_is_passed_over(store: Store) -> None:
    publish(store, history(9), anchor_every=3)
    prune(Run.open(store), Retention(last=2, grace=0))
    left = Run.open(store).listed()
    assert 0 not in left
    assert [*itertools.islice(dw.watch(store, since=0, every=True, poll=0.0), len(left))] == left


def test_it_waits_for_a_run_and_stops_when_told(store: Store) -> None:
    stop, seen = threading.Event(), queue.Queue[int]()

    def work() -> None:
        for version in dw.watch(store, poll=0.01, stop=stop):
            seen.put(version)

    watcher = threading.Thread(target=work)
    watcher.start()
    publish(store, history(1))
    assert seen.get(timeout=120) == 0
    stop.set()
    watcher.join(120)
    assert not watcher.is_alive()


def test_stopping_does_not_wait_for_the_next_look(store: Store) -> None:
    publish(store, history(1))
    for where in (store, Retrying(store), Announcer(store)):
        stop = threading.Event()
        watching = dw.watch(where, poll=FOREVER, stop=stop)
        assert next(watching) == 0
        threading.Timer(0.05, stop.set).start()
        assert [*watching] == []


# ── how it knows ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_announcement_is_enough(store: Store) -> None:
    """With a poll of hours, only being told can be how it knows."""
    versions = history(4)
    publish(store, versions[:1])
    for announcer in (Announcer(store), Announcer(store)):
        where: Store = announcer if announcer.calls else Retrying(announcer)
        watching = dw.watch(where, poll=FOREVER)
        newest = next(watching)
        told: queue.Queue[int] = queue.Queue()
        follower = threading.Thread(target=lambda w=watching, t=told: t.put(next(w)))
        follower.start()
        while not announcer.lines:
            assert follower.is_alive()
        add(store, versions[newest + 1])
        announcer.tell("deltas/of no interest")
        announcer.tell(keys.manifest(newest + 1))
        assert told.get(timeout=120) == newest + 1
        follower.join()
        watching.close()


def test_a_broken_line_is_taken_up_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltawire.bucket.watch._SILENCE_S", (0.01, 0.02))
    versions = history(3)
    publish(store, versions[:1])
    announcer = Announcer(store)
    watching = dw.watch(announcer, poll=FOREVER)
    assert next(watching) == 0
    told: queue.Queue[int] = queue.Queue()
    follower = threading.Thread(target=lambda: [told.put(version) for version in itertools.islice(watching, 2)])
    follower.start()
    while not announcer.lines:
        assert follower.is_alive()
    # what comes while the line is down is found when it stands again
    add(store, versions[1])
    announcer.tell(StoreUnavailable("cut", retry_after=0.01))
    assert told.get(timeout=120) == 1
    while announcer.calls < 2 or not announcer.lines:
        assert follower.is_alive()
        time.sleep(0.001)
    add(store, versions[2])
    announcer.tell("")
    assert told.get(timeout=120) == 2
    follower.join()


def test_a_store_that_never_tells_is_asked(store: Store) -> None:
    class Mute(CountingStore):
        def announcements(self, stop: threading.Event) -> Iterator[str]:
            raise Unsupported("says nothing")

    versions = history(2)
    publish(store, versions[:1])
    watching = dw.watch(Mute(store), poll=0.001)
    assert next(watching) == 0
    add(store, versions[1])
    assert next(watching) == 1


def test_a_thousand_idle_looks_are_a_thousand_requests(store: Store) -> None:
    publish(store, history(3))
    run = Run.open(store)
    for known, gone in ((2, ()), (2, (keys.HEAD,))):
        for key in gone:
            store.delete(key)
        counting = CountingStore(store)
        watcher = Watcher(counting, poll=1.0, stop=threading.Event())
        counted = Run(counting, run.info)
        for _ in range(1000):
            assert watcher.look(counted, known) == known
        assert counting.requests.total() <= 1000
        assert counting.requests["list"] == 0


def test_a_run_without_a_version_is_as_cheap(store: Store) -> None:
    publish(store, history(1))
    for info in [*store.list()]:
        if info.key != keys.RUN:
            store.delete(info.key)
    counting = CountingStore(store)
    watcher = Watcher(counting, poll=1.0, stop=threading.Event())
    run = Run.open(counting)
    assert watcher.look(run, None) is None
    counting.reset()
    for _ in range(100):
        assert watcher.look(run, None) is None
    assert counting.requests.total() <= 100


@pytest.mark.parametrize("head", ["missing", "behind", "nonsense", "huge"])
def test_head_is_only_a_hint(store: Store, head: str) -> None:
    versions = history(3)
    publish(store, versions[:2])
    run = Run.open(store)

    def spoil() -> None:
        if head == "missing":
            store.delete(keys.HEAD)
        else:
            said = {"behind": dump(Head(run.info.run, 0)), "nonsense": b"{", "huge": b" " * (1 << 20)}[head]
            store.put(keys.HEAD, said)

    spoil()
    watcher = Watcher(store, poll=1.0, stop=threading.Event())
    assert watcher.look(run, None) == 1
    add(store, versions[2])
    spoil()
    found = [watcher.look(run, 1) for _ in range(PROBE_EVERY)]
    assert 2 in found


@pytest.mark.parametrize("error", [ObjectNotFound("not visible yet"), StoreUnavailable("down")])
def test_a_manifest_that_head_names_is_asked_for_again(store: Store, error: Exception) -> None:
    """Head's ETag counts as seen only when its version was found: else the next looks would not read it again."""
    versions = history(2)
    publish(store, versions[:1])

    class Late(CountingStore):
        failing = 0

        def get(self, key: str, *, limit: int | None = None) -> Fetched:
            if key == keys.manifest(1) and self.failing:
                self.failing -= 1
                raise error
            return super().get(key, limit=limit)

    late = Late(store)
    watcher, run = Watcher(late, poll=1.0, stop=threading.Event()), Run.open(late)
    assert watcher.look(run, None) == 0
    add(store, versions[1])
    late.failing = 1
    known: int | None = 0
    for _ in range(2):
        with suppress(StoreUnavailable):
            known = watcher.look(run, known)
    assert known == 1


# ── another run at the same address ──────────────────────────────────────────────────────────────────────────────────


def replace(store: Store, versions: list, *, head: bool = True) -> None:
    for info in [*store.list()]:
        store.delete(info.key)
    publish(store, versions)
    if not head:
        store.delete(keys.HEAD)


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_run_that_was_replaced(store: Store, head: bool, count: int) -> None:
    """Whether the new run is behind the old one, level with it or ahead, and whether its head is there."""
    publish(store, history(3))
    watching = dw.watch(store, poll=0.0)
    assert next(watching) == 2
    replace(store, history(count, seed=9), head=head)
    with pytest.raises(RunReplaced, match="start again to follow the new run"):
        next(watching)
    assert next(dw.watch(store, poll=0.0)) == count - 1


def test_a_follower_keeps_its_weights_when_the_run_is_replaced(store: Store) -> None:
    versions = history(3)
    publish(store, versions)
    live = blank(versions[0])
    replica = Replica(store, heartbeat=0)
    follower = replica.follow(live, poll=0.0)
    assert next(follower) == 2
    replace(store, history(5, seed=9))
    with pytest.raises(RunReplaced):
        next(follower)
    assert same(live, versions[2])
    assert replica.version == 2
    assert "another run" in replica.trouble


def test_a_head_of_another_run_is_no_replacement(store: Store) -> None:
    versions = history(3)
    publish(store, versions[:2])
    watcher = Watcher(store, poll=1.0, stop=threading.Event())
    run = Run.open(store)
    store.put(keys.HEAD, dump(Head("0" * 16, 7)))
    assert watcher.look(run, 1) == 1
    add(store, versions[2])
    assert watcher.look(run, 1) == 2


# ── how often it looks ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_rhythm_of_a_run() -> None:
    rhythm = Rhythm(most=1.0)
    assert rhythm.pause(0.0) == 1.0, "nothing is known yet"
    for at in (0.0, 4.0, 8.0, 12.0):
        rhythm.saw(1, at)
    assert rhythm.pause(12.0) == 1.0, "none is due for two seconds, but no pause is longer than poll"
    assert rhythm.pause(13.5) == 0.5, "then it is time"
    assert rhythm.pause(14.1) == rhythm.pause(19.0) == 0.25, "close together while one is due"
    silence = [rhythm.pause(12.0 + since) for since in (8.0, 10.0, 14.0, 16.0, 1000.0)]
    assert silence == sorted(silence)
    assert silence[-1] == 1.0, "a silence makes it rare again"
    rhythm.saw(8, 20.0)
    assert rhythm.pause(25.0) < 0.5, "eight at once count as eight"
    assert Rhythm(most=0.0).pause(5.0) == 0.0
    quick = Rhythm(most=1.0)
    for at in (0.0, 0.001, 0.002):
        quick.saw(1, at)
    assert quick.pause(0.002) == 0.05, "and none is shorter than that"


# ── what lies there may be huge ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("key", [keys.RUN, keys.manifest(20), keys.PRUNED])
def test_a_terabyte_in_place_of_a_record(tmp_path: Path, key: str) -> None:
    versions = history(21, changes=1)
    publish(LocalStore(tmp_path), versions)
    (tmp_path / key).touch()
    with open(tmp_path / key, "r+b") as file:
        file.truncate(1 << 40)
    live = copy(versions[3])
    with pytest.raises(ObjectTooLarge, match=r"1,099,511,627,776 bytes"):
        Replica(str(tmp_path), heartbeat=0).sync(live, 20)
    assert same(live, versions[3])


@pytest.mark.parametrize("key", [keys.HEAD, keys.history(16), keys.replica("r")])
def test_a_terabyte_in_place_of_a_hint(tmp_path: Path, key: str) -> None:
    versions = history(21, changes=1)
    publish(LocalStore(tmp_path), versions)
    (tmp_path / key).parent.mkdir(exist_ok=True)
    (tmp_path / key).touch()
    with open(tmp_path / key, "r+b") as file:
        file.truncate(1 << 40)
    live = blank(versions[0])
    assert Replica(str(tmp_path), heartbeat=0).sync(live) == 20
    assert same(live, versions[20])
    assert heartbeats(Run.open(str(tmp_path))) == []


def test_waiting_for_a_run(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    class Away(CountingStore):
        def get(self, key: str, **options: object) -> Fetched:
            raise StoreUnavailable("no such host")

    with pytest.raises(StoreUnavailable):
        wait_for_run(Away(store))
    publish(store, history(1))
    assert wait_for_run(store).newest() == 0
    assert not caplog.records
    for key in [item.key for item in store.list() if item.key != keys.RUN]:
        store.delete(key)
    waiter = threading.Thread(target=wait_for_run, args=(store, 0.01))
    waiter.start()
    while not caplog.records:
        waiter.join(0.01)
    assert "no version" in caplog.text
    add(store, history(1)[0])
    waiter.join(120)
    assert not waiter.is_alive()


def test_a_run_that_is_missing_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = str(tmp_path / "run")
    waiter = threading.Thread(target=wait_for_run, args=(place, 0.01))
    waiter.start()
    while not caplog.records:
        waiter.join(0.01)
    publish(LocalStore(place), history(1))
    waiter.join(120)
    assert not waiter.is_alive()
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
