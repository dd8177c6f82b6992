"""The keeper: proves every version, adds links, and may be killed, doubled and restarted at any moment."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from deltawire.bucket.prune import Retention, prune
from deltawire.bucket.run import Run
from deltawire.bucket.trust import delegate
from deltawire.bucket.verify import verify
from deltawire.bucket.walk import TRIES, Walker
from deltawire.core import full, keys
from deltawire.core.added import skip_spans
from deltawire.core.change import whole
from deltawire.core.errors import (
    DeltawireError,
    Misconfigured,
    NotTheSigner,
    ObjectNotFound,
    RunReplaced,
    StoreUnavailable,
    Unsupported,
)
from deltawire.core.manifest import Link, dump
from deltawire.core.signing import SigningKey
from deltawire.core.state import State
from deltawire.keeper.announce import announce
from deltawire.keeper.keeper import Keeper, KeeperOptions
from deltawire.keeper.mirror import Mirror
from deltawire.replica import Replica
from deltawire.replica.model import ModelTarget
from deltawire.store import LocalStore, Store
from deltawire_wordle.counting import CountingStore
from flaky_store import FlakyStore
from keeping import Kept, copied, empty, fresh, publish, settings, step
from support import HookedStore, heartbeats, same

LAST = 69
OPTIONS = KeeperOptions(since=0, anchor_every=32)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    settings(monkeypatch)


@pytest.fixture
def kept() -> Kept:
    """A run of 70 versions without a keeper so far."""
    return fresh()


def added(run: Run) -> set[tuple[int, str, int | None]]:
    return {link.way for link in run.added.between(-1, 10**6)}


EXPECTED = {(v, "delta", v - span) for v in range(LAST + 1) for span in skip_spans(v)} | {
    (v, "anchor", None) for v in (32, 64)
}


def test_it_adds_anchors_and_skip_deltas_that_verify(kept: Kept) -> None:
    told = kept.keep(OPTIONS)
    assert [x.version for x in told] == list(range(1, LAST + 1))
    assert added(kept.run) == EXPECTED
    found = verify(kept.run)
    assert found.ok
    assert not found.warnings
    # manifests stay what they were, and a second visit finds nothing to do
    assert kept.keep(OPTIONS) == []
    beats = [beat for beat in heartbeats(kept.run) if beat.replica == "keeper"]
    assert [beat.healthy for beat in beats] == [True]


def test_it_follows(kept: Kept) -> None:
    stop, reached = threading.Event(), []
    keeper = Keeper(kept.store, KeeperOptions(anchor_every=4))
    weights = kept.weights

    def train() -> None:
        for _ in range(6):
            weights.append(step(weights[-1], len(weights)))
            publish(kept.store, weights[-1:])

    trainer = threading.Thread(target=train)
    trainer.start()
    for one in keeper.follow(poll=0.02, stop=stop):
        reached.append(one.version)
        if one.version == LAST + 6:
            stop.set()
    trainer.join()
    keeper.close()
    # from the last multiple of 16, in a run that had no keeper
    assert reached == list(range(65, LAST + 7))
    assert verify(kept.run).ok


def test_a_restarted_keeper_goes_on_where_the_last_one_ended(kept: Kept) -> None:
    few = Kept(copied(kept.store), kept.weights)
    for version in range(23, LAST + 1):
        few.store.delete(keys.manifest(version))
    few.keep(OPTIONS, id="first")
    assert few.run.added.index().done == 22  # type: ignore[union-attr]
    for version in range(23, LAST + 1):
        few.store.put(keys.manifest(version), kept.store.get(keys.manifest(version)).data)
    counting = CountingStore(few.store)
    keeper = Keeper(counting, OPTIONS, id="second")
    first = next(keeper.once())
    # in long pieces to where the first one was
    assert first.version == 16
    assert [x.version for x in keeper.once()][:4] == [20, 21, 22, 23]
    keeper.close()
    assert added(few.run) == EXPECTED


class Killed(BaseException):
    """What a test's process does not survive."""


class Dying:
    """A store at which the process is killed after some writes."""

    def __init__(self, inner: Store, writes: int) -> None:
        self.inner, self.writes = inner, writes

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name not in ("put", "put_if_absent", "delete"):
            return found

        def write(*arguments: Any) -> None:
            self.writes -= 1
            if self.writes < 0:
                raise Killed
            found(*arguments)

        return write


def test_killed_at_any_write_and_restarted(kept: Kept) -> None:
    # the last one is dead: do not wait until that shows
    options = replace(OPTIONS, lease_s=-1.0)
    lives = 0
    while True:
        lives += 1
        keeper = Keeper(Dying(kept.store, 7 + 9 * lives), options, id=f"life-{lives}")  # type: ignore[arg-type]
        try:
            list(keeper.once())
            break
        except Killed:
            pass
        for have in (None, 3):
            live = kept.blank() if have is None else {name: array.copy() for name, array in kept.weights[have].items()}
            with Replica(kept.store, heartbeat=0) as replica:
                replica.sync(live)
            assert same(live, kept.weights[LAST])
    assert lives > 3
    assert added(kept.run) == EXPECTED
    assert verify(kept.run).ok


def test_two_keepers_at_once(kept: Kept) -> None:
    """Both hold the lease, as two may who found it expired at the same moment."""
    keepers = [Keeper(kept.store, OPTIONS, id=name) for name in ("one", "other")]
    for keeper in keepers:
        keeper._lease.hold = lambda: True  # type: ignore[method-assign]
    errors: list[BaseException] = []

    def work(keeper: Keeper) -> None:
        try:
            list(keeper.once())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(keeper,)) for keeper in keepers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    found = verify(kept.run)
    assert found.ok, found.failure
    # what one announced while the other did is lost at worst
    assert added(kept.run) <= EXPECTED
    assert added(kept.run)


def test_a_second_keeper_follows_and_takes_the_place_of_the_first(kept: Kept) -> None:
    first, second = Keeper(kept.store, OPTIONS, id="first"), Keeper(kept.store, OPTIONS, id="second")
    for _ in range(20):
        assert first.keep(LAST) is not None
    done = [x.version for x in second.once()]
    assert done[-1] == 20
    assert not second.working
    assert second.holder == "first"
    # it dies
    second._lease._lease_s = -1.0
    assert [x.version for x in second.once()] == list(range(21, LAST + 1))
    assert added(kept.run) == EXPECTED


# ── bad objects ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_bad_delta_is_reported(kept: Kept) -> None:
    bad = kept.run.manifest(30).links[0].objects[0].key
    kept.store.put(bad, kept.store.get(bad).data[:-1] + b"\0")
    keeper = Keeper(kept.store, OPTIONS, id="keeper")
    told = {x.version: x for x in keeper.once()}
    assert "30" in told[30].bad[0]
    assert bad in keeper.bad[0]
    beat = next(beat for beat in heartbeats(kept.run) if beat.replica == "keeper")
    assert not beat.healthy
    assert "30" in beat.error
    keeper.close()


def test_a_bad_anchor_beside_a_good_delta_is_reported(kept: Kept) -> None:
    kept.weights.append(step(kept.weights[-1], 99))
    publish(kept.store, kept.weights[-1:], anchor_every=1)
    bad = next(link for link in kept.run.manifest(LAST + 1).links if link.kind == "anchor").objects[0].key
    kept.store.put(bad, kept.store.get(bad).data[:-1] + b"\0")
    told = kept.keep(KeeperOptions(since=64))
    assert bad in told[-1].bad[0]
    assert all(not x.bad for x in told[:-1])


def test_it_begins_with_the_newest_version_where_the_first_cannot_be_reached(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    store = empty()
    publish(store, kept.weights[:10], anchor_every=4)
    run = Run.open(store)
    store.delete(run.manifest(2).link("delta", 1).objects[0].key)
    keeper = Keeper(store, KeeperOptions(since=3))
    assert [*keeper.once()] == []
    assert "cannot begin with version 3" in caplog.text
    assert keeper.version == 9
    keeper.close()
    assert run.added.index().done == 9  # type: ignore[union-attr]


def test_it_begins_with_nothing_where_no_version_can_be_reached(kept: Kept) -> None:
    store = empty()
    publish(store, kept.weights[:3])
    run = Run.open(store)
    first = run.manifest(0).links[0].objects[0].key
    data = store.get(first).data
    store.delete(first)
    keeper = Keeper(store, KeeperOptions(since=0))
    with pytest.raises(ObjectNotFound):
        list(keeper.once())
    assert run.added.index() is None
    # and once it is repaired, with the version that it was told
    store.put(first, data)
    assert [x.version for x in keeper.once()] == [1, 2]
    keeper.close()


def test_versions_that_are_pruned_while_it_catches_up(kept: Kept) -> None:
    store = empty()
    publish(store, kept.weights, anchor_every=16)
    announce(Run.open(store), "before", (), 20)
    keeper = Keeper(store, KeeperOptions(anchor_every=8))
    told = keeper.once()
    assert [next(told).version for _ in range(3)] == [16, 20, 21]
    # marked, and still there
    store.put(keys.PRUNED, dump(Run.open(store).pruned().also(range(48))))
    assert [one.version for one in told][-1] == LAST
    keeper.close()
    assert keeper.bad == []
    assert verify(Run.open(store)).ok


def test_it_writes_nothing_into_a_run_that_took_the_place_of_its_own(kept: Kept) -> None:
    keeper = Keeper(kept.store, KeeperOptions(since=0))
    told = keeper.once()
    next(told)
    for item in [*kept.store.list()]:
        kept.store.delete(item.key)
    publish(kept.store, kept.weights[:1])
    with pytest.raises(RunReplaced):
        list(told)
    rule = Retention(last=1, grace=0)
    with pytest.raises(RunReplaced):
        prune(keeper.run, rule)
    assert kept.run.listed() == [0]
    assert keys.ADDED not in {item.key for item in kept.store.list()}


def test_a_store_that_fails_for_a_while(kept: Kept) -> None:
    class Failing(CountingStore):
        failing = False

        def put(self, key: str, data: Any) -> None:
            if self.failing and key.startswith(keys.DELTAS):
                raise StoreUnavailable("for a while")
            super().put(key, data)

    store = Failing(kept.store)
    keeper = Keeper(store, OPTIONS, id="keeper")
    for _ in range(21):
        keeper.keep(LAST)
    store.failing = True
    with pytest.raises(StoreUnavailable):
        keeper.keep(LAST)
    store.failing = False
    list(keeper.once())
    keeper.close()
    assert added(kept.run) == EXPECTED


def test_a_store_with_faults(kept: Kept) -> None:
    """Lost answers, truncated transfers, writes that take place twice or show late."""
    flaky = FlakyStore(
        kept.store, seed=3, drop=0.03, truncate_read=0.02, truncate_put=0.02, duplicate=0.05, reorder=0.05
    )
    while True:
        try:
            keeper = Keeper(flaky, OPTIONS, id="keeper")
            break
        except DeltawireError:
            pass
    for _ in range(400):
        try:
            list(keeper.once())
            if keeper.version == LAST:
                break
        except DeltawireError:
            pass
    keeper.close()
    assert flaky.injected.total() > 20
    assert keeper.version == LAST
    found = verify(kept.run)
    assert found.ok, found.failure
    assert added(kept.run) <= EXPECTED
    for have in (None, 3):
        live = kept.blank() if have is None else {name: array.copy() for name, array in kept.weights[have].items()}
        with Replica(kept.store, heartbeat=0) as replica:
            replica.sync(live)
        assert same(live, kept.weights[LAST])


def test_an_index_that_names_a_version_that_is_not_there_does_not_stop_it(kept: Kept) -> None:
    announce(kept.run, "forger", (), 10**12)
    kept.keep(OPTIONS)
    kept.weights += [step(kept.weights[-1], 98), step(kept.weights[-1], 99)]
    publish(kept.store, kept.weights[-2:])
    assert [told.version for told in kept.keep(OPTIONS)][-2:] == [LAST + 1, LAST + 2]
    assert kept.run.added.index().done == LAST + 2  # type: ignore[union-attr]


def test_since_is_said_to_be_of_no_use_where_a_keeper_was(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    kept.keep(KeeperOptions(since=64))
    assert "--since" not in caplog.text
    publish(kept.store, [step(kept.weights[-1], 99)])
    kept.keep(KeeperOptions(since=0))
    assert f"--since 0 is for a run that had no keeper: one has dealt with versions up to {LAST}" in caplog.text


# ── retention, mirrors ───────────────────────────────────────────────────────────────────────────────────────────────


def test_retention(kept: Kept) -> None:
    kept.keep(OPTIONS)
    kept.keep(KeeperOptions(retention=Retention(last=4, grace=0)))
    run = kept.run
    assert run.listed()[0] == 64
    assert verify(run).ok
    assert all(link.version >= 64 for link in run.added.between(-1, LAST))
    assert Walker(run).plan(None, LAST)[0].kind == "anchor"


@pytest.mark.parametrize("restarted", [False, True])
def test_retention_keeps_the_way_around_a_damaged_anchor(kept: Kept, tmp_path: Any, restarted: bool) -> None:
    store = empty()
    publish(store, kept.weights[:10], anchor_every=4)
    damage_anchor(store, 8)
    options = KeeperOptions(since=0, levels=0, retention=Retention(last=2, grace=0), mirrors=(str(tmp_path),))
    keeper = Keeper(store, options)
    list(keeper.once())
    assert "the anchor to version 8 cannot be used" in keeper.bad[0]
    if restarted:
        keeper.close()
        keeper = Keeper(store, options)
    keeper._pruned_at = -float("inf")
    list(keeper.once())
    keeper.close()
    for place in (store, LocalStore(tmp_path)):
        assert Run.open(place).listed() == [4, 5, 6, 7, 8, 9]
        live = kept.blank()
        with Replica(place, heartbeat=0) as replica:
            assert replica.sync(live) == 9
        assert same(live, kept.weights[9])


def test_a_mirror_takes_over_no_mark_of_what_alone_leads_on_there(kept: Kept, tmp_path: Any) -> None:
    store = empty()
    publish(store, kept.weights[:10], anchor_every=4)
    damage_anchor(store, 8)
    mirror = Mirror(Run.open(store), LocalStore(tmp_path))
    mirror.update(9)
    # by one that does not know of the damage
    prune(Run.open(store), Retention(last=2, grace=0))
    for rule in (None, Retention(last=2, grace=0)):
        mirror.update(9, rule)
        assert Run.open(mirror.store).pruned().versions == ((0, 3),)
        live = kept.blank()
        with Replica(mirror.store, heartbeat=0) as replica:
            assert replica.sync(live) == 9
        assert same(live, kept.weights[9])


@pytest.mark.parametrize("by", ["trainer", "keeper"])
@pytest.mark.parametrize("once", [True, False])
def test_retention_keeps_the_way_around_an_anchor_that_a_mirror_found_damaged(
    kept: Kept, tmp_path: Any, by: str, once: bool
) -> None:
    store = empty()
    publish(store, kept.weights[:10], **({"anchor_every": 4} if by == "trainer" else {}))
    options = KeeperOptions(since=0, levels=0, anchor_every=4)
    Kept(store, kept.weights).keep(options)
    # after the keeper has proved it
    bad = damage_anchor(store, 8)
    options = replace(options, retention=Retention(last=2, grace=0), mirrors=(str(tmp_path),))
    keeper = Keeper(store, options)
    if once:
        list(keeper.once())
    else:
        keeper._lease.hold()
        keeper._pruned_at = float("inf")
        keeper.tend(9)
        wait(keeper._side_jobs.values())
        keeper._pruned_at = -float("inf")
        keeper.tend(9)
    keeper.close()
    assert [*keeper.damaged] == [bad]
    run = Run.open(store)
    assert run.listed() == [4, 5, 6, 7, 8, 9]
    live = kept.blank()
    with Replica(store, heartbeat=0) as replica:
        assert replica.sync(live) == 9
    assert same(live, kept.weights[9])


def damage_anchor(store: Store, version: int) -> str:
    run = Run.open(store)
    run.added.between(version - 1, version)
    key = run.link(run.manifest(version), "anchor", None).objects[0].key
    data = bytearray(store.get(key).data)
    data[-1] ^= 1
    store.put(key, bytes(data))
    return key


def test_an_anchor_takes_the_place_of_a_damaged_one(kept: Kept) -> None:
    store = empty()
    publish(store, kept.weights[:10], anchor_every=4)
    bad = damage_anchor(store, 8)
    Kept(store, kept.weights).keep(KeeperOptions(since=0, anchor_every=4))
    run = Run.open(store)
    assert (9, "anchor", None) in added(run)
    assert [*run.added.index().damaged] == [bad]  # type: ignore[union-attr]
    # no longer once its version went
    prune(run, Retention(last=1, grace=0))
    assert run.listed() == [9]
    assert announce(run, "keeper", (), 9).damaged == {}


def test_of_a_sharded_anchor_only_the_bad_shard_is_damaged(kept: Kept) -> None:
    """So that the anchor counts again once that one is repaired."""
    store = empty()
    publish(store, kept.weights[:10], anchor_every=4)
    run = Run.open(store)
    state = State(run.schema)
    with Replica(store, heartbeat=0) as replica:
        replica.sync(ModelTarget(state), 8)
    shards = []
    for which, tensor in enumerate(run.schema.tensors):
        metadata = {"run": run.info.run, "model_version": "8", "total_params": str(run.schema.elements)}
        file = full.anchor([whole(tensor)], state.region, metadata)
        shards.append(file.blob(keys.anchor(8, "0" * 8, (which, len(run.schema.tensors)))))
        store.put(shards[-1].key, file.chunks)
    manifest = run.manifest(8)
    links = (*(x for x in manifest.links if x.kind != "anchor"), Link("anchor", None, tuple(shards)))
    store.put(keys.manifest(8), dump(msgspec.structs.replace(manifest, links=links)))
    bad = damage_anchor(store, 8)
    keeper = Keeper(store, KeeperOptions(since=0, levels=0))
    list(keeper.once())
    keeper.close()
    assert keeper.damaged == {bad: run.etag(bad)}


def test_what_the_store_could_not_give_is_not_remembered_as_damaged(kept: Kept) -> None:
    store = empty()
    publish(store, kept.weights[:10], anchor_every=4)
    away = Run.open(store).manifest(8).link("delta", 7).objects[0].key

    def hook(moment: str, verb: str, key: str) -> None:
        if key == away and verb != "head":
            raise StoreUnavailable("away")

    keeper = Keeper(HookedStore(store, hook), KeeperOptions(since=0, levels=0))
    for _ in range(TRIES):
        with suppress(StoreUnavailable):
            list(keeper.once())
    keeper.close()
    assert "the delta to version 8 cannot be used: away" in keeper.bad[0]
    assert keeper.damaged == {}
    assert Run.open(store).added.index().damaged == {}  # type: ignore[union-attr]


def test_mirrors(kept: Kept, tmp_path: Any) -> None:
    kept.keep(KeeperOptions(since=48, mirrors=(f"file://{tmp_path}/a", str(tmp_path / "b"))))
    for name in "ab":
        run = Run.open(str(tmp_path / name))
        assert run.newest() == LAST
        assert verify(run).ok
        assert added(run) == added(kept.run)


def test_a_mirror_without_a_damaged_object_is_reported(kept: Kept, tmp_path: Any) -> None:
    kept.keep(OPTIONS)
    bad = kept.run.manifest(30).links[0].objects[0].key
    kept.store.delete(bad)
    keeper = Keeper(kept.store, KeeperOptions(mirrors=(str(tmp_path),)))
    list(keeper.once())
    keeper.close()
    assert f"the mirror {tmp_path.as_uri()} lacks what is damaged here" in keeper.replica.heartbeats.note
    assert bad in keeper.replica.heartbeats.note
    assert Run.open(str(tmp_path)).newest() == LAST


def test_a_run_is_no_mirror_of_itself_and_has_one_address(kept: Kept, tmp_path: Any) -> None:
    for name in "ab":
        folder = LocalStore(tmp_path / name)
        for item in kept.store.list():
            folder.put(item.key, kept.store.get(item.key).data)
    with pytest.raises(Misconfigured, match="address of its own"):
        Keeper(str(tmp_path / "a"), KeeperOptions(mirrors=(f"file://{tmp_path}/a/",)))
    keeper = Keeper(f"file://{tmp_path}/a,file://{tmp_path}/b")
    with pytest.raises(Unsupported, match="name one of the addresses"):
        next(keeper.follow(poll=0.01))


# ── signed runs ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_signed_run(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAWIRE_STATE", str(tmp_path / "state"))
    key, own = SigningKey.generate(), SigningKey.generate()
    key.write(tmp_path / "run.key")
    weights, store = fresh(21).weights, empty()
    publish(store, weights, sign=tmp_path / "run.key")
    kept = Kept(store, weights)
    options = KeeperOptions(since=0, anchor_every=16)
    keeper = Keeper(store, options, trust=key.public, sign=own)
    with pytest.raises(NotTheSigner):
        list(keeper.once())
    keeper.close()
    delegate(Run.open(store, trust=key.public), key, own.public)
    keeper = Keeper(store, options, trust=key.public, sign=own)
    list(keeper.once())
    keeper.close()
    signed = added(Run.open(store, trust=key.public))
    assert (16, "anchor", None) in signed
    # a keeper without that key, or whoever else can write the bucket: readers that trust the run's key ignore it all
    announce(Run.open(store), "forger", (), 20)
    assert added(Run.open(store, trust=key.public)) == set()
    assert added(Run.open(store)) == signed
    live = kept.blank()
    with Replica(store, heartbeat=0, trust=key.public) as replica:
        replica.sync(live)
    assert same(live, weights[-1])


def test_between_a_rotation_and_the_next_delegation_nothing_is_added(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTAWIRE_STATE", str(tmp_path / "state"))
    old, new, own = (SigningKey.generate() for _ in range(3))
    old.write(tmp_path / "old.key")
    new.write(tmp_path / "new.key")
    weights, store = fresh(23).weights, empty()
    publish(store, weights[:20], sign=tmp_path / "old.key")
    delegate(Run.open(store, trust=old.public), old, own.public)
    counting = CountingStore(store)
    keeper = Keeper(counting, KeeperOptions(since=0), trust=old.public, sign=own)
    list(keeper.once())
    assert not [*keeper.once()]  # as of every poll
    publish(store, weights[20:21], sign=tmp_path / "old.key", next_key=new.public)
    publish(store, weights[21:22], sign=tmp_path / "new.key", trust=old.public)
    present = {item.key for item in store.list()}
    for _ in range(3):
        counting.reset()
        with pytest.raises(NotTheSigner, match="deltawire delegate"):
            list(keeper.once())
        assert not counting.requests["get_range"], "no object is read"
    assert {item.key for item in store.list()} == present, "and none is written"
    delegate(Run.open(store, trust=new.public), new, own.public)
    assert [told.version for told in keeper.once()] == [20, 21]
    keeper.close()


@pytest.mark.parametrize("once", [True, False])
def test_mirrors_go_on_after_a_rotation_and_no_added_link_is_pruned(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, once: bool
) -> None:
    monkeypatch.setenv("DELTAWIRE_STATE", str(tmp_path / "state"))
    old, new, own = (SigningKey.generate() for _ in range(3))
    old.write(tmp_path / "old.key")
    new.write(tmp_path / "new.key")
    weights, store, mirror = fresh(23).weights, empty(), str(tmp_path / "mirror")
    publish(store, weights[:20], sign=tmp_path / "old.key")
    delegate(Run.open(store, trust=old.public), old, own.public)
    options = KeeperOptions(since=0, anchor_every=4, retention=Retention(last=30, grace=0), mirrors=(mirror,))
    keeper = Keeper(store, options, id="keeper", trust=old.public, sign=own)
    list(keeper.once())
    publish(store, weights[20:21], sign=tmp_path / "old.key", next_key=new.public)
    publish(store, weights[21:22], sign=tmp_path / "new.key", trust=old.public)
    before = {item.key for item in store.list()}
    keeper.close()
    keeper = Keeper(store, options, id="keeper", trust=old.public, sign=own)
    if once:
        with pytest.raises(NotTheSigner):
            list(keeper.once())
    else:
        stop = threading.Event()
        following = threading.Thread(target=lambda: list(keeper.follow(poll=0.01, stop=stop)))
        following.start()
        end = time.monotonic() + 60
        while Run.open(mirror).newest() != 21 and time.monotonic() < end:
            time.sleep(0.01)
        stop.set()
        following.join()
    keeper.close()
    assert Run.open(mirror).newest() == 21
    assert before <= {item.key for item in store.list()} | {keys.KEEPER, keys.CLOCK}
