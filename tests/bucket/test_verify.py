"""`verify` proves a good run good, and names the first bad thing of any other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from blake3 import blake3

from deltawire.bucket.run import Run
from deltawire.bucket.verify import Verification, verify
from deltawire.core import full, keys
from deltawire.core.change import whole
from deltawire.core.errors import StoreUnavailable, VersionNotFound
from deltawire.core.manifest import Pruned, dump
from deltawire.models import ModelView
from deltawire.store import LocalStore, Store
from deltawire_wordle.counting import CountingStore
from flaky_store import FlakyStore
from support import Bag, Model, diff, encoded, history, publish, trained

COUNT = 41
# by cadence only: deltas of a model this small are soon larger than an anchor
SPARSE: dict[str, Any] = {"anchor_ratio": 1e6}
OPTIONS: dict[str, Any] = {**SPARSE, "anchor_every": 20, "files": {"a.json": b"{}", "b.txt": b"b c"}}

Json = dict[str, Any]


@pytest.fixture(scope="module")
def models() -> list[Model]:
    return history(COUNT)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, models: list[Model]) -> Path:
    folder = tmp_path_factory.mktemp("published") / "run"
    publish(LocalStore(folder), models, **OPTIONS)
    return folder


@pytest.fixture
def run(published: Path, tmp_path: Path) -> LocalStore:
    """A copy of a good run, to be spoiled."""
    shutil.copytree(published, tmp_path / "run")
    return LocalStore(tmp_path / "run")


def check(store: Store, **options: Any) -> Verification:
    return verify(Run.open(store), **options)


def blob_key(store: Store, version: int, kind: str, base: int | None) -> str:
    return Run.open(store).manifest(version).link(kind, base).objects[0].key


def edit(store: Store, key: str, change: Callable[[Json], None]) -> None:
    record = msgspec.json.decode(store.get(key).data)
    change(record)
    store.put(key, msgspec.json.encode(record))


def flip(store: Store, key: str, at: int = -20) -> None:
    data = bytearray(store.get(key).data)
    data[at] ^= 4
    store.put(key, bytes(data))


def swap(store: Store, version: int, kind: str, base: int | None, data: bytes) -> str:
    """Put another object in the place of one, and make the manifest vouch for it."""
    key = blob_key(store, version, kind, base)
    store.put(key, data)

    def vouch(manifest: Json) -> None:
        for link in manifest["links"]:
            if (link["kind"], link.get("base")) == (kind, base):
                link["objects"][0].update(size=len(data), hash=blake3(data).hexdigest(length=16))

    edit(store, keys.manifest(version), vouch)
    return key


# ── good runs ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_good_run_is_proven_link_by_link_and_read_once(run: LocalStore) -> None:
    counting = CountingStore(run)
    result = check(counting)
    assert (result.failure, result.warnings, result.not_proven) == (None, [], {})
    manifests = [Run.open(run).manifest(v) for v in range(COUNT)]
    assert result.versions == COUNT
    assert result.proven == sum(len(m.links) for m in manifests)
    assert result.objects == result.proven + 2
    data = sum(item.size for item in run.list() if not item.key.endswith(".json"))
    records = sum(item.size for item in run.list() if item.key.endswith(".json"))
    assert result.bytes == data
    assert counting.bytes_in <= data + 2 * records


def test_quick_hashes_everything_and_replays_nothing(run: LocalStore) -> None:
    result = check(run, quick=True)
    assert result.ok
    assert result.proven == 0
    assert result.bytes == check(run).bytes


def test_a_part_of_a_run(run: LocalStore) -> None:
    result = check(run, first=10, last=14)
    assert result.ok
    assert (result.versions, result.proven) == (5, 4)
    assert result.not_proven == {"starts from a version that is pruned or was not asked for": 1}
    flip(run, blob_key(run, 20, "delta", 19))
    assert check(run, first=10, last=14).ok
    with pytest.raises(VersionNotFound, match="no version from 50"):
        check(run, first=50)


def test_progress_adds_up_to_what_was_read(run: LocalStore) -> None:
    calls: list[tuple[int, int]] = []
    result = check(run, progress=lambda n, total: calls.append((n, total)))
    assert sum(n for n, _ in calls) == result.bytes
    assert {total for _, total in calls} == {result.bytes}


def test_a_run_without_versions(store: Store, models: list[Model]) -> None:
    Run.create(store, ModelView(models[0]).schema)
    result = check(store)
    assert result.ok
    assert result.warnings == ["the run has no version yet"]


def test_trouble_with_the_store_is_not_blamed_on_the_run(run: LocalStore) -> None:
    opened = Run.open(run)
    opened.store = FlakyStore(run, drop=1.0)
    with pytest.raises(StoreUnavailable):
        verify(opened)


# ── bad objects ──────────────────────────────────────────────────────────────────────────────────────────────────────


def truncate(store: Store, key: str) -> None:
    store.put(key, store.get(key).data[:-7])


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("version, kind, base", [(5, "delta", 4), (20, "anchor", None), (0, "anchor", None)])
@pytest.mark.parametrize(
    "spoil, error",
    [(flip, "HashMismatch"), (truncate, "TruncatedFile"), (lambda store, key: store.delete(key), "ObjectNotFound")],
    ids=["flipped", "truncated", "missing"],
)
def test_a_bad_object_is_named(
    run: LocalStore,
    quick: bool,
    version: int,
    kind: str,
    base: int | None,
    spoil: Callable[[Store, str], None],
    error: str,
) -> None:
    key = blob_key(run, version, kind, base)
    spoil(run, key)
    problem = check(run, quick=quick).failure
    assert problem is not None
    assert (problem.version, problem.object, problem.error) == (version, key, error)
    assert key.rpartition("/")[2] in problem.message


def test_the_advice_says_who_is_stranded(run: LocalStore) -> None:
    flip(run, blob_key(run, 5, "delta", 4))
    problem = check(run).failure
    assert problem is not None
    assert "without it version 5–19 cannot be reached" in problem.advice
    flip(run, blob_key(run, 5, "delta", 4))
    flip(run, blob_key(run, 20, "delta", 19))
    problem = check(run).failure
    assert problem is not None
    assert "every version can still be reached another way" in problem.advice


def test_the_first_bad_thing_is_the_one_named(run: LocalStore) -> None:
    for version in (30, 11, 25):
        flip(run, blob_key(run, version, "delta", version - 1))
    result = check(run)
    assert result.failure is not None
    assert result.failure.version == 11
    assert result.versions == 10


def test_a_bad_companion_file(run: LocalStore) -> None:
    file = Run.open(run).manifest(0).files[1]
    flip(run, file.key, 0)
    problem = check(run, quick=True).failure
    assert problem is not None
    assert (problem.version, problem.object, problem.error) == (0, file.key, "HashMismatch")
    assert file.name in problem.message


@pytest.mark.parametrize("kind", ["anchor", "delta"])
def test_an_object_of_another_run(run: LocalStore, store: Store, models: list[Model], kind: str) -> None:
    publish(store, models, anchor_every=COUNT - 1, **SPARSE)
    base = None if kind == "anchor" else COUNT - 2
    foreign = store.get(blob_key(store, COUNT - 1, kind, base)).data
    key = swap(run, COUNT - 1, kind, base, foreign)
    problem = check(run, quick=True).failure
    assert problem is not None
    assert (problem.version, problem.object, problem.error) == (COUNT - 1, key, "ForeignObject")


# ── bad weights in good objects ──────────────────────────────────────────────────────────────────────────────────────


def delta_to(store: Store, version: int, base: int, old: Model, new: Model) -> bytes:
    before, after = (Bag(view.schema, dict(view)) for view in (ModelView(old), ModelView(new)))
    claim = {"run": Run.open(store).info.run, "base_version": str(base), "model_version": str(version)}
    return encoded(before, diff(before, after), "packed", **claim)


def test_a_delta_that_leads_elsewhere(run: LocalStore, models: list[Model]) -> None:
    newest, base = COUNT - 1, COUNT - 2
    key = swap(run, newest, "delta", base, delta_to(run, newest, base, models[base], trained(models[newest], 1)))
    assert check(run, quick=True).ok
    problem = check(run).failure
    assert problem is not None
    assert (problem.version, problem.object, problem.error) == (newest, key, "DigestMismatch")


def test_an_anchor_with_other_weights(run: LocalStore, models: list[Model]) -> None:
    newest = COUNT - 1
    view = ModelView(trained(models[newest], 1))
    claim = {"run": Run.open(run).info.run, "model_version": str(newest)}
    key = swap(
        run, newest, "anchor", None, b"".join(full.anchor(map(whole, view.schema.tensors), view.region, claim).chunks())
    )
    problem = check(run).failure
    assert problem is not None
    assert (problem.version, problem.object, problem.error) == (newest, key, "DigestMismatch")


def test_a_wrong_digest_in_the_newest_manifest(run: LocalStore) -> None:
    newest = COUNT - 1
    edit(run, keys.manifest(newest), lambda m: m.update(digest="0" * 32))
    problem = check(run).failure
    assert problem is not None
    assert (problem.version, problem.error) == (newest, "DigestMismatch")
    assert keys.manifest(newest) in problem.message


# ── bad records ──────────────────────────────────────────────────────────────────────────────────────────────────────


def of(page: Json, version: int) -> list[Any]:
    return next(summary for summary in page["versions"] if summary[0] == version)


RECORDS: dict[str, tuple[int | None, str, str, Callable[[Store], None]]] = {
    "a wrong digest in a manifest": (
        5,
        keys.manifest(5),
        "tell other digest",
        lambda s: edit(s, keys.manifest(5), lambda m: m.update(digest="0" * 32)),
    ),
    "a manifest of another version": (
        5,
        keys.manifest(5),
        "says it is version 6",
        lambda s: s.put(keys.manifest(5), s.get(keys.manifest(6)).data),
    ),
    "a manifest of another run": (
        5,
        keys.manifest(5),
        "belongs to run",
        lambda s: edit(s, keys.manifest(5), lambda m: m.update(run="other")),
    ),
    "a manifest that is cut off": (5, keys.manifest(5), "does not parse", lambda s: truncate(s, keys.manifest(5))),
    "a manifest that is missing": (5, keys.manifest(5), "is missing", lambda s: s.delete(keys.manifest(5))),
    "a page that is missing": (None, keys.history(32), "no object", lambda s: s.delete(keys.history(32))),
    "a page that is cut off": (None, keys.history(16), "does not parse", lambda s: truncate(s, keys.history(16))),
    "a page of another run": (
        None,
        keys.history(16),
        "of run 'other'",
        lambda s: edit(s, keys.history(16), lambda p: p.update(run="other")),
    ),
    "a page with a wrong digest": (
        20,
        keys.history(32),
        "other digest of version 20",
        lambda s: edit(s, keys.history(32), lambda p: of(p, 20).__setitem__(2, "0" * 32)),
    ),
    "a page with other links": (
        20,
        keys.history(32),
        "other links of version 20",
        lambda s: edit(s, keys.history(32), lambda p: of(p, 20)[6].pop()),
    ),
    "a page that leaves out a version": (
        20,
        keys.history(32),
        "leaves out version 20",
        lambda s: edit(s, keys.history(32), lambda p: p["versions"].remove(of(p, 20))),
    ),
    "a page that invents a version": (
        90,
        keys.history(32),
        "does not belong there: 90",
        lambda s: edit(s, keys.history(32), lambda p: p["versions"].append([90, *of(p, 20)[1:]])),
    ),
    "a manifest that forgets a recent version": (
        33,
        keys.manifest(35),
        "leaves out version 33",
        lambda s: edit(s, keys.manifest(35), lambda m: m["recent"].pop(1)),
    ),
    "pruned.json that does not parse": (
        None,
        keys.PRUNED,
        "does not parse",
        lambda s: s.put(keys.PRUNED, b"{"),
    ),
    "pruned.json of another run": (
        None,
        keys.PRUNED,
        "another run",
        lambda s: s.put(keys.PRUNED, dump(Pruned.of("other", (1,)))),
    ),
    "pruned.json that hides the newest version": (
        COUNT - 1,
        keys.PRUNED,
        "hides version",
        lambda s: s.put(keys.PRUNED, dump(Pruned.of(Run.open(s).info.run, (COUNT - 1,)))),
    ),
    "pruned.json that strands a version": (
        5,
        keys.manifest(5),
        "needs 4",
        lambda s: s.put(keys.PRUNED, dump(Pruned.of(Run.open(s).info.run, (4,)))),
    ),
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_bad_record_is_named(run: LocalStore, case: str) -> None:
    version, key, what, spoil = RECORDS[case]
    spoil(run)
    problem = check(run, quick=True).failure
    assert problem is not None
    assert (problem.version, problem.object) == (version, key)
    assert what in problem.message
    assert problem.advice


def test_harmless_things_are_warnings(run: LocalStore) -> None:
    edit(run, keys.HEAD, lambda head: head.update(version=COUNT - 3))
    run.put(keys.anchor(3, "deadbeef"), b"left behind")
    result = check(run, quick=True)
    assert result.ok
    assert [key in text for key, text in zip((keys.HEAD, "deadbeef"), result.warnings, strict=True)] == [True, True]
    edit(run, keys.HEAD, lambda head: head.update(version=COUNT + 50))
    assert "points to version 91" in check(run, quick=True).warnings[0]
    run.delete(keys.HEAD)
    assert "missing" in check(run, quick=True).warnings[0]


def test_what_is_pruned_while_verify_looks_is_no_damage(run: LocalStore) -> None:
    class Racing(CountingStore):
        """Another process prunes versions 1 to 19 while the first anchor is being read."""

        def get_range(self, key: str, start: int, length: int) -> bytes:
            if key == blob_key(run, 0, "anchor", None):
                self.inner.put(keys.PRUNED, dump(Pruned.of(Run.open(run).info.run, tuple(range(1, 20)))))
            return super().get_range(key, start, length)

    for item in run.list(keys.DELTAS):
        if (keys.data_version(item.key) or 0) in range(1, 20):
            run.delete(item.key)
    problem = check(Racing(run)).failure
    assert problem is not None
    assert "run verify again" in problem.advice
    # half-way: the manifests are still there
    result = check(run)
    assert result.ok
    assert "19 pruned versions still have a manifest (1–19)" in result.warnings[0]


# ── references ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def checkpoint(tmp_path: Path, models: list[Model]) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    full.write_checkpoint(folder, ModelView(models[0]))
    return folder


def test_a_reference_is_proven_where_it_is_at_hand(store: Store, checkpoint: Path, models: list[Model]) -> None:
    publish(store, models[1:6], reference=checkpoint, **SPARSE)
    result = check(store)
    assert result.ok
    assert (result.versions, result.proven, result.not_proven) == (6, 6, {})
    moved = checkpoint.rename(checkpoint.with_name("elsewhere"))
    assert check(store, reference=lambda *_: moved).proven == 6


@pytest.mark.parametrize("first", [None, 2])
def test_without_its_reference_a_run_is_only_hashed(
    store: Store, checkpoint: Path, models: list[Model], first: int | None
) -> None:
    publish(store, models[1:8], reference=checkpoint, anchor_every=5, **SPARSE)
    shutil.rmtree(checkpoint)
    result = check(store, first=first)
    assert result.ok
    # the anchor of version 5 and what follows it
    assert result.proven == 3
    assert result.not_proven["the reference is not available here"] == (6 if first is None else 3)


def test_a_reference_with_other_weights(store: Store, checkpoint: Path, models: list[Model]) -> None:
    publish(store, models[1:4], reference=checkpoint, **SPARSE)
    full.write_checkpoint(checkpoint, ModelView(models[9]))
    problem = check(store).failure
    assert problem is not None
    assert (problem.version, problem.object, problem.error) == (0, str(checkpoint), "DigestMismatch")
    assert "--reference" in problem.advice


def test_tied_weights_travel_and_verify_once(store: Store) -> None:
    shared = np.arange(64, dtype=np.uint16)
    later = shared + np.uint16(1)
    publish(store, [{"a": shared, "b": shared}, {"a": later, "b": later}])
    assert check(store).proven == 2
