"""A run as a reader sees it: its schema, its versions, and which of them are there."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from deltawire.bucket.prune import Retention, prune
from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run, blobs, ranges
from deltawire.bucket.verify import verify
from deltawire.bucket.versions import set_tag, tags
from deltawire.bucket.walk import Walker
from deltawire.core import keys
from deltawire.core.digest import StateDigest
from deltawire.core.errors import DeltawireError, ManifestError, ObjectTooLarge, RunNotFound, StoreUnavailable
from deltawire.core.manifest import Delegated, Head, Heartbeat, Summary, Tag, dump
from deltawire.keeper.lease import KeeperLease
from deltawire.store import Fetched, Store
from deltawire.trainer import Publisher
from deltawire_wordle.counting import CountingStore
from support import history, publish


def test_versions_of_a_run(store: Store) -> None:
    versions = history(4)
    publish(store, versions)
    run = Run.open(store)
    assert run.schema.elements == sum(array.size for array in versions[0].values())
    assert (run.newest(), run.listed(), run.head_hint()) == (3, [0, 1, 2, 3], 3)
    assert run.exists(3)
    assert not run.exists(4)
    assert list(run.timeline(3)) == [0, 1, 2, 3]
    assert [version for version, found in run.manifests([2, 3]) if not isinstance(found, DeltawireError)] == [2, 3]
    assert {blob.key for blob in blobs(run.manifest(3))} <= {item.key for item in store.list()}


def test_the_newest_version_is_found_without_head(store: Store) -> None:
    publish(store, history(3))
    store.delete(keys.HEAD)
    assert Run.open(store).newest() == 2
    assert Run.open(store).head_hint() is None


def test_a_version_that_is_not_there(store: Store) -> None:
    publish(store, history(2))
    run = Run.open(store)
    with pytest.raises(DeltawireError, match="7"):
        run.manifest(7)
    [(version, found)] = run.manifests([7])
    assert version == 7
    assert isinstance(found, DeltawireError)


def test_a_name_is_no_number(store: Store) -> None:
    publish(store, history(2))
    run = Run.open(store)
    with pytest.raises(TypeError, match=r"run\.resolve\('latest'\) returns that of a name"):
        checkout(run, "latest")  # type: ignore[arg-type]
    assert checkout(run, run.resolve("latest")).version == 1


def test_who_needs_few_versions_reads_no_long_page_of_history(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"w": np.zeros(64, np.uint16)}
    with Publisher(store, anchor_every=10, anchor_ratio=1e9) as publisher:
        for _ in range(135):
            weights["w"] += 1
            publisher.publish(weights, wait=True)
    counting = CountingStore(store)
    whole = Run.open(counting).timeline(134)
    assert [*whole] == [*range(135)]

    def read(newest: int, since: int) -> tuple[dict[int, Summary], int, int]:
        run = Run.open(counting)
        counting.reset()
        found = run.timeline(newest, since)
        return found, counting.requests["get"], counting.bytes_in

    def expected(newest: int, since: int) -> dict[int, Summary]:
        return {v: summary for v, summary in whole.items() if since <= v <= newest}

    _, plain, long = read(131, 125)
    monkeypatch.setattr("deltawire.bucket.run.LONG_PAGE", 32)
    found, short, few = read(131, 125)
    assert found == expected(131, 125)
    assert (plain, short) == (3, 3)
    assert 2 * few < long, "the page of 128 versions was read"
    for newest, since in itertools.product((63, 64, 67, 96, 127, 128, 130, 134), (0, 1, 20, 33, 60, 90, 100, 126)):
        assert read(newest, since)[0] == expected(newest, since)
    # a manifest that is gone costs the page
    store.delete(keys.manifest(127))
    assert read(131, 125)[0] == expected(131, 125)
    # what is pruned is not read, and pages of it alone are pruned too
    store.put(keys.manifest(127), b"damaged")
    assert read(131, 125)[0] == expected(131, 125)


def test_a_newcomer_reads_as_much_history_as_it_needs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    published = publish(store, history(75), anchor_every=10, anchor_ratio=1e9)
    digests = [Run.open(store).manifest(version.version).digest for version in published]
    steps = Walker(Run.open(store)).plan(None, 74)
    monkeypatch.setattr("deltawire.core.history.FIRST_REACH", 5)
    monkeypatch.setattr("deltawire.bucket.run.IDENTIFIED", 40)
    monkeypatch.setattr("deltawire.bucket.run.SUMMARY_BYTES", 1 << 30)
    counting = CountingStore(store)
    run = Run.open(counting)
    assert Walker(run).plan(None, 74) == steps
    assert [step.version for step in steps] == [70, 71, 72, 73, 74]
    for version in (74, 71, 60, 34):
        assert run.identify(StateDigest.parse(digests[version]), 74) == version
    assert run.identify(StateDigest.parse(digests[33]), 74) is None, "it is more than 40 versions back"
    # the way to a version without an anchor nearby
    assert [step.version for step in Walker(run).plan(None, 69)] == [*range(60, 70)]
    size = store.head(keys.history(64)).size
    counting.reset()
    Walker(run).plan(None, 74)
    assert counting.bytes_in < size


def test_manifests_that_are_kept_have_a_limit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store, history(20))
    size = store.head(keys.manifest(19)).size
    monkeypatch.setattr("deltawire.bucket.run.KEPT_MANIFESTS", 4 * size)
    counting = CountingStore(store)
    run = Run.open(counting)
    for version in (*range(20), *range(20)):
        run.manifest(version)
    assert counting.requests["get"] > 20
    counting.reset()
    run.forget(18)
    for _ in range(3):
        run.manifest(19)
        run.manifest(18)
    assert counting.requests["get"] == 1


def test_pages_of_history_go_with_their_versions(store: Store) -> None:
    publish(store, history(75), anchor_every=10, anchor_ratio=1e9)
    run = Run.open(store)
    whole = run.timeline(74)
    prune(run, Retention(last=3, grace=0))
    assert {item.key for item in store.list(keys.HISTORY)} == set()
    left = Run.open(store).timeline(74)
    assert left == {v: whole[v] for v in left}
    assert {72, 73, 74} <= {*left} == {*Run.open(store).listed()}
    counting = CountingStore(store)
    Run.open(counting).timeline(74)
    # run.json, the manifest, the marks
    assert counting.requests["get"] == 3
    assert verify(Run.open(store)).ok
    # the next page tells of those that are there
    with Publisher(store, continues=True) as publisher:
        for array in history(85)[75:]:
            publisher.publish(array, wait=True)
    assert [*Run.open(store).timeline(84)] == [*left, *range(75, 85)]
    assert verify(Run.open(store)).ok


def test_an_address_without_a_run(store: Store) -> None:
    with pytest.raises(RunNotFound, match="publish to it first"):
        Run.open(store)


def test_a_version_is_identified_by_its_digest(store: Store) -> None:
    published = publish(store, history(3))
    run = Run.open(store)
    digest = StateDigest.parse(run.manifest(1).digest)
    assert run.identify(digest, published[-1].version) == 1


def test_ranges_are_written_as_people_do() -> None:
    assert ranges([1, 2, 3, 7, 9, 10]) == "1–3, 7, 9–10"


HINTS = {
    Head: keys.HEAD,
    Tag: keys.tag("best"),
    Heartbeat: keys.replica("a"),
    KeeperLease: keys.KEEPER,
    Delegated: keys.DELEGATED,
}
MADE = {
    Head: lambda run: Head(run, 1),
    Tag: lambda run: Tag(run, 1, 0.0),
    Heartbeat: lambda run: Heartbeat(run, "a", 1, 1, True, 0.0),
    KeeperLease: lambda run: KeeperLease(run, "k", 0.0),
    Delegated: lambda run: Delegated(run, ()),
}


@pytest.mark.parametrize("kind", HINTS, ids=lambda kind: kind.__name__)
def test_an_object_that_nothing_depends_on_is_none_where_it_is_no_object_of_this_run(
    store: Store, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    publish(store, history(2))
    run, key = Run.open(store), HINTS[kind]
    store.delete(key)
    assert run.hint(key, kind) is run.find(key, kind) is None
    good = MADE[kind](run.info.run)
    store.put(key, dump(good))
    assert run.hint(key, kind) == run.find(key, kind) == good
    store.put(key, dump(MADE[kind]("another")))
    assert run.hint(key, kind) is run.find(key, kind) is None
    assert not caplog.records
    for data, error in ((b"{", ManifestError), (dump(good) + b" " * keys.limit(key), ObjectTooLarge)):
        store.put(key, data)
        assert run.hint(key, kind) is None
        assert f"ignoring {key}" in caplog.records.pop().message
        with pytest.raises(error):
            run.find(key, kind)
    assert keys.limit(key) == 16 << 10


def test_a_store_that_does_not_answer_is_no_missing_object(store: Store) -> None:
    class Down(CountingStore):
        def get(self, key: str, *, limit: int | None = None) -> Fetched:
            raise StoreUnavailable("no answer")

    publish(store, history(1))
    run = Run(Down(store), Run.open(store).info)
    for key, kind in ((keys.tag("best"), Tag), (keys.KEEPER, KeeperLease)):
        with pytest.raises(StoreUnavailable):
            run.hint(key, kind)


def test_the_latest_tags(store: Store) -> None:
    publish(store, history(2))
    run = Run.open(store)
    for name in ("z", "a", "m"):
        set_tag(run, 1, name)
    assert [*tags(run)] == ["a", "m", "z"]
    assert len(tags(run, latest=2)) == 2
