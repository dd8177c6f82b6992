"""A run that is deleted, or replaced by another one, while a publisher writes to it."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import pytest

from deltawire.bucket.run import Run
from deltawire.core import keys
from deltawire.core.errors import ForeignObject, RunNotFound, RunReplaced
from deltawire.store import LocalStore, ObjectStore, Store
from deltawire.trainer import Publisher
from deltawire_wordle.counting import CountingStore
from support import history, verified


@pytest.fixture
def store() -> Store:
    return ObjectStore.from_url(f"memory://{uuid.uuid4()}")


def wipe(store: Store) -> None:
    for item in list(store.list()):
        store.delete(item.key)


@pytest.mark.parametrize("wait", [False, True])
def test_a_publisher_says_that_its_run_is_gone(store: Store, wait: bool) -> None:
    models = history(5)
    publisher = Publisher(store)
    for weights in models[:2]:
        publisher.publish(weights).result(120)
    wipe(store)
    for weights in models[2:]:
        with pytest.raises(RunNotFound, match="it was deleted"):
            publisher.publish(weights, wait=wait).result(120)
    assert not list(store.list(keys.VERSIONS)), "nothing was committed"


def test_a_folder_that_was_removed(tmp_path: Path) -> None:
    models, folder = history(3), tmp_path / "run"
    publisher = Publisher(folder)
    publisher.publish(models[0]).result(120)
    shutil.rmtree(folder)
    with pytest.raises(RunNotFound):
        publisher.publish(models[1]).result(120)
    with Publisher(folder) as second:
        second.publish(models[2]).result(120)
    assert verified(LocalStore(folder), models[2:]) == 1


def test_a_publisher_does_not_write_into_the_run_that_came_after(store: Store) -> None:
    models = history(6)
    first = Publisher(store)
    for weights in models[:3]:
        first.publish(weights).result(120)
    wipe(store)
    with Publisher(store) as second:
        second.publish(models[3]).result(120)
        with pytest.raises(RunReplaced, match="another run now"):
            first.publish(models[4]).result(120)
        with pytest.raises(RunReplaced):
            first.close()
        second.publish(models[5]).result(120)
    assert verified(store, [models[3], models[5]]) == 2


def test_versions_without_run_json_are_not_mixed_with_a_new_run(store: Store) -> None:
    models = history(3)
    with Publisher(store) as publisher:
        for weights in models[:2]:
            publisher.publish(weights)
    store.delete(keys.RUN)
    with pytest.raises(ForeignObject, match="remove what is left"):
        Publisher(store).publish(models[2])
    with pytest.raises(RunNotFound):
        Run.open(store)


def test_where_a_claim_is_needed_the_run_is_missed_as_well(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAWIRE_WRITER_RENEWAL", "0.1")
    counting = CountingStore(store)
    counting.creates_exclusively = False
    models = history(2)
    publisher = Publisher(counting)
    publisher.publish(models[0]).result(120)
    wipe(store)
    with pytest.raises(RunNotFound):
        publisher.publish(models[1]).result(120)
