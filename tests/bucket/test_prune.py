"""`prune` never strands a version that stays, whatever happens on the way."""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.bucket.prune import PrunePlan, Retention, apply_prune, plan_prune, survey
from deltawire.bucket.prune import prune as prune_now
from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core import chain, full, keys
from deltawire.core.errors import MissingBase, StoreUnavailable, VersionNotFound
from deltawire.core.manifest import Blob, Head, Heartbeat, Link, Manifest, Pruned, dump
from deltawire.models import ModelView
from deltawire.replica import Replica
from deltawire.store import LocalStore, ObjectInfo, ObjectStore, Store
from deltawire.trainer import Publisher
from deltawire_wordle.counting import CountingStore
from support import Model, blank, copy, heartbeats, held, history, publish, same, trained

COUNT = 40
HOUR = 3600.0
# anchors by cadence only: deltas of a model this small are soon larger than an anchor
OPTIONS: dict[str, Any] = {"anchor_ratio": 1e6, "anchor_every": 16, "files": {"config.json": b"{}"}}
RULE = Retention(last=5, every=10)


@pytest.fixture(scope="module")
def models() -> list[Model]:
    return history(COUNT + 4)


@pytest.fixture(scope="module")
def template(models: list[Model]) -> Store:
    store = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
    publish(store, models[:COUNT], **OPTIONS)
    return store


@pytest.fixture
def run(template: Store) -> Store:
    """A good run of 40 versions, to be pruned."""
    return clone(template)


def clone(template: Store) -> Store:
    store = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
    for item in template.list():
        store.put(item.key, template.get(item.key).data)
    return store


def later(store: Store, rule: Retention = RULE) -> PrunePlan:
    """The plan as it would be tomorrow morning, when nothing is young any more, and what is marked long marked."""
    return survey(Run.open(store), rule, time.time() + 10 * HOUR)


def prune(store: Store, rule: Retention = RULE, by: Store | None = None) -> PrunePlan:
    """One visit that marks and one, hours later, that deletes; returns what the second did."""
    for _ in range(2):
        plan = later(store, rule)
        apply_prune(Run.open(by or store), plan)
    return plan


def good(store: Store) -> bool:
    result = verify(Run.open(store))
    assert result.failure is None, result.failure
    return not result.warnings


# ── the plan ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_stays_and_why(run: Store) -> None:
    kept = later(run).kept
    assert kept[39] == "the newest"
    assert {v for v, why in kept.items() if why == "one of every 10"} == {0, 10, 20, 30}
    assert {v for v, why in kept.items() if why == "one of the last 5"} == {35, 36, 37, 38}
    # anchors at 0, 16 and 32
    path = {*range(1, 10), *range(16, 20), *range(21, 30), 32, 33, 34}
    assert {v for v, why in kept.items() if why == "on the way to one that stays"} == path


def test_looking_changes_nothing(run: Store) -> None:
    counting = CountingStore(run)
    later(counting)
    assert not {"put", "put_if_absent", "delete"} & counting.requests.keys()


def test_recent_objects_are_kept(run: Store) -> None:
    plan = survey(Run.open(run), RULE)
    assert (plan.marked, plan.going, plan.objects) == ((), (), ())
    assert plan.kept[1] == "younger than the grace period"


def test_a_version_that_must_stay_but_is_not_there(run: Store) -> None:
    with pytest.raises(VersionNotFound, match="cannot keep version 77"):
        later(run, Retention(versions=frozenset({77})))


def test_a_run_without_versions(store: Store, template: Store) -> None:
    store.put(keys.RUN, template.get(keys.RUN).data)
    with pytest.raises(VersionNotFound, match="nothing to prune"):
        later(store)


def test_a_run_that_is_broken_already_is_left_alone(run: Store) -> None:
    for version in (32, 33, 34):
        run.delete(keys.manifest(version))
    with pytest.raises(MissingBase):
        later(run)


@pytest.mark.parametrize("wrong", ["missing", "short", "damaged", "repaired"])
def test_the_way_around_an_anchor_that_cannot_be_used_stays(wrong: str) -> None:
    kinds = ["anchor", "delta", "both", "delta", "both", "delta"]
    manifests = {v: _manifest(v, kind, []) for v, kind in enumerate(kinds)}
    bad = keys.anchor(4, "0" * 8)
    listing = [replace(item, etag="1") for item in _listing(manifests, 99) if item.key != bad]
    if wrong != "missing":
        listing.append(ObjectInfo(bad, 7 if wrong == "short" else 1_000_000, HOUR, "1" if wrong == "damaged" else "2"))
    damaged = {bad: "1"} if wrong in ("damaged", "repaired") else {}
    rule = Retention(last=2, grace=HOUR)
    plan = plan_prune(manifests, listing, rule, 10 * HOUR, damaged=damaged)
    assert plan.marked == ((0, 1, 2, 3) if wrong == "repaired" else (0, 1))
    # all that was marked before the anchor was found damaged: only what is of no use goes
    marks, marked = ObjectInfo(keys.PRUNED, 1, HOUR), Pruned.of("r", range(4))
    plan = plan_prune(manifests, [*listing, marks], rule, 10 * HOUR, marked, damaged=damaged)
    assert (plan.restored, plan.going) == (((), (0, 1, 2, 3)) if wrong == "repaired" else ((2, 3), (0, 1)))
    assert not plan.marked
    assert not plan.waiting


def test_a_mark_is_taken_back_where_nothing_else_leads_to_what_stays(run: Store, models: list[Model]) -> None:
    rule = Retention(last=5)
    apply_prune(Run.open(run), later(run, rule))
    assert Run.open(run).pruned().versions == ((0, 31),)
    run.delete(Run.open(run).manifest(32).link("anchor", None).objects[0].key)
    plan = later(run, rule)
    assert plan.restored
    assert not set(plan.restored) & set(plan.going)
    apply_prune(Run.open(run), plan)
    live = blank(models[0])
    with Replica(run, heartbeat=0) as replica:
        assert replica.sync(live) == 39
    assert same(live, models[39])
    # once is enough
    plan = later(run, rule)
    assert (plan.restored, plan.marked, plan.going, plan.waiting) == ((), (), (), ())


LinkKinds = st.lists(st.sampled_from(["delta", "anchor", "both"]), min_size=1, max_size=40)


@given(
    LinkKinds,
    st.lists(st.tuples(st.integers(0, 39), st.integers(2, 16)), max_size=6),
    st.integers(0, 8),
    st.one_of(st.none(), st.integers(1, 12)),
    st.sets(st.integers(0, 39), max_size=3),
    st.integers(0, 40),
)
def test_every_version_that_stays_is_reached_as_before(
    kinds: list[str],
    skips: list[tuple[int, int]],
    last: int,
    every: int | None,
    asked: set[int],
    young: int,
) -> None:
    manifests = dict(enumerate(_manifest(v, kind, skips) for v, kind in enumerate(["anchor", *kinds])))
    listing = _listing(manifests, young)
    rule = Retention(last, every, frozenset(asked & manifests.keys()), grace=HOUR)
    plan = plan_prune(manifests, listing, rule, now=10 * HOUR)

    summaries = {v: m.summary() for v, m in manifests.items()}
    stay = {v: summaries[v] for v in plan.kept}
    for version in plan.kept:
        assert chain.plan(None, version, stay) == chain.plan(None, version, summaries)
    assert max(manifests) in plan.kept
    assert rule.versions <= plan.kept.keys()
    assert set(plan.kept) | set(plan.marked) == set(manifests)
    assert plan.objects == ()

    marked = Pruned.of("r", plan.marked)
    for written, reading in ((10 * HOUR, set()), (8 * HOUR, set(manifests))):
        waiting = plan_prune(
            manifests, [*listing, ObjectInfo(keys.PRUNED, 1, written)], rule, 10 * HOUR, marked, reading
        )
        assert waiting.objects == ()
        assert waiting.waiting == plan.marked
    then = plan_prune(manifests, [*listing, ObjectInfo(keys.PRUNED, 1, 8 * HOUR)], rule, 10 * HOUR, marked)
    assert (then.kept, then.going) == (plan.kept, plan.marked)
    named = {blob.key for v in plan.kept for link in manifests[v].links for blob in link.objects}
    assert not named & {item.key for item in then.objects}
    assert all(item.modified <= 9 * HOUR for item in then.objects)
    gone = {blob.key for v in then.going for link in manifests[v].links for blob in link.objects}
    assert gone == {item.key for item in then.data}
    assert then.bytes == plan.later


def _manifest(version: int, kind: str, skips: list[tuple[int, int]]) -> Manifest:
    links = []
    if kind != "anchor":
        links.append(_link("delta", version, version - 1, 1000))
    if kind != "delta":
        links.append(_link("anchor", version, None, 1_000_000))
    for base in {end - length for end, length in skips if end == version and end - length >= 0}:
        links.append(_link("delta", version, base, 1500))
    parent = version - 1 if version else None
    return Manifest("r", version, parent, "s", "0" * 32, tuple(links), float(version), "w")


def _link(kind: Any, version: int, base: int | None, size: int) -> Link:
    key = keys.anchor(version, "0" * 8) if base is None else keys.delta(base, version, "0" * 8)
    return Link(kind, base, (Blob(key, size, "0" * 32),))


def _listing(manifests: dict[int, Manifest], young: int) -> list[ObjectInfo]:
    """As a store lists it. Versions from `young` on were written within the last hour."""
    items = []
    for version, manifest in manifests.items():
        written = 9.5 * HOUR if version >= young else HOUR
        items.append(ObjectInfo(keys.manifest(version), 100, written))
        items += [ObjectInfo(blob.key, blob.size, written) for link in manifest.links for blob in link.objects]
    return sorted(items, key=lambda item: item.key)


# ── what goes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pruned_run_is_whole_and_smaller(run: Store, models: list[Model]) -> None:
    before = sum(item.size for item in run.list())
    plan = prune(run)
    assert plan.bytes > 0
    assert good(run)
    opened = Run.open(run)
    assert set(opened.timeline(COUNT - 1)) == set(plan.kept) == set(opened.listed())
    assert before - plan.bytes == sum(item.size for item in run.list() if item.key != keys.PRUNED)
    for version in plan.kept:
        assert same(held(checkout(opened, version), models[version]), models[version])
    for version in plan.going:
        with pytest.raises(VersionNotFound):
            checkout(Run.open(run), version)


def test_a_second_prune_finds_nothing(run: Store) -> None:
    prune(run)
    plan = later(run)
    assert (plan.marked, plan.going, plan.objects) == ((), (), ())


def test_a_prune_reads_a_manifest_once(run: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # none stays in memory by itself
    monkeypatch.setattr("deltawire.bucket.run.KEPT_MANIFESTS", 0)
    rule = Retention(last=5, grace=0)
    for apply in (False, True):
        counting = CountingStore(run)
        plan = prune_now(Run.open(counting), rule, apply=apply)
        assert plan.going
        assert counting.requests["get"] < COUNT + 12


def test_a_stricter_rule_goes_on_from_there(run: Store) -> None:
    first = prune(run)
    second = prune(run, Retention(last=1))
    assert good(run)
    assert set(second.kept) == {32, 33, 34, 35, 36, 37, 38, 39}
    assert Run.open(run).pruned().versions == ((0, 31),)
    assert {*first.going, *second.going} == set(range(32))


def test_garbage_is_deleted_but_not_uploads_in_flight(run: Store) -> None:
    orphans = [keys.anchor(12, "deadbeef"), keys.delta(38, 39, "deadbeef"), keys.delta(24, 32, "deadbeef")]
    coming = [keys.delta(39, 40, "deadbeef"), keys.anchor(40, "deadbeef")]
    strange = ["anchors/notes.txt", "files/readme.md", "somewhere/else"]
    for key in (*orphans, *coming, *strange):
        run.put(key, b"some bytes")
    run.put(keys.file("0" * 32), b"an old tokenizer")
    everything = Retention(last=COUNT)
    assert survey(Run.open(run), everything).objects == (), "all of it is young"
    plan = later(run, everything)
    apply_prune(Run.open(run), plan)
    assert {item.key for item in plan.objects} == {*orphans, keys.file("0" * 32)}
    left = {item.key for item in run.list()}
    assert left.issuperset((*coming, *strange))
    assert Run.open(run).pruned().versions == ()


def test_companion_files_live_as_long_as_a_version_names_them(store: Store, models: list[Model]) -> None:
    publish(store, models[:2], files={"a.json": b"1"}, anchor_every=1)
    publish(store, models[2:4], files={"a.json": b"2"}, anchor_every=1)
    first, _, _, newest = (Run.open(store).manifest(v).files[0].key for v in range(4))
    assert prune(store, Retention(last=3)).files == ()
    assert [item.key for item in prune(store, Retention(last=1)).files] == [first]
    assert [item.key for item in store.list(keys.FILES)] == [newest]
    assert good(store)


def test_a_file_that_is_published_again_meanwhile_stays(tmp_path: Path) -> None:
    folder = LocalStore(tmp_path)
    publish(folder, history(1))
    folder.put(keys.file("0" * 32), b"{}")
    plan = later(folder)
    assert len(plan.files) == 1
    old = ObjectInfo(plan.files[0].key, 2, plan.files[0].modified - 2 * HOUR)
    apply_prune(Run.open(folder), replace(plan, files=(old,)))
    assert folder.get(keys.file("0" * 32)).data == b"{}"


def test_silent_replicas_are_forgotten(run: Store) -> None:
    for name in ("a", "b"):
        run.put(keys.replica(name), dump(Heartbeat("r", name, 3, 3, True, 0.0)))
    assert later(run).heartbeats == ()
    plan = survey(Run.open(run), RULE, time.time() + 25 * HOUR)
    assert [item.key for item in plan.heartbeats] == [keys.replica("a"), keys.replica("b")]
    apply_prune(Run.open(run), plan)
    assert heartbeats(Run.open(run)) == []


@pytest.mark.parametrize("version", [0, COUNT - 1, 10**15, None])
@pytest.mark.parametrize("at", [0.0, 4e12, float("-inf")])
def test_a_heartbeat_may_keep_things_and_never_takes_any(run: Store, version: int | None, at: float) -> None:
    """Whoever can write heartbeats could claim that everybody is far ahead, or read everything."""
    alone = later(run)
    info = Run.open(run).info
    for number, reading in enumerate(((), ((0, COUNT),), ((3, 3), (10**15, 10**16)))):
        run.put(
            keys.replica(f"r{number}"),
            dump(Heartbeat(info.run, f"r{number}", version, version, True, at, reading=reading)),
        )
    plan = later(run)
    assert {*plan.going, *plan.marked} <= {*alone.going, *alone.marked}
    assert {item.key for item in plan.objects} <= {item.key for item in alone.objects}
    assert plan.kept.keys() >= alone.kept.keys()


def test_a_head_left_behind_is_moved_before_what_follows_it_goes(run: Store) -> None:
    run.put(keys.HEAD, dump(Head(Run.open(run).info.run, 20)))
    prune(run)
    assert Run.open(run).newest() == COUNT - 1
    assert good(run)


# ── crashes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Dies(CountingStore):
    """Lets so many changes through, then fails for ever: before the effect, or just after it."""

    def __init__(self, inner: Store, changes: int, after: bool) -> None:
        super().__init__(inner)
        self.left, self.after = changes, after
        self.lock = threading.Lock()

    def put(self, key: str, data: Any) -> None:
        self._change(lambda: self.inner.put(key, data))

    def delete(self, key: str) -> None:
        self._change(lambda: self.inner.delete(key))

    def _change(self, effect: Any) -> None:
        with self.lock:
            self.left -= 1
            if self.left > 0 or (self.left == 0 and self.after):
                effect()
            if self.left <= 0:
                raise StoreUnavailable("the machine is gone")


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_at_any_point_leaves_a_whole_run(template: Store, after: bool, stride: int) -> None:
    whole = clone(template)
    # a head to move, and garbage to take: all there is to a prune
    whole.put(keys.HEAD, dump(Head(Run.open(whole).info.run, 20)))
    whole.put(keys.anchor(12, "deadbeef"), b"garbage")
    whole.put(keys.file("0" * 32), b"an old tokenizer")
    pruned = clone(whole)
    plan = prune(pruned)
    final = {item.key: pruned.get(item.key).data for item in pruned.list()}
    changes = len(plan.objects) + 2
    for survived in (*range(1, changes, stride), changes):
        store = clone(whole)
        with pytest.raises(StoreUnavailable):
            prune(store, by=Dies(store, survived, after))
        result = verify(Run.open(store), quick=survived % 5 != 0)
        assert result.failure is None, f"after {survived} changes: {result.failure}"
        assert Run.open(store).newest() == COUNT - 1
        # whoever comes next finishes it
        prune(store)
        assert {item.key: store.get(item.key).data for item in store.list()} == final


def test_no_manifest_ever_names_what_is_gone(run: Store) -> None:
    """Readers that know nothing of pruned.json are safe too: at every step all manifests are whole."""
    order: list[str] = []

    class Watched(CountingStore):
        def delete(self, key: str) -> None:
            order.append(key)
            super().delete(key)

    plan = prune(run, by=Watched(run))
    assert len(order) == len(plan.objects)
    manifests = [i for i, key in enumerate(order) if key.startswith(keys.VERSIONS)]
    assert max(manifests) < min(i for i, key in enumerate(order) if not key.startswith(keys.VERSIONS))


# ── life goes on ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_new_publisher_takes_up_a_pruned_run(run: Store, models: list[Model]) -> None:
    prune(run)
    with Publisher(run, **OPTIONS) as publisher:
        assert publisher.resume(models[COUNT - 1]) == COUNT - 1
        publisher.publish(models[COUNT], wait=True)
    with Publisher(run, **OPTIONS) as publisher:
        # without the weights at hand it rebuilds them from what is left
        publisher.publish(models[COUNT + 1], wait=True)
    assert good(run)
    assert Run.open(run).newest() == COUNT + 1


def test_a_live_publisher_does_not_notice(run: Store, models: list[Model]) -> None:
    with Publisher(run, **OPTIONS) as publisher:
        publisher.publish(models[COUNT]).result(60)
        prune(run, Retention(last=1))
        weights = models[COUNT]
        for seed in range(20):
            # past the next page of history, which tells of versions that are no more
            weights = trained(weights, seed)
            publisher.publish(weights).result(60)
    assert good(run)
    opened = Run.open(run)
    assert min(opened.timeline(opened.newest() or 0)) == 32
    assert same(held(checkout(opened, COUNT + 20), weights), weights)


def test_a_prune_while_versions_are_published(run: Store, models: list[Model]) -> None:
    for half in (models[COUNT : COUNT + 2], models[COUNT + 2 :]):
        plan = later(run, Retention(last=1))
        publish(run, half, **OPTIONS)
        apply_prune(Run.open(run), plan)
        assert verify(Run.open(run)).ok
    assert len(plan.going) == 32
    assert good(run)
    assert Run.open(run).newest() == COUNT + 3


@pytest.mark.parametrize("version", [0, 12, 31])
def test_a_replica_on_a_pruned_version_recovers_by_an_anchor(run: Store, models: list[Model], version: int) -> None:
    weights = blank(models[0])
    replica = Replica(run, heartbeat=0)
    assert replica.sync(weights, version) == version
    prune(run, Retention(last=1))
    assert replica.sync(weights) == COUNT - 1
    assert same(weights, models[COUNT - 1])


def test_a_model_with_the_weights_of_a_pruned_version_is_brought_up(run: Store, models: list[Model]) -> None:
    prune(run, Retention(last=1))
    weights = copy(models[12])
    assert Replica(run, heartbeat=0).sync(weights) == COUNT - 1
    assert same(weights, models[COUNT - 1])


def test_a_follower_of_every_version_steps_over_the_gap(run: Store, models: list[Model]) -> None:
    weights, stop = copy(models[2]), threading.Event()
    seen = []
    plan = prune(run)
    for version in Replica(run, heartbeat=0).follow(weights, every=True, poll=0.01, stop=stop):
        seen.append(version)
        assert same(weights, models[version])
        if version == COUNT - 1:
            stop.set()
    assert seen[-1] == COUNT - 1
    assert set(seen) <= set(plan.kept)


def test_a_run_that_starts_from_a_reference(store: Store, tmp_path: Path, models: list[Model]) -> None:
    full.write_checkpoint(tmp_path, ModelView(models[0]))
    publish(store, models[1:10], reference=tmp_path, anchor_ratio=1e6)
    plan = prune(store, Retention(last=1, every=5))
    # one anchor there is not: every version needs all before it, down to the reference
    assert plan.going == ()
    assert good(store)


def test_a_file_store_is_pruned_the_same(tmp_path: Path, models: list[Model]) -> None:
    publish(LocalStore(tmp_path), models[:20], **OPTIONS)
    plan = prune(LocalStore(tmp_path), Retention(last=2))
    assert set(plan.kept) == {16, 17, 18, 19}
    assert good(LocalStore(tmp_path))
    assert msgspec.json.decode((tmp_path / keys.PRUNED).read_bytes())["versions"] == [[0, 15]]
