"""Mirrors: the same run, byte for byte, whatever interrupts the copying."""

from __future__ import annotations

import pytest

from deltawire.bucket.prune import Retention, prune
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.bucket.versions import set_tag
from deltawire.core import keys
from deltawire.core.errors import RunReplaced, StoreUnavailable
from deltawire.keeper.keeper import KeeperOptions
from deltawire.keeper.mirror import Mirror
from deltawire.replica import Replica
from deltawire.store import Store
from keeping import Kept, empty, fresh, publish, settings, step
from support import same

LAST = 39


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    settings(monkeypatch)


@pytest.fixture
def kept() -> Kept:
    kept = fresh(LAST + 1)
    kept.keep(KeeperOptions(since=0, anchor_every=16))
    return kept


def is_a_copy(store: Store, kept: Kept) -> bool:
    """Verified, and every object that is there is the source's."""
    found = verify(Run.open(store))
    assert found.ok, found.failure
    assert not found.warnings
    for item in store.list():
        assert store.get(item.key).data == kept.store.get(item.key).data, item.key
    live = kept.blank()
    with Replica(store, heartbeat=0) as replica:
        replica.sync(live)
    return same(live, kept.weights[-1])


def test_a_mirror_is_the_same_run(kept: Kept) -> None:
    set_tag(kept.run, 7, "best")
    store = empty()
    assert Mirror(kept.run, store).update(LAST) == LAST + 1
    assert is_a_copy(store, kept)
    missing = {item.key for item in kept.store.list()} - {item.key for item in store.list()}
    # heartbeats, and pages that were merged into another one
    assert all(key.startswith((keys.REPLICAS, keys.ADDED_PAGES)) for key in missing)
    # and it follows
    kept.weights.append(step(kept.weights[-1], 99))
    publish(kept.store, kept.weights[-1:])
    assert Mirror(kept.run, store).update(LAST + 1) == 1
    assert is_a_copy(store, kept)


def test_a_mirror_goes_on_where_it_was_interrupted(kept: Kept) -> None:
    store = empty()
    writes = [0]

    class Interrupted:
        def __init__(self, after: int) -> None:
            self.after = after

        def __getattr__(self, name: str) -> object:
            found = getattr(store, name)
            if name not in ("put", "put_if_absent"):
                return found

            def put(*arguments: object) -> None:
                writes[0] += 1
                if writes[0] > self.after:
                    raise StoreUnavailable("cut off")
                found(*arguments)

            return put

    for round in range(40):
        writes[0] = 0
        try:
            mirror = Mirror(kept.run, Interrupted(after=2 + 5 * round))  # type: ignore[arg-type]
            mirror.update(LAST)
            break
        except StoreUnavailable:
            if store_has_run(store) and Run.open(store).newest() is not None:
                assert verify(Run.open(store), quick=True).ok
    else:
        pytest.fail("never done")
    assert round > 3
    assert is_a_copy(store, kept)


def store_has_run(store: Store) -> bool:
    return any(item.key == keys.RUN for item in store.list())


def test_a_mirror_of_a_pruned_run_is_whole_and_is_pruned_itself(kept: Kept) -> None:
    store = empty()
    Mirror(kept.run, store).update(20)
    prune(kept.run, Retention(last=4, grace=0))
    mirror = Mirror(kept.run, store)
    mirror.update(LAST)
    assert verify(Run.open(store)).ok
    mirror.update(LAST, Retention(last=4, grace=0))
    run = Run.open(store)
    assert verify(run).ok
    assert run.listed() == kept.run.listed()


def test_a_mirror_that_is_behind_a_pruned_run_is_readable_all_the_time(kept: Kept) -> None:
    store = empty()
    Mirror(kept.run, store).update(10)
    prune(kept.run, Retention(last=4, grace=0))
    joined = []

    class Watched:
        def __getattr__(self, name: str) -> object:
            found = getattr(store, name)
            if name not in ("put", "put_if_absent"):
                return found

            def write(*arguments: object) -> None:
                found(*arguments)
                with Replica(store, heartbeat=0) as replica:
                    joined.append(replica.sync(kept.blank()))

            return write

    Mirror(kept.run, Watched()).update(LAST)  # type: ignore[arg-type]
    assert joined[0] == 10
    assert joined[-1] == LAST
    assert joined == sorted(joined)
    assert verify(Run.open(store)).ok


def test_another_run_is_not_written_over(kept: Kept) -> None:
    other = fresh(2).store
    other.put(keys.RUN, other.get(keys.RUN).data.replace(kept.run.info.run.encode(), b"f" * 16))
    with pytest.raises(RunReplaced):
        Mirror(kept.run, other)
