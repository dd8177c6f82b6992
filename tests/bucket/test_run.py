"""A run as a reader sees it: its schema, its versions, and which of them are there."""

from __future__ import annotations

import pytest

from deltawire.bucket.run import Run, blobs, ranges
from deltawire.core import keys
from deltawire.core.digest import StateDigest
from deltawire.core.errors import DeltawireError, RunNotFound
from deltawire.store import Store
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
