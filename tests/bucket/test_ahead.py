"""Fetching ahead: in order, and dropped without waiting."""

from __future__ import annotations

import gc
import threading
from typing import Any

from deltawire.bucket.ahead import arrivals
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core import chain
from deltawire.store import Store
from deltawire.testing import CountingStore
from support import history, publish


def test_dropped_half_way_it_does_not_wait_for_what_is_being_fetched(store: Store) -> None:
    publish(store, history(6), anchor_ratio=1e6)
    release, started = threading.Event(), threading.Event()

    class Slow(CountingStore):
        def get_range(self, key: str, start: int, length: int) -> bytes:
            if "step_000003" in key:
                started.set()
                release.wait(30)
            return super().get_range(key, start, length)

    run = Run.open(Slow(store))
    coming: Any = arrivals(run, chain.plan(None, 5, run.timeline(5)))
    assert next(coming).parcel().manifest.version == 0
    assert started.wait(30)
    coming.close()
    assert not release.is_set()
    release.set()


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
