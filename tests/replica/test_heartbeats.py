"""What the bucket knows of a replica: how it is, what it does, and nothing that could fail a sync."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from deltawire.bucket.run import Run
from deltawire.core.errors import HashMismatch, StoreUnavailable
from deltawire.replica import Replica
from deltawire.replica.heartbeats import SYNCS
from deltawire.store import Store
from support import HookedStore, blank, copy, delta_key, heartbeats, history, publish, same, spoil


def test_the_heartbeat_says_how_it_is(store: Store) -> None:
    versions = history(3)
    publish(store, versions)
    replica = Replica(store, id="box-1.gpu_0")
    began = time.time()
    live = blank(versions[0])
    replica.sync(live, 1)
    replica.sync(live)
    (beat,) = heartbeats(Run.open(store))
    assert (beat.replica, beat.version, beat.newest, beat.healthy, beat.error) == ("box-1.gpu_0", 2, 2, True, "")
    assert beat.run == Run.open(store).info.run
    assert began - 1 <= beat.at <= time.time() + 1
    assert beat.timings.keys() >= {"fetch", "decode", "apply"}


def test_the_heartbeat_says_what_is_wrong(store: Store) -> None:
    versions = history(2)
    publish(store, versions, anchor_ratio=1e9)
    live = copy(versions[0])
    replica = Replica(store, id="r")
    replica.sync(live, 0)
    spoil(store, delta_key(store, 1))
    with pytest.raises(HashMismatch):
        replica.sync(live)
    (beat,) = heartbeats(Run.open(store))
    assert (beat.version, beat.newest, beat.healthy) == (0, 1, False)
    assert "hash" in beat.error


def test_no_heartbeat_where_none_is_wanted(store: Store) -> None:
    versions = history(1)
    publish(store, versions)
    Replica(store, heartbeat=0).sync(blank(versions[0]))
    assert not [*store.list("replicas/")]


def test_an_idle_follower_beats_in_its_rhythm(store: Store) -> None:
    versions = history(1)
    publish(store, versions)
    beats = 0

    def hook(moment: str, verb: str, key: str) -> None:
        nonlocal beats
        beats += moment == "after" and verb == "put" and key.startswith("replicas/")
        if beats == 6:
            stop.set()

    stop = threading.Event()
    began = time.monotonic()
    for _ in Replica(HookedStore(store, hook), heartbeat=0.05).follow(blank(versions[0]), poll=0.002, stop=stop):
        pass
    # one after the sync, the others no closer than the rhythm
    assert beats == 6
    assert time.monotonic() - began > 3.9 * 0.05


def test_a_replica_works_without_being_seen(store: Store) -> None:
    """A bucket it may only read."""
    versions = history(2)
    publish(store, versions)

    def hook(moment: str, verb: str, key: str) -> None:
        if verb.startswith("put"):
            raise StoreUnavailable("read only")

    live = blank(versions[0])
    assert Replica(HookedStore(store, hook)).sync(live) == 1
    assert same(live, versions[1])


@pytest.mark.parametrize("id", ["", "../x", "a/b", "a b", ".hidden", "x" * 129, "ü"])
def test_ids_that_are_no_names(store: Store, id: str) -> None:
    if id == "":
        assert Replica(store, id=id).id
        return
    with pytest.raises(ValueError, match="replica id"):
        Replica(store, id=id)


def test_two_replicas_have_two_names(store: Store) -> None:
    make: Callable[[], str] = lambda: Replica(store).id  # noqa: E731
    assert make() != make()


def test_a_heartbeat_tells_of_the_latest_syncs(store: Store) -> None:
    versions = history(4)
    publish(store, versions, anchor_ratio=1e9)
    replica, live = Replica(store, id="r"), blank(versions[0])
    for version in (0, 1, 1, 3):
        replica.sync(live, version)
    (beat,) = heartbeats(Run.open(store))
    # a sync that had nothing to do is none
    assert [(sync.version, sync.previous, sync.error) for sync in beat.syncs] == [(0, None, ""), (1, 0, ""), (3, 1, "")]
    last = beat.syncs[-1]
    assert last.bytes == sum(Run.open(store).manifest(v).link("delta", v - 1).bytes for v in (2, 3))
    assert {"fetch", "decode", "apply", "prove"} <= last.timings.keys()
    assert sum(last.timings.values()) <= last.seconds + 1e-3


def test_a_failure_that_repeats_is_one_record(store: Store) -> None:
    versions = history(3)
    publish(store, versions, anchor_ratio=1e9)
    replica, live = Replica(store, id="r"), blank(versions[0])
    replica.sync(live, 1)
    spoil(store, delta_key(store, 2))
    for _ in range(3):
        with pytest.raises(HashMismatch):
            replica.sync(live)
    (beat,) = heartbeats(Run.open(store))
    assert [(sync.version, sync.times) for sync in beat.syncs] == [(1, 1), (2, 3)]
    assert delta_key(store, 2) in beat.syncs[-1].error


def test_a_heartbeat_with_long_errors_stays_readable(store: Store) -> None:
    versions = history(2)
    publish(store, versions)
    replica, live = Replica(store, id="r"), blank(versions[0])
    replica.sync(live, 0)
    for version in range(100):
        replica.heartbeats.record(version, 0, 1.0, 0, {}, "\x01" * 1000)
    replica.sync(live)
    (beat,) = heartbeats(Run.open(store))
    assert 0 < len(beat.syncs) <= SYNCS
    assert beat.syncs[-1].version == 1


def test_an_error_that_is_no_text_ends_no_heartbeat(store: Store) -> None:
    versions = history(2)
    publish(store, versions)
    replica, live = Replica(store, id="r"), blank(versions[0])
    replica.sync(live, 0)
    replica.heartbeats.record(1, 0, 1.0, 0, {}, "cannot read /models/\udcff")
    replica.heartbeats.beat("cannot read /models/\udcff", force=True)
    (beat,) = heartbeats(Run.open(store))
    assert beat.error == "cannot read /models/?"
    assert replica.sync(live) == 1
