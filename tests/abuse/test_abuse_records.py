"""Records that would take for ever to believe: numbers without history, heads of nonsense, files that never end."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3
from forge import ForgedRun, with_metadata

from deltawire.bucket.prune import Retention, prune
from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.bucket.watch import watch
from deltawire.core import chain, keys
from deltawire.core.errors import (
    ForeignObject,
    ManifestError,
    MissingBase,
    ObjectNotFound,
    ObjectTooLarge,
    PublishError,
    PublishFailed,
    RunNotFound,
    VersionNotFound,
)
from deltawire.fleet import Fleet
from deltawire.replica import Replica
from deltawire.store import LocalStore, Store, open_store
from deltawire.trainer import Publisher
from deltawire_wordle.counting import CountingStore
from support import blank, copy, heartbeats, history, publish, same, trained

FAR = 1 << 40


def move_last(run: ForgedRun, version: int) -> None:
    """The newest version under another number, and head points there. It is an anchor, so it can be reached."""
    manifest, data = run.manifest(), with_metadata(run.object("anchor"), model_version=str(version))
    key = keys.anchor(version, manifest["writer"])
    entry = {"key": key, "size": len(data), "hash": blake3(data).hexdigest(length=16)}
    manifest |= {"version": version, "parent": 1, "recent": [], "links": [{"kind": "anchor", "objects": [entry]}]}
    run.store.put(key, data)
    run.store.delete(keys.manifest(run.last))
    run.store.put(keys.manifest(version), json.dumps(manifest).encode())
    run.store.put(keys.HEAD, json.dumps({"run": manifest["run"], "version": version}).encode())


@pytest.mark.parametrize("version", [FAR, FAR - 1, FAR + 100, 10**18 - 1])
def test_a_number_without_history_costs_a_logarithm_of_requests(store: Store, version: int) -> None:
    run = ForgedRun(store, last_has_anchor=True)
    move_last(run, version)
    most = 20 + 2 * math.log2(version)

    counting = CountingStore(store)
    opened = Run.open(counting)
    assert opened.newest() == version
    assert list(opened.timeline(version)) == [0, 1, version]
    checkout(opened, version)
    assert counting.requests.total() <= most

    counting = CountingStore(store)
    live = blank(run.versions[0])
    assert Replica(counting, heartbeat=0).sync(live) == version
    assert same(live, run.versions[2])
    assert counting.requests.total() <= most

    counting = CountingStore(store)
    found = verify(Run.open(counting)).failure
    assert found is not None
    assert found.version == 2
    assert counting.requests.total() <= most

    counting = CountingStore(store)
    with Publisher(counting, anchor_ratio=1e9) as publisher:
        assert publisher.version == version
        if version < keys.MAX_VERSION:
            assert publisher.publish(trained(run.versions[2], 5)).result(120).version == version + 1
    assert counting.requests.total() <= 2 * most


def test_a_run_without_room_for_another_version(store: Store) -> None:
    """It is said before anything is uploaded."""
    run = ForgedRun(store, last_has_anchor=True)
    move_last(run, keys.MAX_VERSION)
    before = {item.key for item in store.list()}
    publisher = Publisher(store, anchor_ratio=1e9)
    with pytest.raises(PublishError, match="no room for another version"):
        publisher.publish(trained(run.versions[2], 5)).result(120)
    with pytest.raises(PublishFailed):
        publisher.close()
    assert {item.key for item in store.list()} == before


def test_bad_links_without_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs a plan over the whole history: after some of them readers give up."""
    monkeypatch.setattr(chain, "MAX_PLANS", 3)
    models = history(6)
    publish(store, models, anchor_ratio=0.0)
    for item in [*store.list(keys.ANCHORS), *store.list(keys.DELTAS)]:
        store.delete(item.key)
    with pytest.raises(MissingBase, match=r"3 ways to version 5 .* the last: "):
        checkout(Run.open(store), 5)
    live = blank(models[0])
    with pytest.raises(MissingBase, match=r"3 ways to version 5 .* the last: "):
        Replica(store, heartbeat=0).sync(live)
    assert same(live, blank(models[0]))


@pytest.mark.parametrize("kind", ["anchor", "delta"])
def test_what_an_error_quotes_of_an_object_is_short(store: Store, kind: str) -> None:
    run = ForgedRun(store, last_has_anchor=kind == "anchor")
    run.edit_object(lambda data: with_metadata(data, run="x" * 100_000, model_version="9" * 100_000), kind)
    if kind == "anchor":
        run.edit_manifest(lambda m: m.update(links=[link for link in m["links"] if link["kind"] == "anchor"]))
    with pytest.raises(ForeignObject, match="says it is run x") as caught:
        checkout(Run.open(store), run.last)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("version", [-1, 10**18, 10**4000])
def test_a_heartbeat_of_a_version_that_cannot_be(store: Store, version: int) -> None:
    run = ForgedRun(store)
    beat = {"run": run.manifest()["run"], "replica": "one", "version": version, "newest": 2, "healthy": True, "at": 0.0}
    store.put(keys.replica("one"), json.dumps(beat).encode())
    assert heartbeats(Run.open(store)) == []


def test_a_run_that_lost_all_its_history(store: Store) -> None:
    """Nothing is asked for that is not there: a manifest tells of sixteen versions."""
    models = history(50, changes=1)
    publish(store, models, anchor_ratio=1e9)
    for item in list(store.list(keys.HISTORY)):
        store.delete(item.key)
    counting = CountingStore(store)
    assert list(Run.open(counting).timeline(49)) == list(range(50))
    assert counting.requests.total() <= 10


def test_a_head_from_before_what_was_pruned(store: Store) -> None:
    """Version 1 is gone. A head that was rolled back to 0 must not make 0 the newest version."""
    run = ForgedRun(store, count=6)
    name = run.manifest()["run"]
    store.put(keys.PRUNED, json.dumps({"run": name, "versions": [[1, 3]]}).encode())
    for version in (1, 2, 3):
        store.delete(keys.manifest(version))
    store.put(keys.HEAD, json.dumps({"run": name, "version": 0}).encode())
    assert Run.open(store).newest() == 5
    # and marks that cannot be true do not make a version up
    store.put(keys.PRUNED, json.dumps({"run": name, "versions": [[1, 10**17]]}).encode())
    assert Run.open(store).newest() == 5


@pytest.mark.parametrize("digits", [18, 4000])
def test_marks_of_versions_that_cannot_be(store: Store, digits: int) -> None:
    """Each would double the numbers to look at, and each look takes a request."""
    run = ForgedRun(store, count=3)
    store.put(keys.PRUNED, json.dumps({"run": run.manifest()["run"], "versions": [[3, 10**digits]]}).encode())
    counting = CountingStore(store)
    with pytest.raises(ManifestError, match="not a range") as caught:
        Run.open(counting).newest()
    assert counting.requests.total() < 10
    assert len(str(caught.value)) < 200


def test_a_listing_that_would_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltawire.store.base.LISTED", 50)
    for store in (LocalStore(tmp_path), open_store("memory://a-listing-that-is-too-long")):
        for number in range(60):
            store.put(keys.replica(f"r{number}"), b"{}")
        with pytest.raises(ObjectTooLarge, match="more than 50 objects"):
            list(store.list())


def test_heartbeats_without_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """`log` shows the latest ones; prune, which must believe all of them, refuses."""
    monkeypatch.setattr("deltawire.fleet.HEARTBEATS", 5)
    monkeypatch.setattr("deltawire.bucket.prune._READERS", 5)
    run = Run.open(ForgedRun(store).store)
    beat = {"run": run.info.run, "version": 1, "newest": 2, "healthy": True, "at": 0}
    for number in range(8):
        store.put(keys.replica(f"r{number}"), json.dumps({**beat, "replica": f"r{number}"}).encode())
    fleet = Fleet(run)
    fleet.read()
    assert len(fleet.members(2)) == 5
    with pytest.raises(ManifestError, match="8 heartbeats"):
        prune(run, Retention(last=1))
    assert run.listed() == [0, 1, 2]


def test_more_manifests_than_fit_into_memory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.open(ForgedRun(store).store)
    assert verify(run).ok
    monkeypatch.setattr("deltawire.bucket.run.ALL_MANIFESTS", 1000)
    for work in (lambda: verify(run), lambda: prune(run, Retention(last=1))):
        with pytest.raises(ObjectTooLarge, match="1,000 bytes"):
            work()


# ── head ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def long_number(path: Path, run: str) -> None:
    path.write_text(f'{{"run": "{run}", "version": 1{"0" * 300}}}')


def another_run(path: Path, run: str) -> None:
    path.write_text('{"run": "ffffffffffffffff", "version": 2}')


def fifo(path: Path, run: str) -> None:
    os.mkfifo(path)


def endless(path: Path, run: str) -> None:
    path.symlink_to("/dev/zero")


def circle(path: Path, run: str) -> None:
    path.symlink_to(path.name)


def folder(path: Path, run: str) -> None:
    (path / "x").mkdir(parents=True)


Nonsense = Callable[[Path, str], None]
NONSENSE = [long_number, another_run, fifo, endless, circle]


@pytest.mark.parametrize("nonsense", NONSENSE, ids=lambda nonsense: nonsense.__name__)
def test_a_head_of_nonsense_is_ignored_and_repaired(tmp_path: Path, nonsense: Nonsense) -> None:
    store = open_store(str(tmp_path))
    run = ForgedRun(store)
    name = run.manifest()["run"]
    (tmp_path / "head.json").unlink()
    nonsense(tmp_path / "head.json", name)

    live = blank(run.versions[0])
    stop = threading.Event()
    replica = Replica(store, heartbeat=0)
    follower = replica.follow(live, poll=0.01, stop=stop)
    assert next(follower) == 2
    assert verify(Run.open(store)).ok
    assert next(watch(store)) == 2
    with Publisher(store, anchor_ratio=1e9) as publisher:
        assert publisher.version == 2
        newest = trained(run.versions[2], 7)
        publisher.publish(newest).result(120)
    assert json.loads((tmp_path / "head.json").read_text()) == {"run": name, "version": 3}
    assert next(follower) == 3
    stop.set()
    assert same(live, newest)


@pytest.mark.parametrize("nonsense", [long_number, another_run, fifo, endless], ids=lambda nonsense: nonsense.__name__)
def test_a_follower_under_whom_head_turns_into_nonsense(tmp_path: Path, nonsense: Nonsense) -> None:
    store = open_store(str(tmp_path))
    run = ForgedRun(store)
    last = store.get(keys.manifest(2)).data
    store.delete(keys.manifest(2))
    store.put(keys.HEAD, json.dumps({"run": run.manifest(1)["run"], "version": 1}).encode())
    follower = Replica(store, heartbeat=0).follow(copy(run.versions[0]), poll=0.001)
    assert next(follower) == 1
    (tmp_path / "head.json").unlink()
    nonsense(tmp_path / "head.json", run.manifest(1)["run"])
    store.put(keys.manifest(2), last)
    assert next(follower) == 2


@pytest.mark.parametrize("nonsense", [fifo, endless, circle, folder], ids=lambda nonsense: nonsense.__name__)
def test_what_is_not_a_regular_file_is_no_object(tmp_path: Path, nonsense: Nonsense) -> None:
    store = LocalStore(tmp_path)
    nonsense(tmp_path / "x", "")
    for ask in (
        lambda: store.get("x"),
        lambda: store.get("x", limit=10),
        lambda: store.get_if_changed("x", None),
        lambda: store.get_range("x", 0, 1 << 40),
        lambda: store.head("x"),
    ):
        with pytest.raises(ObjectNotFound):
            ask()
    assert [item.key for item in store.list() if item.key == "x"] == []
    if nonsense is not folder:
        store.put("x", b"now it is one")
        assert store.get("x").data == b"now it is one"


def test_a_run_and_a_manifest_that_are_fifos(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    ForgedRun(store)
    (tmp_path / keys.manifest(1)).unlink()
    os.mkfifo(tmp_path / keys.manifest(1))
    with pytest.raises(VersionNotFound):
        Run.open(store).manifest(1)
    (tmp_path / "run.json").unlink()
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(RunNotFound):
        Run.open(store)
