"""The heartbeats of a large fleet in one object: `log`, `fleet` and `dash` read that instead of thousands."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from deltawire.bucket.run import Run
from deltawire.core import keys
from deltawire.core.manifest import Heartbeat, Roster, SyncRecord, dump
from deltawire.fleet import Fleet, Member
from deltawire.keeper import keeper as keeping
from deltawire.keeper import roster
from deltawire.keeper.keeper import Keeper, KeeperOptions
from deltawire.keeper.roster import RosterWriter
from deltawire.store import LocalStore, Store
from deltawire_wordle.counting import CountingStore
from support import history, publish

REAL = [f"gpu-{number:02}" for number in range(12)]


@pytest.fixture
def run(store: Store, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(roster, "LEAST", 10)
    publish(store, history(3))
    return Run.open(store)


def beat(run: Run, name: str, *, version: int = 2, run_id: str = "", **more: object) -> None:
    sync = SyncRecord(version, 0, time.time(), 0.5, 1000, {"pause": 0.01})
    found = Heartbeat(run_id or run.info.run, name, version, 2, True, time.time(), syncs=(sync,), address="10.0.0.5:80")
    run.store.put(f"{keys.REPLICAS}{name}.json", dump(msgspec.structs.replace(found, **more)))


def members(run: Run) -> tuple[dict[str, Member], int]:
    """Replicas by name, and the requests that it took to find them."""
    counting = CountingStore(run.store)
    fleet = Fleet(Run(counting, run.info))
    fleet.read()
    return {member.replica: member for member in fleet.members(2)}, counting.requests.total()


def test_two_requests_show_what_all_heartbeats_do(run: Run) -> None:
    for number, name in enumerate(REAL):
        beat(run, name, version=number % 3, error="x" * (number % 2), healthy=number % 2 == 0)
    one_by_one, many = members(run)
    assert many > len(REAL)
    assert RosterWriter(run).update() == len(REAL)
    at_once, few = members(run)
    assert few == 2
    shown = ("version", "lag", "health", "pause_s", "address", "error", "role", "clock_s", "at")
    assert at_once.keys() == one_by_one.keys() == {*REAL}
    for name in REAL:
        for field in shown:
            assert getattr(at_once[name], field) == getattr(one_by_one[name], field), (name, field)
        assert [sync.version for sync in at_once[name].syncs] == [one_by_one[name].version]


def test_what_did_not_change_is_not_read_again(run: Run) -> None:
    for name in REAL:
        beat(run, name)
    counting = CountingStore(run.store)
    writer = RosterWriter(Run(counting, run.info))
    writer.update()
    counting.reset()
    beat(run, REAL[3], version=1)
    assert writer.update() == len(REAL)
    assert counting.requests == {"list": 1, "get": 1, "put": 1}
    fleet = Fleet(run)
    fleet.read()
    assert fleet.requests == 2
    fleet.read()
    assert fleet.requests == 1, "the same roster"
    assert {member.replica: member.version for member in fleet.members(2)}[REAL[3]] == 1


def test_a_small_fleet_needs_none(run: Run) -> None:
    for name in REAL[:9]:
        beat(run, name)
    assert RosterWriter(run).update() == 0
    assert [item for item in run.store.list() if item.key == keys.ROSTER] == []
    fleet = Fleet(run)
    fleet.read()
    fleet.read()
    assert fleet.requests == 1, "it is not looked for again"
    assert len(fleet.members(2)) == 9


def test_a_roster_that_is_old_or_damaged_is_not_used(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in REAL:
        beat(run, name)
    good = Roster(run.info.run, (), ())
    one = Heartbeat("", "gpu-00", 1, 2, True, 0.0)
    for data in (
        b"{",
        b"[]",
        dump(Roster("f" * 32, (), ())),
        dump(good).replace(b'"modified":[]', b'"modified":[1.0]'),
        dump(Roster(run.info.run, (one,), (1.0,))).replace(b"gpu-00", b"../gpu"),
        b" " * (keys.limit(keys.ROSTER) + 1),
    ):
        run.store.put(keys.ROSTER, data)
        assert members(run)[0].keys() == {*REAL}, data[:60]
    run.store.put(keys.ROSTER, dump(good))
    assert members(run)[0] == {}
    monkeypatch.setattr("deltawire.bucket.roster.FRESH_S", -1000.0)
    assert members(run)[0].keys() == {*REAL}


def test_a_flood_of_forged_heartbeats_hides_nobody(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "MOST", 30)
    for name in REAL:
        beat(run, name)
    writer = RosterWriter(run)
    writer.update()
    for number in range(100):
        beat(run, f"forged-{number}")
    for _ in range(3):
        assert writer.update() == 30
        assert {*REAL} <= members(run)[0].keys()
        beat(run, "forged-1")
    fleet = Fleet(run, only=["gpu-*"])
    fleet.read()
    assert [member.replica for member in fleet.members(2)] == REAL
    assert fleet.left_out == 82


def test_a_keeper_that_is_restarted_in_a_flood_goes_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in REAL:
        beat(run, name)
    RosterWriter(run).update()
    monkeypatch.setattr(roster, "MOST", 30)
    for number in range(100):
        beat(run, f"forged-{number}")
    assert RosterWriter(run).update() == 30
    assert {*REAL} <= members(run)[0].keys()


def test_hostile_heartbeats_take_no_more_room_than_others(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in REAL:
        beat(run, name)
    phases = {f"{number}" * 10: 1.0 for number in range(200)}
    beat(run, "long", error="x" * 2000, timings=phases, role="y" * 1000)
    beat(run, "sync", syncs=(SyncRecord(1, 0, 1.0, 1.0, 1, phases),))
    beat(run, "address", address="10.0.0.1:80\n}")
    beat(run, "another", run_id="f" * 32)
    run.store.put(f"{keys.REPLICAS}broken.json", b"{")
    run.store.put(f"{keys.REPLICAS}no name.json", dump(Heartbeat(run.info.run, "no name", 1, 2, True, 0.0)))
    assert RosterWriter(run).update() == len(REAL) + 3
    found = run.roster()
    assert found is not None
    assert max(len(dump(beat)) for beat in found.replicas) < 1000
    assert {beat.address for beat in found.replicas} == {"", "10.0.0.5:80"}
    assert found.left_out == 2
    monkeypatch.setitem(keys.LIMITS, keys.ROSTER, 6000)
    assert 0 < RosterWriter(run).update() < len(REAL)
    assert len(run.store.get(keys.ROSTER).data) <= 6000
    assert members(run)[1] == 2


def test_the_keeper_that_works_writes_it_to_each_bucket(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "EVERY_S", 0.02)
    monkeypatch.setattr("deltawire.keeper.lease.SETTLE_S", 0.0)
    for name in REAL:
        beat(run, name)
    mirror = LocalStore(tmp_path / "mirror")
    stop, keeper = threading.Event(), Keeper(run.store, KeeperOptions(mirrors=(mirror.url,)))
    for kept in keeper.follow(poll=0.05, stop=stop):
        if kept.version == 2:
            stop.set()
    deadline = time.monotonic() + 30

    def until(done: Callable[[], bool]) -> None:
        while not done():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    until(lambda: run.roster_object() is not None)
    found = run.roster()
    assert found is not None
    assert {beat.replica for beat in found.replicas} == {*REAL, keeper.id}
    # replicas of another region write theirs to its bucket
    until(lambda: any(item.key == keys.HEAD for item in mirror.list()))
    copied = Run.open(mirror)
    for name in REAL:
        beat(copied, f"far-{name}")
    until(lambda: copied.roster_object() is not None)
    keeper.close()
    assert members(copied)[0].keys() == {f"far-{name}" for name in REAL}
