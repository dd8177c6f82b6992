"""Hundreds of versions: what is asked of a bucket grows with the logarithm of a run's length, or not at all."""

from __future__ import annotations

import math
import threading
import uuid
from dataclasses import replace

import pytest

from deltawire.bucket.run import Run
from deltawire.bucket.walk import Walker
from deltawire.core import chain, keys
from deltawire.core.manifest import Head, dump
from deltawire.replica import Replica
from deltawire.store import ObjectStore, Store
from deltawire.trainer import Publisher
from deltawire_wordle.counting import CountingStore
from support import Model, blank, copy, model, same, trained

COUNT = 600
"""Enough for a page of history over 512 versions."""


class Long:
    def __init__(self) -> None:
        self.store: Store = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
        self.weights: dict[int, Model] = {}
        self.cost: dict[int, int] = {}
        counting = CountingStore(self.store)
        weights = model()
        with Publisher(counting, anchor_ratio=1e9) as publisher:
            for version in range(COUNT):
                counting.reset()
                publisher.publish(weights).result(120)
                self.cost[version] = counting.requests.total()
                self.weights[version] = weights
                weights = trained(weights, version, changes=1)
        self.next = weights


@pytest.fixture(scope="module")
def long() -> Long:
    with pytest.MonkeyPatch.context() as patch:
        # hundreds of tiny versions: starting threads would take longer than the work
        patch.setenv("DELTAWIRE_THREADS", "1")
        # not while requests are counted
        patch.setenv("DELTAWIRE_WRITER_RENEWAL", "60")
        return Long()


def test_publishing_costs_the_same_at_version_5_and_at_version_595(long: Long) -> None:
    """Data, whether the run is still ours, manifest, head; a page of history every 16 versions."""
    assert {long.cost[v] for v in range(1, COUNT) if v % 16} == {4}
    assert {long.cost[v] for v in range(16, COUNT, 16)} == {5}


def test_the_whole_log(long: Long) -> None:
    for newest in (15, 99, COUNT - 1):
        counting = CountingStore(long.store)
        run = Run.open(counting)
        timeline = run.timeline(newest)
        assert list(timeline) == list(range(newest + 1))
        # run.json, the manifest, the list of what was pruned, and the pages
        assert counting.requests.total() <= 3 + math.log2(newest + 1)
        assert counting.requests["list"] == 0


def test_finding_the_newest(long: Long) -> None:
    counting = CountingStore(long.store)
    assert Run.open(counting).newest() == COUNT - 1
    # run.json, head, its manifest, the one after it that is not there, and whether that was pruned
    assert counting.requests.total() == 5


@pytest.mark.parametrize("version", [0, 1, 500, COUNT - 2, COUNT, 10**12])
def test_finding_the_newest_where_head_is_wrong(long: Long, version: int) -> None:
    counting = CountingStore(long.store)
    run = Run.open(counting)

    class WrongHead(CountingStore):
        def get(self, key: str, *, limit: int | None = None):  # type: ignore[no-untyped-def]
            found = super().get(key, limit=limit)
            return replace(found, data=dump(Head(run.info.run, version))) if key == "head.json" else found

    counting = WrongHead(long.store)
    assert Run.open(counting).newest() == COUNT - 1
    # every stride and every halving is a manifest; for those that are not there, pruned.json is read
    assert counting.requests.total() <= 6 + 3 * math.log2(COUNT)
    assert counting.requests["list"] <= (version >= COUNT)


def test_a_timeline_with_a_lost_page(long: Long) -> None:
    """The largest page covers 512 versions. What it says, one manifest and smaller pages say together."""

    class Lossy(CountingStore):
        def get(self, key: str, *, limit: int | None = None):  # type: ignore[no-untyped-def]
            return super().get("nothing" if key == keys.history(512) else key, limit=limit)

    counting = Lossy(long.store)
    assert list(Run.open(counting).timeline(COUNT - 1)) == list(range(COUNT))
    assert counting.requests.total() <= 6 + 2 * math.log2(COUNT)


def test_finding_the_newest_without_head(long: Long) -> None:
    class Headless(CountingStore):
        def get(self, key: str, *, limit: int | None = None):  # type: ignore[no-untyped-def]
            return super().get("head.json.gone" if key == "head.json" else key, limit=limit)

    counting = Headless(long.store)
    assert Run.open(counting).newest() == COUNT - 1
    assert counting.requests["list"] == 1
    assert counting.requests.total() <= 6


def test_planning_a_catch_up(long: Long) -> None:
    """From one version behind to all of them: planning asks for what lies between, in O(log n) pages."""
    live = copy(long.weights[0])
    for have in (COUNT - 2, COUNT - 5, COUNT - 40, COUNT - 300, 0, None):
        counting = CountingStore(long.store)
        run = Run.open(counting)
        run.manifest(COUNT - 1)
        counting.reset()
        steps = Walker(run).plan(have, COUNT - 1)
        behind = COUNT - 1 - (have or 0)
        assert counting.requests.total() <= 1 + math.ceil(math.log2(behind + 1)), have
        assert len(steps) == behind + (have is None)
        assert steps[-1].version == COUNT - 1
    # the manifest alone tells how to get on from a few versions behind
    counting = CountingStore(long.store)
    run = Run.open(counting)
    run.manifest(COUNT - 1)
    counting.reset()
    assert len(Walker(run).plan(COUNT - 3, COUNT - 1)) == 2
    assert counting.requests.total() == 0
    assert same(live, long.weights[0])


def test_an_idle_poll_is_one_request(long: Long) -> None:
    counting = CountingStore(long.store)
    live = copy(long.weights[COUNT - 1])
    replica = Replica(counting, heartbeat=0)
    replica.sync(live)
    counting.reset()
    stop, polls = threading.Event(), 0

    def pin() -> None:
        """Before each poll: what the last one cost."""
        nonlocal polls
        assert counting.requests == ({"get_if_changed": 1} if polls else {}), polls
        # almost nothing comes over the wire, once the head has been seen
        assert counting.bytes_in == 0 or polls == 1
        counting.reset()
        polls += 1
        if polls == 10:
            stop.set()

    assert [*replica.follow(live, poll=0, stop=stop, pin=pin)] == []
    assert polls == 10


def test_an_idle_follower(long: Long) -> None:
    """A thousand looks are a thousand requests; now and then one goes past head, in case head was left behind."""
    counting = CountingStore(long.store)
    live = copy(long.weights[COUNT - 1])
    stop = threading.Event()
    replica = Replica(counting, heartbeat=0)
    polls = 0

    def pin() -> None:
        nonlocal polls
        polls += 1
        if polls == 1000:
            stop.set()

    follower = replica.follow(live, poll=0, stop=stop, pin=pin)
    assert next(follower) == COUNT - 1
    counting.reset()
    polls = 0
    assert [*follower] == []
    assert counting.requests.total() == polls == 1000
    assert 0 < counting.requests["get"] < 100
    assert counting.bytes_in < 100


def test_taking_the_next_version(long: Long) -> None:
    """Poll, manifest, delta."""
    counting = CountingStore(long.store)
    live = copy(long.weights[COUNT - 2])
    replica = Replica(counting, heartbeat=0)
    replica.sync(live, COUNT - 2)
    counting.reset()
    assert next(replica.follow(live)) == COUNT - 1
    assert counting.requests.total() == 3
    assert same(live, long.weights[COUNT - 1])


def test_a_newcomer(long: Long) -> None:
    counting = CountingStore(long.store)
    live = blank(long.weights[0])
    assert Replica(counting, heartbeat=0).sync(live) == COUNT - 1
    assert same(live, long.weights[COUNT - 1])
    steps = len(chain.plan(None, COUNT - 1, Run.open(long.store).timeline(COUNT - 1)))
    # each step is a manifest and an object; around them what finding and planning cost
    assert counting.requests.total() <= 2 * steps + 10 + 2 * math.log2(COUNT)
    assert steps == COUNT


def test_reopening_the_run_to_publish(long: Long) -> None:
    counting = CountingStore(long.store)
    with Publisher(counting) as publisher:
        assert publisher.version == COUNT - 1
    assert counting.requests.total() <= 7 + math.log2(COUNT)
    assert counting.requests["list"] == 0
