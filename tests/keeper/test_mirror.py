"""Mirrors: the same run, byte for byte, whatever interrupts the copying."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from deltawire.bucket.prune import Retention, prune
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.bucket.versions import delete_tag, set_tag, tagged, tags
from deltawire.core import keys
from deltawire.core.errors import RunReplaced, StoreUnavailable
from deltawire.core.manifest import dump
from deltawire.keeper.announce import announce
from deltawire.keeper.keeper import KeeperOptions
from deltawire.keeper.mirror import Ended, Mirror
from deltawire.replica import Replica
from deltawire.store import Store
from deltawire_wordle.counting import CountingStore
from keeping import Kept, empty, fresh, publish, settings, step
from support import history, same

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
    # who publishes to the other one, heartbeats, and pages that were merged into another one
    assert all(key.startswith((keys.WRITER, keys.REPLICAS, keys.ADDED_PAGES)) for key in missing)
    # and it follows
    kept.weights.append(step(kept.weights[-1], 99))
    publish(kept.store, kept.weights[-1:])
    assert Mirror(kept.run, store).update(LAST + 1) == 1
    assert is_a_copy(store, kept)


def test_tags_move_and_go_in_a_mirror_and_nothing_else_is_copied_twice(kept: Kept) -> None:
    set_tag(kept.run, 7, "best")
    counting = CountingStore(empty())
    mirror = Mirror(kept.run, counting)
    mirror.update(LAST)
    set_tag(kept.run, 9, "best")
    # so that there is an index of added links that the mirror has not seen
    announce(kept.run, "keeper", (), LAST)
    counting.reset()
    mirror.update(LAST)
    assert tagged(Run.open(counting), "best").version == 9
    # the tag and the index
    assert counting.requests["put"] == 2
    assert is_a_copy(counting, kept)
    # else it would keep its version from being pruned there; whoever goes on with the mirror knows of it too
    set_tag(kept.run, 3, "other")
    mirror.update(LAST)
    delete_tag(kept.run, "best")
    Mirror(kept.run, counting).update(LAST)
    assert {name: tag.version for name, tag in tags(Run.open(counting)).items()} == {"other": 3}
    delete_tag(kept.run, "other")
    Mirror(kept.run, counting).update(LAST)
    assert tags(Run.open(counting)) == {}


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


def test_pages_of_history_whose_versions_were_pruned_are_copied() -> None:
    source, versions = empty(), history(42)
    publish(source, versions[:40], anchor_every=18, anchor_ratio=1e9)
    run = Run.open(source)
    store, late = empty(), empty()
    Mirror(run, late).update(8)
    # else the pages go too
    set_tag(run, 20, "best")
    prune(run, Retention(last=3, grace=0))
    assert not {16, 32} & set(run.listed()), "the pages came with versions that are gone"
    for each in (store, late):
        Mirror(run, each).update(39)
        found = verify(Run.open(each))
        assert found.ok, found.failure
        assert Run.open(each).timeline(39) == Run.open(source).timeline(39)
    # one that is lost at the source holds nothing up, is told, and is copied once it is there again
    page = source.get(keys.history(32)).data
    source.delete(keys.history(32))
    held_up = empty()
    mirror = Mirror(run, held_up)
    mirror.update(39)
    assert [*mirror.damaged] == [keys.history(32)]
    publish(source, versions[40:], anchor_ratio=1e9)
    source.put(keys.history(32), page)
    mirror.update(41)
    assert not mirror.damaged
    assert verify(Run.open(held_up)).ok


def test_pages_of_history_that_were_pruned_are_not_missed() -> None:
    source = empty()
    publish(source, history(40), anchor_every=18, anchor_ratio=1e9)
    run = Run.open(source)
    prune(run, Retention(last=3, grace=0))
    assert not [*source.list(keys.HISTORY)]
    store = empty()
    mirror = Mirror(run, store)
    mirror.update(39)
    assert not mirror.damaged
    assert verify(Run.open(store)).ok
    assert Run.open(store).timeline(39) == run.timeline(39)


def test_a_mirror_that_is_behind_a_pruned_run_is_readable_all_the_time(kept: Kept) -> None:
    store = empty()
    Mirror(kept.run, store).update(10)
    # versions in the middle stay
    set_tag(kept.run, 20, "best")
    prune(kept.run, Retention(last=4, grace=0))
    joined = []

    class Watched:
        def __getattr__(self, name: str) -> object:
            found = getattr(store, name)
            if name not in ("put", "put_if_absent"):
                return found

            def write(*arguments: object) -> None:
                found(*arguments)
                run = Run.open(store)
                # a version is there or is marked
                there, pruned = run.listed(), run.pruned()
                assert [v for v in range(there[-1]) if v not in there and v not in pruned] == []
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


# ── damaged objects, an end in between ───────────────────────────────────────────────────────────────────────────────


def test_a_damaged_object_holds_up_nothing_and_is_copied_once_it_is_repaired(kept: Kept) -> None:
    (delta,) = kept.run.manifest(20).links
    bad, good = delta.objects[0].key, kept.store.get(delta.objects[0].key).data
    kept.store.put(bad, good[:-1] + b"\0")
    store, counting = empty(), CountingStore(kept.store)
    mirror = Mirror(Run.open(counting), store)
    assert mirror.update(LAST) == LAST + 1
    assert [*mirror.damaged] == [bad]
    assert bad in mirror.damaged[bad].why
    live = kept.blank()
    with Replica(store, heartbeat=0) as replica:
        assert replica.sync(live) == LAST
    assert same(live, kept.weights[-1])
    # a keeper that is restarted knows of it, and reads it once
    mirror = Mirror(Run.open(counting), store)
    mirror.update(LAST)
    assert [*mirror.damaged] == [bad]
    counting.reset()
    mirror.update(LAST)
    assert not counting.requests["get_range"]
    kept.store.put(bad, good)
    mirror.update(LAST)
    assert not mirror.damaged
    assert is_a_copy(store, kept)


def test_an_object_that_is_gone_at_the_source_holds_up_nothing(kept: Kept) -> None:
    key = kept.run.manifest(20).links[0].objects[0].key
    kept.store.delete(key)
    mirror = Mirror(kept.run, empty())
    assert mirror.update(LAST) == LAST + 1
    assert [*mirror.damaged] == [key]
    # until its version goes
    kept.store.put(keys.PRUNED, dump(kept.run.pruned().also([20])))
    mirror.update(LAST)
    assert not mirror.damaged


def test_a_damaged_file_of_many_versions_is_copied_once_it_is_repaired(kept: Kept) -> None:
    source, store = empty(), empty()
    publish(source, kept.weights[:4], files={"config.json": b"{}"})
    run = Run.open(source)
    (file,) = run.manifest(3).files
    source.put(file.key, b"[]")
    mirror = Mirror(run, store)
    assert mirror.update(3) == 4
    # the version that was copied first goes
    source.put(keys.PRUNED, dump(run.pruned().also([0])))
    mirror.update(3)
    assert [*mirror.damaged] == [file.key]
    counting = CountingStore(source)
    restarted = Mirror(Run.open(counting), store)
    restarted.update(3)
    assert [*restarted.damaged] == [file.key]
    counting.reset()
    restarted.update(3)
    assert counting.requests["head"] == 1, "one look for all versions"
    source.put(file.key, b"{}")
    for each in (restarted, Mirror(run, store), mirror):
        store.delete(file.key)
        each._sizes.pop(file.key, None)
        each.update(3)
        assert not each.damaged
        assert store.get(file.key).data == b"{}"


def test_a_manifest_that_is_damaged_after_it_was_copied_holds_up_nothing(kept: Kept) -> None:
    key = kept.run.manifest(20).links[0].objects[0].key
    good = kept.store.get(key).data
    kept.store.delete(key)
    store = empty()
    Mirror(kept.run, store).update(LAST - 1)
    manifest = kept.store.get(keys.manifest(20)).data
    kept.store.put(keys.manifest(20), b"{}")
    kept.store.put(key, good)
    mirror = Mirror(kept.run, store)
    assert mirror.update(LAST) == 1
    assert [*mirror.damaged] == [keys.manifest(20)]
    kept.store.put(keys.manifest(20), manifest)
    mirror.update(LAST)
    assert not mirror.damaged
    assert is_a_copy(store, kept)


@pytest.mark.parametrize("while_it", ["fetches", "writes"])
def test_an_end_breaks_off_the_copy_of_an_object(kept: Kept, while_it: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltawire.bucket.fetch.PART", 100_000)
    stop, store, whole = threading.Event(), empty(), []

    class Source(CountingStore):
        def get_range(self, key: str, start: int, length: int) -> bytes:
            if while_it == "fetches":
                stop.set()
            return super().get_range(key, start, length)

    class Target(CountingStore):
        def put(self, key: str, data: Any) -> None:
            if callable(data) and key.startswith(keys.ANCHORS):
                chunks = iter(data())
                next(chunks)
                if while_it == "writes":
                    stop.set()
                whole.append([*chunks])
            super().put(key, data)

    mirror = Mirror(Run.open(Source(kept.store)), Target(store), stop)
    with pytest.raises(Ended):
        mirror.update(LAST)
    assert not whole
    # and another process goes on
    Mirror(kept.run, store).update(LAST)
    assert is_a_copy(store, kept)
