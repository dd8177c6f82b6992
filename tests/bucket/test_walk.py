"""Ways to a version: the cheapest, another around a bad link, and none; what is needed next is prefetched."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import msgspec
import pytest
from blake3 import blake3

from deltawire.bucket import fetch
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.bucket.walk import Walker, prefetch
from deltawire.core import chain
from deltawire.core.chain import Step
from deltawire.core.errors import DeltawireError, HashMismatch, MissingBase, ObjectNotFound, StoreUnavailable
from deltawire.core.manifest import Blob, Link
from deltawire.store import Store
from deltawire.trainer import Publisher
from deltawire_wordle.counting import CountingStore
from interrupting import Interrupted, raising_at_each_line
from support import history, publish


@pytest.fixture
def run(store: Store) -> Run:
    with Publisher(store, anchor_every=2, anchor_ratio=1e9) as publisher:
        for weights in history(5):
            publisher.publish(weights).result(60)
    return Run.open(store)


def kinds(steps: list[Step]) -> list[tuple[int, str]]:
    return [(step.version, step.kind) for step in steps]


def test_what_is_left_out_is_planned_around(run: Run) -> None:
    walker = Walker(run)
    first = walker.plan(3, 4)
    assert kinds(first) == [(4, "delta")]
    walker.leave_out(first)
    assert kinds(walker.plan(3, 4)) == [(4, "anchor")]
    walker.leave_out(walker.plan(3, 4))
    with pytest.raises(MissingBase):
        walker.plan(3, 4)
    # what was bad may be repaired since: another attempt begins anew
    assert Walker(run).plan(3, 4) == first


@pytest.mark.parametrize("failure", [HashMismatch("bad"), StoreUnavailable("away")], ids=["damaged", "away"])
def test_every_way_is_tried_before_giving_up(run: Run, failure: DeltawireError) -> None:
    walker, tried = Walker(run), []

    with pytest.raises(type(failure), match=str(failure)):
        for step, _ in walker.walk(lambda: 3, 4):
            tried.append((step.version, step.kind))
            walker.reject(step, failure)
    assert tried == [(4, "delta"), (4, "anchor")]


def test_a_manifest_that_was_replaced_excuses_its_link_once(run: Run, store: Store) -> None:
    walker = Walker(run)
    (step,) = walker.plan(3, 4)
    assert not walker.renew(step)
    key = "versions/000004.json"
    data = store.get(key).data
    store.put(key, data.replace(b'"changed":', b'"changed":1', 1))
    assert walker.renew(step)
    assert not walker.renew(step)


class Slow(CountingStore):
    """Holds back version 3."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.release, self.started = threading.Event(), threading.Event()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if "step_000003" in key:
            self.started.set()
            self.release.wait(120)
        return super().get_range(key, start, length)


def test_dropped_half_way_it_does_not_wait_for_what_is_being_fetched(store: Store) -> None:
    publish(store, history(6), anchor_ratio=1e6)
    slow = Slow(store)
    run = Run.open(slow)
    coming: Any = prefetch(run, chain.plan(None, 5, run.timeline(5)))
    assert next(coming)[1].result().manifest.version == 0
    assert slow.started.wait(120)
    coming.close()
    assert not slow.release.is_set()
    slow.release.set()


def test_interrupted_where_it_is_dropped_its_threads_end(store: Store) -> None:
    """With a lock of the standard library left taken, a process would wait for them when it ends."""
    publish(store, history(6), anchor_ratio=1e6)

    def operation(interrupted: Interrupted) -> None:
        slow = Slow(store)
        run = Run.open(slow)
        # those of another test whose walk is not collected yet wait for more work
        others = threading.enumerate()
        coming: Any = prefetch(run, chain.plan(None, 5, run.timeline(5)))
        while next(coming)[0].version != 3:
            pass
        assert slow.started.wait(120)
        prefetching = [thread for thread in threading.enumerate() if thread.name.startswith("deltawire-prefetch")]
        threads = [thread for thread in prefetching if thread not in others]
        interrupted(coming.close)
        slow.release.set()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()

    raising_at_each_line([threading.Condition.__enter__], operation)


def test_a_link_that_fails_leaves_no_open_file(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other objects were fetched by other threads, which end before or after the one that fails."""
    monkeypatch.setattr(fetch, "SMALL", 0)
    data = [bytes([n]) * 1000 for n in range(8)]
    blobs = tuple(Blob(f"anchors/{n}", 1000, blake3(data[n]).hexdigest(length=16)) for n in range(8))
    for blob, content in zip(blobs[1:], data[1:], strict=True):
        store.put(blob.key, content)
    publish(store, history(1))
    manifest = Run.open(store).manifest(0)
    forged = msgspec.structs.replace(manifest, links=(Link("anchor", objects=blobs),))
    run = Run.open(store)
    monkeypatch.setattr(run, "manifest", lambda version: forged)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        [(_, failed)] = [(step, pending) for step, pending in prefetch(run, [Step(0, "anchor", None, 8000)])]
        with pytest.raises(ObjectNotFound):
            failed.result()
    # the other threads may end after the one that failed
    end = time.monotonic() + 120
    while len(os.listdir("/proc/self/fd")) > before:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_walk_that_ends_in_an_error_leaves_nothing_that_waits(store: Store) -> None:
    """The collector runs wherever an object is made, also while a worker thread starts."""
    publish(store, history(20), anchor_ratio=1e6)
    store.delete(Run.open(store).manifest(5).links[0].objects[0].key)
    thresholds = gc.get_threshold()
    gc.set_threshold(20, 2, 2)
    try:
        for _ in range(40):
            assert not verify(Run.open(store)).ok
    finally:
        gc.set_threshold(*thresholds)
