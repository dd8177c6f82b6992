"""Versions as people write them, and tags."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deltawire.bucket import prune
from deltawire.bucket.prune import Retention
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.bucket.versions import delete_tag, existing, resolve, set_tag, tagged, tags
from deltawire.core import keys
from deltawire.core.errors import ManifestError, ObjectTooLarge, VersionNotFound
from deltawire.replica import Replica
from deltawire.store import LocalStore, Store
from support import HookedStore, blank, copy, history, publish, same

VERSIONS = history(5)
NOW = Retention(last=1, grace=0.0)


@pytest.fixture
def run(store: Store) -> Run:
    publish(store, VERSIONS, anchor_every=1)
    return Run.open(store)


@pytest.mark.parametrize(
    "text, version",
    [
        (None, 4),
        ("latest", 4),
        ("newest", 4),
        ("-1", 4),
        ("-5", 0),
        (-2, 3),
        ("2", 2),
        ("v2", 2),
        ("v002", 2),
        ("@v2", 2),
        (0, 0),
    ],
)
def test_every_way_to_write_a_version(run: Run, text: int | str | None, version: int) -> None:
    assert resolve(run, text) == version


@pytest.mark.parametrize("text", ["9", "v9", "-6", "best", 77, "", "@", "1.0", "../x"])
def test_an_unknown_one_names_what_exists(run: Run, text: int | str) -> None:
    set_tag(run, 1, "first")
    with pytest.raises(VersionNotFound, match=r"versions 0 to 4 and the tags first"):
        resolve(run, text)


@pytest.mark.parametrize("wrong", [True, 1.0, b"1", [1]])
def test_what_cannot_be_a_version(run: Run, wrong: Any) -> None:
    with pytest.raises(TypeError, match="a version is a number, or text such as 'v41', 'latest' or a tag; not"):
        resolve(run, wrong)


def test_what_exists_after_a_prune(run: Run) -> None:
    prune.prune(run, Retention(last=1, versions=frozenset({2}), grace=0.0))
    assert existing(Run.open(run.store)) == "it has versions 2 to 4 (some between were pruned)"


def test_a_run_without_versions(tmp_path: Path, run: Run) -> None:
    fresh = Run.create(str(tmp_path), run.schema)
    for text in (None, "latest", "-1"):
        with pytest.raises(VersionNotFound, match="no version yet"):
            resolve(fresh, text)


def test_a_replica_syncs_to_a_tag(run: Run) -> None:
    set_tag(run, 2, "best")
    live = blank(VERSIONS[0])
    replica = Replica(run.store)
    assert replica.sync(live, "best") == 2
    assert same(live, VERSIONS[2])
    assert replica.sync(live, "-2") == 3
    before = copy(live)
    with pytest.raises(VersionNotFound, match="no tag 'worst'"):
        replica.sync(live, "worst")
    assert (replica.version, same(live, before)) == (3, True)


# ── tags ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_set_move_and_delete(run: Run) -> None:
    assert set_tag(run, 2, "best") is None
    moved = set_tag(run, 3, "best")
    assert moved is not None
    assert moved.version == 2
    assert {name: tag.version for name, tag in tags(run).items()} == {"best": 3}
    delete_tag(run, "best")
    assert tags(run) == {}
    with pytest.raises(VersionNotFound, match="no tag 'best'"):
        delete_tag(run, "best")


@pytest.mark.parametrize("name", ["", "v3", "latest", "newest", "3", "-1", "../up", "a/b", "a b", "x" * 65, "a\n", "é"])
def test_invalid_names_are_refused(run: Run, name: str) -> None:
    with pytest.raises(ValueError, match="a tag is letters"):
        set_tag(run, 1, name)
    assert not list(run.store.list(keys.TAGS))


def test_prune_keeps_what_is_tagged(run: Run) -> None:
    set_tag(run, 1, "best")
    set_tag(run, 1, "sota")
    plan = prune.prune(run, NOW)
    assert plan.kept == {1: "tagged best, sota", 4: "the newest"}
    assert plan.going == (0, 2, 3)
    assert verify(Run.open(run.store)).ok
    delete_tag(run, "best")
    delete_tag(run, "sota")
    assert prune.prune(run, NOW).going == (1,)


def test_a_version_that_prune_has_marked_takes_no_tag(tmp_path: Path) -> None:
    publish(tmp_path, VERSIONS, anchor_every=1)
    for path in tmp_path.rglob("*.json"):
        os.utime(path, (0, 0))
    run = Run.open(str(tmp_path))
    set_tag(run, 4, "best")
    assert prune.prune(run, Retention(last=1, grace=60.0)).marked == (0, 1, 2, 3)
    for name in ("new", "best"):
        with pytest.raises(VersionNotFound, match="being pruned"):
            set_tag(run, 1, name)
    assert {name: tag.version for name, tag in tags(run).items()} == {"best": 4}


@pytest.mark.parametrize("grace", [0.0, 60.0])
def test_a_tag_set_while_prune_marks_is_kept(tmp_path: Path, grace: float) -> None:
    """The tag comes after the survey and before the mark: the tagger sees no mark, so the mark must yield."""
    publish(tmp_path, VERSIONS, anchor_every=1)
    for path in tmp_path.rglob("*.*"):
        os.utime(path, (0, 0))
    tagger = Run.open(str(tmp_path))

    def hook(moment: str, verb: str, key: str) -> None:
        if (moment, verb, key) == ("before", "put", keys.PRUNED) and not tags(tagger):
            set_tag(tagger, 1, "best")

    prune.prune(Run.open(HookedStore(LocalStore(tmp_path), hook)), Retention(last=1, grace=grace))
    run = Run.open(str(tmp_path))
    assert 1 not in run.pruned()
    assert resolve(run, "best") == 1
    assert 1 in run.timeline(4)
    assert verify(run).ok


def test_tags_of_a_bucket_are_untrusted(run: Run) -> None:
    set_tag(run, 1, "good")
    for name, data in {
        "large": b" " * (65 << 10),
        "negative": msgspec.json.encode({"run": run.info.run, "version": -3, "at": 0.0}),
        "text": b"\xff\x00",
        "list": b"[]",
        "huge": msgspec.json.encode({"run": run.info.run, "version": 10**18, "at": 0.0}),
        "foreign": msgspec.json.encode({"run": "another", "version": 1, "at": 0.0}),
    }.items():
        run.store.put(keys.tag(name), data)
    run.store.put(keys.TAGS + "v3.json", msgspec.json.encode({"run": run.info.run, "version": 1, "at": 0.0}))
    run.store.put(keys.TAGS + "a/b.json", b"{}")
    assert list(tags(run)) == ["good"]
    for name in ("large", "negative", "text", "list", "huge", "foreign"):
        with pytest.raises((ManifestError, ObjectTooLarge, VersionNotFound)):
            tagged(run, name)
    # what a deletion goes by must be beyond doubt
    with pytest.raises(ManifestError, match="--delete"):
        prune.survey(run, NOW)
    for name in ("large", "negative", "text", "list", "huge"):
        delete_tag(run, name)
    assert prune.survey(run, NOW).kept == {1: "tagged good", 4: "the newest"}


def test_verify_tells_of_a_tag_without_a_version(run: Run) -> None:
    run.store.put(keys.tag("lost"), msgspec.json.encode({"run": run.info.run, "version": 99, "at": math.pi}))
    result = verify(run)
    assert result.ok
    assert any("lost names version 99" in warning for warning in result.warnings)
