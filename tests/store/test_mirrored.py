"""Several buckets of one run: a reader goes on with another one when its own is cut off."""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltawire.bucket.checkpoint_folder import CurrentFolder, fill
from deltawire.bucket.replay import checkout, load_folder
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.bucket.versions import resolve
from deltawire.bucket.watch import wait_for_run
from deltawire.core import keys
from deltawire.core.errors import (
    DigestMismatch,
    HashMismatch,
    ObjectNotFound,
    RolledBack,
    RunNotFound,
    StoreUnavailable,
    Unsupported,
)
from deltawire.core.manifest import Head, dump
from deltawire.core.signing import SigningKey
from deltawire.keeper.mirror import Mirror
from deltawire.replica import Replica
from deltawire.store import LocalStore, MirroredStore, Retrying, Store, open_store
from deltawire.trainer import Publisher
from deltawire_wordle.counting import CountingStore
from deltawire_wordle.seaweed import SeaweedFS
from flaky_store import FlakyStore
from soak.proxy import Proxy
from support import HookedStore, blank, copy, held, history, publish, same

VERSIONS = history(5)


class Cut:
    """A hook that makes a store unavailable while it is set."""

    def __init__(self) -> None:
        self.off = False

    def __call__(self, moment: str, verb: str, key: str) -> None:
        if self.off and moment == "before":
            raise StoreUnavailable(f"{verb} {key}: no route")


@pytest.fixture
def region(tmp_path: Path) -> tuple[Path, Path]:
    publish(LocalStore(tmp_path / "us"), VERSIONS[:3], anchor_ratio=1e9)
    shutil.copytree(tmp_path / "us", tmp_path / "eu")
    return tmp_path / "us", tmp_path / "eu"


def copied(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)


def test_a_replica_goes_on_with_the_mirror_and_comes_back_without_a_full_download(region: tuple[Path, Path]) -> None:
    us, eu = region
    cut, weights = Cut(), blank(VERSIONS[0])
    home, mirror = CountingStore(LocalStore(us)), CountingStore(LocalStore(eu))
    store = MirroredStore([HookedStore(home, cut), mirror], back_s=0.5)
    replica = Replica(store, id="r", heartbeat=10)
    following = replica.follow(weights, poll=0.02)
    assert next(following) == 2
    assert (mirror.bytes_in, store.current.url) == (0, LocalStore(us).url)
    # the region is cut off; the trainer and the keeper are not
    cut.off = True
    publish(LocalStore(us), [VERSIONS[3]], anchor_ratio=1e9)
    copied(us, eu)
    assert next(following) == 3
    assert same(weights, VERSIONS[3])
    anchor = next((eu / "anchors").iterdir()).stat().st_size
    assert 0 < mirror.bytes_in < anchor, "one delta and small records"
    assert (eu / keys.replica("r")).exists(), "it is seen where it reads"
    # and back: the mirror stays behind
    cut.off = False
    home.reset()
    publish(LocalStore(us), [VERSIONS[4]], anchor_ratio=1e9)
    assert next(following) == 4
    assert same(weights, VERSIONS[4])
    assert 0 < home.bytes_in < anchor
    replica.close()


def test_a_replica_that_starts_while_its_bucket_is_cut_off(region: tuple[Path, Path]) -> None:
    us, eu = region
    dead = FlakyStore(LocalStore(us), drop=1.0)
    weights = blank(VERSIONS[0])
    assert Replica(MirroredStore([dead, LocalStore(eu)]), heartbeat=0).sync(weights) == 2
    assert same(weights, VERSIONS[2])
    with pytest.raises(StoreUnavailable, match="none of the 2 buckets"):
        Replica(MirroredStore([dead, dead]), heartbeat=0).sync(weights)


def test_a_mirror_that_is_behind_never_takes_a_replica_back(region: tuple[Path, Path]) -> None:
    us, eu = region
    cut, weights = Cut(), blank(VERSIONS[0])
    publish(LocalStore(us), [VERSIONS[3]], anchor_ratio=1e9)
    store = MirroredStore([HookedStore(LocalStore(us), cut), LocalStore(eu)])
    replica = Replica(store, heartbeat=0)
    following = replica.follow(weights, poll=0.02)
    assert next(following) == 3
    cut.off = True
    waiting = threading.Thread(target=lambda: next(following, None))
    waiting.start()
    while store.current.url != LocalStore(eu).url:
        time.sleep(0.01)
    assert (replica.version, same(weights, VERSIONS[3])) == (3, True)
    replica.close()
    waiting.join()


def test_another_run_is_no_mirror(region: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    us, _ = region
    publish(LocalStore(tmp_path / "other"), history(4, seed=8))
    cut = Cut()
    for place in ("other", "empty"):
        store = MirroredStore([HookedStore(LocalStore(us), cut), LocalStore(tmp_path / place)])
        cut.off, weights = False, blank(VERSIONS[0])
        replica = Replica(store, heartbeat=0)
        replica.sync(weights)
        cut.off = True
        with pytest.raises(StoreUnavailable):
            replica.sync(weights)
        assert same(weights, VERSIONS[2])
        assert "is not a mirror" in caplog.text


def test_etags_are_those_of_one_bucket() -> None:
    stores: list[Any] = [open_store(f"memory://etags-{name}", retry=False) for name in "ab"]
    for store, data in zip(stores, (b"1", b"2"), strict=True):
        store.put("k", data)
    cut = Cut()
    store = MirroredStore([HookedStore(stores[0], cut), stores[1]])
    found = store.get("k")
    assert store.get_if_changed("k", found.etag) is None
    cut.off = True
    changed = store.get_if_changed("k", found.etag)
    assert changed is not None
    assert changed.data == b"2"
    assert store.get_if_changed("k", changed.etag) is None
    assert [item.key for item in store.list()] == ["k"]
    assert (store.head("k").size, store.get_range("k", 0, 1)) == (1, b"2")
    with pytest.raises(ObjectNotFound):
        store.get("x")


def test_addresses_with_commas_are_for_readers(region: tuple[Path, Path]) -> None:
    us, eu = region
    both = f"file://{us},file://{eu}"
    store = open_store(both)
    assert isinstance(store, MirroredStore)
    assert Replica(both, heartbeat=0).sync(blank(VERSIONS[0])) == 2
    with pytest.raises(Unsupported, match="name one of the addresses alone"):
        Publisher(both)
    for write in (store.put, store.put_if_absent):
        with pytest.raises(Unsupported):
            write("x", b"")
    with pytest.raises(Unsupported):
        store.delete("x")
    # a comma in a name
    plain: Store = open_store(f"{us},x")
    assert isinstance(plain, Retrying)
    with pytest.raises(RunNotFound):
        Replica(plain, heartbeat=0).sync(blank(VERSIONS[0]))


# ── one of them is damaged ───────────────────────────────────────────────────────────────────────────────────────────


def lose(*patterns: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        for pattern in patterns:
            for path in run.glob(pattern):
                path.unlink()

    return damage


def spoil(*patterns: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        for pattern in patterns:
            for path in run.glob(pattern):
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 1
                path.write_bytes(data)

    return damage


def replace(run: Path) -> None:
    """Another run of the same model at the address, as long as this one."""
    shutil.rmtree(run)
    publish(LocalStore(run), history(5, seed=8), anchor_ratio=1e9)


def roll_back(run: Path) -> None:
    """The bucket as it was when version 0 was the newest."""
    lose("versions/00000[1-9].json", "deltas/*", "head.json")(run)
    LocalStore(run).put(keys.HEAD, dump(Head(Run.open(str(run)).info.run, 0)))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a manifest is damaged": lambda run: max(run.glob("versions/*")).write_bytes(b"{"),
    "a manifest of other weights": lambda run: other_digest(max(run.glob("versions/*"))),
    "data is damaged": spoil("anchors/*", "deltas/*"),
    "objects are lost": lose("anchors/*", "deltas/*"),
    "pruned.json is damaged": lambda run: (run / keys.PRUNED).write_bytes(b"{"),
    "run.json is lost": lose("run.json"),
    "run.json is damaged": lambda run: (run / keys.RUN).write_bytes(b"{"),
    "the bucket is empty": shutil.rmtree,
}


def other_digest(path: Path) -> None:
    """A manifest that parses, and tells of weights that its objects do not make."""
    digest = Run.open(str(path.parents[1])).manifest(int(path.stem)).digest
    path.write_bytes(path.read_bytes().replace(digest.encode(), digest[::-1].encode()))


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_the_first_bucket_cannot_give_comes_from_the_next(
    region: tuple[Path, Path], tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    us, eu = region
    DAMAGES[damage](us)
    both, expected = f"file://{us},file://{eu}", VERSIONS[2]
    replica, weights = Replica(both, heartbeat=0), blank(expected)
    assert replica.sync(weights) == 2
    assert same(weights, expected)
    assert (replica.version, replica.rejected) == (2, [])
    assert f"file://{us} cannot be used for now" in caplog.text or not (us / keys.RUN).exists()
    # following, a private copy, a version by its number
    weights = blank(expected)
    with Replica(both, heartbeat=0) as follower:
        assert next(follower.follow(weights, poll=0.02)) == 2
        assert same(weights, expected)
    assert same(held(checkout(Run.open(both), 2), expected), expected)
    assert resolve(Run.open(both), "v2") == 2
    # a server waits for its run, and a folder is kept with it
    opened = wait_for_run(both)
    state = checkout(opened, resolve(opened, None))
    with CurrentFolder(tmp_path / "model") as current:
        current.put(2, lambda made: fill(made, opened, opened.manifest(2), state))
    assert same(held(load_folder(opened, tmp_path / "model"), expected), expected)


@pytest.mark.parametrize("damage", [*DAMAGES, "another run", "rolled back"])
def test_a_follower_goes_on_with_the_next_bucket(region: tuple[Path, Path], damage: str) -> None:
    us, eu = region
    with Replica(f"file://{us},file://{eu}", heartbeat=0) as replica:
        weights = blank(VERSIONS[0])
        following = replica.follow(weights, poll=0.02)
        assert next(following) == 2
        for version in (3, 4):
            publish(LocalStore(eu), [VERSIONS[version]], anchor_ratio=1e9)
            shutil.rmtree(us, ignore_errors=True)
            shutil.copytree(eu, us)
            {**DAMAGES, "another run": replace, "rolled back": roll_back}[damage](us)
            assert next(following) == version
            assert same(weights, VERSIONS[version])


def test_signatures_tell_which_bucket_has_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAWIRE_STATE", str(tmp_path / "state"))
    us, eu, key = tmp_path / "us", tmp_path / "eu", SigningKey.generate()
    publish(LocalStore(us), VERSIONS[:3], anchor_ratio=1e9, sign=key)
    shutil.copytree(us, eu)
    both = f"file://{us},file://{eu}"
    for damage in (replace, roll_back):
        shutil.rmtree(us)
        shutil.copytree(eu, us)
        weights = blank(VERSIONS[0])
        assert Replica(both, heartbeat=0, trust=key.public).sync(weights) == 2
        damage(us)
        for _ in range(2):
            weights = blank(VERSIONS[0])
            assert Replica(both, heartbeat=0, trust=key.public).sync(weights) == 2
            assert same(weights, VERSIONS[2])
            # also on a host that has seen nothing, where signatures alone tell
            if damage is replace:
                shutil.rmtree(tmp_path / "state")
    with pytest.raises(RolledBack):
        Replica(f"file://{us}", heartbeat=0, trust=key.public).sync(weights)


def test_what_was_asked_before_a_bucket_was_left_decides_nothing(region: tuple[Path, Path]) -> None:
    us, eu = (LocalStore(place) for place in region)
    asked, go_on = threading.Event(), threading.Event()

    def slow(moment: str, verb: str, key: str) -> None:
        if (moment, key) == ("after", keys.HEAD):
            asked.set()
            assert go_on.wait(60)

    store = MirroredStore([HookedStore(us, slow), eu], back_s=0.0)
    store.get(keys.RUN)
    late = threading.Thread(target=store.get, args=(keys.HEAD,))
    late.start()
    assert asked.wait(60)
    store.leave()
    store.get(keys.manifest(0))
    go_on.set()
    late.join()
    assert store.current.url == eu.url
    # nor does time, while what was begun goes on
    store.get(keys.manifest(1))
    assert store.current.url == eu.url
    store.may_return()
    store.get(keys.manifest(1))
    assert store.current.url == us.url


def test_manifests_of_a_bucket_that_was_left_are_not_kept(region: tuple[Path, Path]) -> None:
    us, eu = (LocalStore(place) for place in region)
    run = Run.open(MirroredStore([us, eu]))
    truth = run.manifest(2)
    other_digest(region[0] / keys.manifest(2))
    run.forget(2)
    asked, go_on, late = threading.Event(), threading.Event(), threading.Thread(target=lambda: run.manifest(2))

    def slow(moment: str, verb: str, key: str) -> None:
        if threading.current_thread() is late and moment == "after":
            asked.set()
            assert go_on.wait(60)

    run.store._stores = HookedStore(us, slow), eu  # type: ignore[attr-defined]
    failed = [DigestMismatch(2, "", "")]

    def work() -> None:
        if failed:
            late.start()
            assert asked.wait(60)
            raise failed.pop()
        go_on.set()
        late.join()

    run.anywhere(work)
    assert run.manifest(2) == truth


def test_an_error_of_all_buckets_names_each(region: tuple[Path, Path]) -> None:
    us, eu = region
    both, weights = f"file://{us},file://{eu}", copy(VERSIONS[0])
    with Replica(both, heartbeat=0) as replica:
        replica.sync(weights, 1)
        before = copy(weights)
        spoil("anchors/*", "deltas/*")(us)
        lose("anchors/*", "deltas/*")(eu)
        with pytest.raises(HashMismatch, match=f"none of 2 buckets.*{us}: .*; file://{eu}: .*") as found:
            replica.sync(weights)
        assert str(found.value).count("buckets can be used") == 1
        assert (replica.version, same(weights, before)) == (1, True)
        # the second one has no answer at all
        shutil.rmtree(eu)
        with pytest.raises(HashMismatch, match=f"file://{eu}: no answer, or not the same run"):
            replica.sync(weights)
        assert (replica.version, same(weights, before)) == (1, True)
    with pytest.raises(RunNotFound, match="none of 2 buckets"):
        shutil.rmtree(us)
        Run.open(both)


def test_sync_does_not_go_back_to_a_mirror_that_is_behind(region: tuple[Path, Path]) -> None:
    us, eu = region
    publish(LocalStore(us), [VERSIONS[3]], anchor_ratio=1e9)
    replica, weights = Replica(f"file://{us},file://{eu}", heartbeat=0), blank(VERSIONS[0])
    assert replica.sync(weights) == 3
    (us / keys.manifest(3)).write_bytes(b"{")
    replica.opened().forget(3)
    assert replica.sync(weights) == 3
    assert same(weights, VERSIONS[3])


@pytest.mark.slow
def test_one_region_of_s3_is_cut_off(seaweed: SeaweedFS, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two buckets on a real server, one behind a proxy that resets connections: a keeper's mirror takes its place."""
    us, eu = (seaweed.store(f"deltawire/{uuid.uuid4()}/{name}") for name in ("us", "eu"))
    publish(us, VERSIONS[:3], anchor_ratio=1e9)
    mirror = Mirror(Run.open(us), eu)
    mirror.update(2)
    proxy = Proxy([seaweed.ports["s3.port"]], tmp_path / "proxy.log")
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in seaweed.environment.items():
                patch.setenv(name, value)
            home = f"{us.url.partition('?')[0]}?endpoint=http://127.0.0.1:{proxy.ports[0]}"
            away = f"{eu.url.partition('?')[0]}?endpoint={seaweed.endpoint}"
            store, weights = open_store(f"{home},{away}"), blank(VERSIONS[0])
            replica = Replica(store, heartbeat=0)
            following = replica.follow(weights, poll=0.05)
            assert next(following) == 2
            proxy.set([0], "cut")
            publish(us, [VERSIONS[3]], anchor_ratio=1e9)
            mirror.update(3)
            began = time.monotonic()
            assert next(following) == 3
            with capsys.disabled():
                print(f" switched after {time.monotonic() - began:.1f} s", end="")
            assert same(weights, VERSIONS[3])
            replica.close()
    finally:
        proxy.close()
    for each in (us, eu):
        assert verify(Run.open(each)).ok
