"""A run as a reader sees it: its schema, its versions, and which of them are there."""

from __future__ import annotations

from typing import Any

import pytest

from deltawire.bucket.run import Run, blobs, ranges
from deltawire.bucket.versions import set_tag, tags
from deltawire.core import keys
from deltawire.core.digest import StateDigest
from deltawire.core.errors import DeltawireError, ManifestError, ObjectTooLarge, RunNotFound, StoreUnavailable
from deltawire.core.manifest import Delegated, Head, Heartbeat, Tag, dump
from deltawire.keeper.lease import KeeperLease
from deltawire.store import Fetched, Store
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
