"""Two records of one truth never move at the same moment. Interrupted at each line between them, they still agree, or
the next call finds that they do not (docs/design.md, points of no return). Those of a trainer are in tests/trainer."""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deltawire import Publisher, Replica
from deltawire.bucket import checkpoint_folder, prune, trust
from deltawire.bucket.checkpoint_folder import CurrentFolder, move_into, scratch
from deltawire.bucket.prune import Retention, apply_prune, survey
from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.bucket.trust import Seen, Trust, delegate
from deltawire.bucket.verify import verify
from deltawire.core import full, keys
from deltawire.core.signing import SigningKey
from deltawire.derive import deriver, followed
from deltawire.derive.deriver import Deriver, verify_derived
from deltawire.keeper import announce, keeper, mirror, skips
from deltawire.keeper.keeper import Keeper, KeeperOptions
from deltawire.keeper.mirror import Mirror
from deltawire.replica import attempt, heartbeats, host, live_weights, model, replica, target
from deltawire.replica.model import ModelTarget
from deltawire.store import ObjectStore, Store
from deltawire.views import FP8_BLOCK
from deltawire.views.blocks import Blocks
from deltawire.views.host import BlockView
from interrupting import Interrupted, raising_at_each_line
from keeping import Kept, copied, fresh, settings
from support import Model, blank, copy, history, moved_bag, publish, same
from view_models import weights as view_weights


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings(monkeypatch)
    monkeypatch.setenv("DELTAWIRE_STATE", str(tmp_path / "state"))


def memory() -> Store:
    return ObjectStore.from_url(f"memory://{uuid.uuid4()}")


# ── replica: live weights, and which version they are ────────────────────────────────────────────────────────────────

WEIGHTS = history(7)
WAIT = 20


@cache
def chain() -> Store:
    """A run of seven versions, of which version 3 is an anchor too."""
    store = memory()
    publish(store, WEIGHTS, anchor_every=3, anchor_ratio=1e9)
    return store


def named(live: Model, by: Replica) -> None:
    """Where the replica has a name for the weights, they are that version."""
    if by.version is not None:
        assert same(live, WEIGHTS[by.version])


def test_a_sync_at_every_line() -> None:
    """Deltas, full weights, and weights that something else has written to."""

    def operation(interrupted: Interrupted) -> None:
        live = copy(WEIGHTS[0])
        with Replica(chain(), heartbeat=0) as follower:
            interrupted(lambda: follower.sync(live, 2))
            named(live, follower)
            live["layer.weight"][3, 3] ^= 1
            interrupted(lambda: follower.sync(live, 4))
            if live["layer.weight"][3, 3] == WEIGHTS[4]["layer.weight"][3, 3]:
                named(live, follower)
            follower.sync(live)
            assert follower.version == 6
            assert same(live, WEIGHTS[6])

    where = [replica.Replica.sync, replica.Replica._sync, attempt, live_weights, target, model]
    assert len(raising_at_each_line(where, operation)) > 50


def test_a_sync_to_full_weights_at_every_line() -> None:
    def operation(interrupted: Interrupted) -> None:
        live = blank(WEIGHTS[0])
        with Replica(chain(), heartbeat=0) as follower:
            interrupted(lambda: follower.sync(live, 3))
            named(live, follower)
            follower.sync(live, 3)
            assert same(live, WEIGHTS[3])

    where = [replica.Replica.sync, replica.Replica._sync, attempt, live_weights, target, host.HostShard]
    raising_at_each_line(where, operation)


def test_a_heartbeat_at_every_line() -> None:
    """Nobody waits for one that was interrupted."""

    def operation(interrupted: Interrupted) -> None:
        live, store = copy(WEIGHTS[0]), chain()
        with Replica(store, id="here") as follower:
            interrupted(lambda: follower.sync(live, 2))
            # in a thread, so that one that never ends is seen
            rest = threading.Thread(target=lambda: follower.sync(live), daemon=True)
            rest.start()
            rest.join(WAIT)
            assert not rest.is_alive()
            assert same(live, WEIGHTS[6])
        assert store.head(keys.replica("here"))

    raising_at_each_line([heartbeats.Heartbeats], operation)


def test_an_undo_at_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that is not proven is taken back, and that is interrupted: the weights have no name, or the old one."""
    proven = ModelTarget.digest

    def operation(interrupted: Interrupted) -> None:
        live, wrong = copy(WEIGHTS[1]), [False, True]

        def digest(self: ModelTarget) -> Any:
            found = proven(self)
            # the first one finds which version the weights are, the second one proves what was written
            return found + found if wrong and wrong.pop(0) else found

        with Replica(chain(), heartbeat=0) as follower, monkeypatch.context() as patched:
            patched.setattr(ModelTarget, "digest", digest)
            interrupted(lambda: follower.sync(live, 2))
            named(live, follower)
            wrong.clear()
            follower.sync(live)
            assert same(live, WEIGHTS[6])

    raising_at_each_line([live_weights, target.write_or_undo, host.HostShard], operation)


# ── signed runs: the newest version seen, and what is served ─────────────────────────────────────────────────────────


def test_what_was_seen_at_every_line(tmp_path: Path) -> None:
    """What is served was noted before: a bucket that goes back later is noticed."""
    key, store = SigningKey.generate(), memory()
    key.write(tmp_path / "key")
    publish(store, WEIGHTS[:3], sign=tmp_path / "key")
    folder = tmp_path / "state"

    def operation(interrupted: Interrupted) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        given, live = Trust(key.public), copy(WEIGHTS[0])
        with Replica(store, heartbeat=0, trust=given) as follower:
            interrupted(lambda: follower.sync(live, 2))
            seen = Seen.read(folder).runs
            if follower.version:
                assert seen[Run.open(store).info.run].version >= follower.version
            follower.sync(live)
        assert Seen.read(folder).runs[Run.open(store).info.run].version == 2
        assert same(live, WEIGHTS[2])

    assert len(raising_at_each_line([trust.RunTrust, trust.Seen], operation)) > 30


def test_a_delegation_at_every_line(tmp_path: Path) -> None:
    key, other = SigningKey.generate(), SigningKey.generate()
    key.write(tmp_path / "key")
    store = memory()
    publish(store, WEIGHTS[:1], sign=tmp_path / "key")

    def operation(interrupted: Interrupted) -> None:
        here = copied(store)
        run = Run.open(here, trust=Trust(key.public))
        interrupted(lambda: delegate(run, key, other.public))
        delegate(run, key, other.public)
        assert trust.delegation(run, other.public) is not None

    raising_at_each_line([trust.delegate, trust._delegated, trust.delegation], operation)


# ── keeper: objects, page, index, and what it remembers of the versions it went through ──────────────────────────────

OPTIONS = KeeperOptions(since=0, anchor_every=8)


def keep(where: list[Any], count: int = 18) -> list[Any]:
    def operation(interrupted: Interrupted) -> None:
        kept = fresh(count)
        at_work = Keeper(kept.store, OPTIONS, id="keeper")
        interrupted(lambda: [*at_work.once()])
        interrupted(lambda: [*at_work.once()])
        deque(at_work.once(), maxlen=0)
        at_work.close()
        found = verify(kept.run)
        assert found.ok, found.failure
        assert not found.warnings, found.warnings
        index = kept.run.added.index()
        assert index is not None
        assert index.done == count - 1
        live = kept.blank()
        with Replica(kept.store, heartbeat=0) as follower:
            follower.sync(live)
        assert same(live, kept.weights[-1])
        # all that it announced is there, and is what it says
        for link in kept.run.added.between(-1, keys.MAX_VERSION):
            assert kept.store.head(link.link.objects[0].key).size == link.link.bytes

    return raising_at_each_line(where, operation)


def test_links_are_announced_at_every_line() -> None:
    keep([announce._put, announce._put_page, Keeper._announce, keeper.KeptWeights.swap])


@pytest.mark.slow
def test_a_keeper_at_every_line() -> None:
    keep([announce, keeper, skips.Skips])


# ── mirror: objects of a version, its manifest, its head ─────────────────────────────────────────────────────────────


def mirrored(kept: Kept, where: list[Any]) -> None:
    last = len(kept.weights) - 1

    def operation(interrupted: Interrupted) -> None:
        store = memory()
        copying = Mirror(kept.run, store)
        interrupted(lambda: copying.update(last - 1))
        if Run.open(store).newest() is not None:
            assert verify(Run.open(store)).ok
        interrupted(lambda: copying.update(last))
        copying.update(last)
        assert verify(Run.open(store)).ok
        live = kept.blank()
        with Replica(store, heartbeat=0) as follower:
            follower.sync(live)
        assert same(live, kept.weights[-1])

    raising_at_each_line(where, operation)


def test_a_mirror_at_every_line() -> None:
    kept = fresh(5)
    mirrored(kept, [mirror.Mirror.update, mirror.Mirror._version, mirror.Mirror._objects])


@pytest.mark.slow
def test_a_mirror_of_a_kept_run_at_every_line() -> None:
    kept = fresh(18)
    kept.keep(OPTIONS)
    prune.prune(kept.run, Retention(last=4, grace=0))
    mirrored(kept, [mirror])


# ── prune: marks, manifests, data ────────────────────────────────────────────────────────────────────────────────────


def test_a_prune_at_every_line() -> None:
    rule, hour = Retention(last=2), 3600.0

    def visits(store: Store) -> None:
        for _ in range(2):
            apply_prune(Run.open(store), survey(Run.open(store), rule, time.time() + 10 * hour))

    def operation(interrupted: Interrupted) -> None:
        store = copied(chain())
        interrupted(lambda: visits(store))
        found = verify(Run.open(store))
        assert found.ok, found.failure
        visits(store)
        visits(store)
        assert [*Run.open(store).listed()] == [3, 4, 5, 6]
        assert verify(Run.open(store)).ok
        live = blank(WEIGHTS[0])
        with Replica(store, heartbeat=0) as follower:
            follower.sync(live)
        assert same(live, WEIGHTS[6])

    raising_at_each_line([prune.apply_prune, prune._mark, prune._is_unchanged], operation)


# ── derived runs: the source's weights, the view's scales, what was published of it ──────────────────────────────────

DERIVED = 4


@cache
def source() -> Store:
    bags = [view_weights(0)]
    while len(bags) < DERIVED:
        bags.append(moved_bag(bags[-1], len(bags), 0.005))
    store = memory()
    with Publisher(store, files={"config.json": b"{}"}) as publisher:
        for bag in bags:
            publisher.publish(bag).result(60)
    return store


def derived(where: list[Any]) -> list[Any]:
    run = Run.open(source())
    views = {v: str(full.digest_of(BlockView(checkout(run, v), Blocks(run.schema, FP8_BLOCK)))) for v in run.listed()}

    def operation(interrupted: Interrupted) -> None:
        store = memory()
        with Deriver(Run.open(source()), store, "fp8-block") as deriving:
            deriving.derive(0)
            interrupted(lambda: [*deriving.follow(once=True)])
            # goes on with the same weights in memory
            for _ in deriving.follow(once=True):
                pass
            deriving._publisher.flush()
            assert deriving.reached == DERIVED - 1
        result = Run.open(store)
        for version in result.listed():
            manifest = result.manifest(version)
            assert manifest.origin is not None
            assert manifest.digest == views[manifest.origin.version]
        assert verify_derived(result, run).failure is None

    return raising_at_each_line(where, operation)


def test_a_derived_run_at_every_line() -> None:
    derived([deriver.Deriver._go_to, deriver.Deriver.derive, followed.FollowedView.advance])


@pytest.mark.slow
def test_a_derived_run_at_every_line_of_its_view() -> None:
    derived([deriver.Deriver, followed])


# ── checkouts: a folder and its name ─────────────────────────────────────────────────────────────────────────────────


def fill(folder: Path, text: str) -> None:
    (folder / "weights").write_text(text)


@pytest.mark.parametrize("at_once", [True, False], ids=["renameat2", "renames"])
def test_a_checkout_at_every_line(at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is the old one or the new one, whole."""
    if not at_once:
        monkeypatch.setattr(checkpoint_folder.ctypes, "CDLL", lambda *_, **__: object())

    def operation(interrupted: Interrupted) -> None:
        place = tmp_path / uuid.uuid4().hex
        place.mkdir()
        fill(place, "old")

        def checked_out(text: str) -> None:
            with scratch(place) as folder:
                fill(folder, text)
                move_into(folder, place, replace=True)

        interrupted(lambda: checked_out("new"))
        assert (place / "weights").read_text() in ("old", "new")
        checked_out("newer")
        assert (place / "weights").read_text() == "newer"
        # what is left beside it is empty, and goes with this process
        left = [path for path in tmp_path.iterdir() if place.name in path.name and path != place]
        assert not any([*path.iterdir()] for path in left)

    where = [checkpoint_folder.scratch, move_into, checkpoint_folder._exchange, checkpoint_folder._locked_folder]
    raising_at_each_line(where, operation)


def test_a_folder_that_follows_at_every_line(tmp_path: Path) -> None:
    def operation(interrupted: Interrupted) -> None:
        place = tmp_path / uuid.uuid4().hex
        with CurrentFolder(place) as current:
            current.put(1, lambda folder: fill(folder, "1"))
            interrupted(lambda: current.put(2, lambda folder: fill(folder, "2")))
            at = (place / "weights").read_text()
            assert current.holds(int(at))
            if at != "2":
                current.put(2, lambda folder: fill(folder, "2"))
        with CurrentFolder(place) as current:
            assert current.holds(2)
            current.put(3, lambda folder: fill(folder, "3"))
            assert (place / "weights").read_text() == "3"
        assert len([*(tmp_path / f".{place.name}.versions").iterdir()]) == 2

    raising_at_each_line([CurrentFolder.put, CurrentFolder._tidy, CurrentFolder.folder], operation)
