"""The cache that the processes of a host share: one transfer for all of them, and never a wrong byte."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltawire.bucket import cache as caching
from deltawire.bucket import fetch as fetching
from deltawire.bucket.fetch import fetch
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core.errors import HashMismatch, Misconfigured, StoreUnavailable
from deltawire.core.manifest import Blob
from deltawire.replica import Replica
from deltawire.store import LocalStore, ObjectStore, Store
from deltawire_wordle.counting import CountingStore
from support import Model, blank, content, history, publish, same, stored


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "cache"
    monkeypatch.setenv("DELTAWIRE_CACHE", str(folder))
    monkeypatch.delenv("DELTAWIRE_CACHE_GB", raising=False)
    # whoever fetches may be slow here
    monkeypatch.setattr(caching, "PATIENCE_S", 250.0)
    caching._said.clear()
    yield folder
    assert not list(folder.glob("*.part")) if folder.is_dir() else True, "nothing is left on its way"


def test_an_object_is_fetched_once(store: Store, cache: Path) -> None:
    blob = stored(store, os.urandom(5000))
    counting = CountingStore(store)
    told: list[int] = []
    for _ in range(3):
        with fetch(counting, blob, told.append) as data:
            assert data.read(100, 200) == store.get(blob.key).data[100:300]
    assert counting.bytes_in == blob.size
    assert told == [blob.size] * 3
    assert [path.name for path in cache.iterdir()] == [blob.hash]


def test_without_the_variable_or_for_a_folder_there_is_none(
    store: Store, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = LocalStore(tmp_path / "run")
    content(folder, stored(folder, b"x" * 100))
    monkeypatch.delenv("DELTAWIRE_CACHE")
    content(store, stored(store, b"x" * 100))
    assert not cache.exists()


def test_large_objects_go_there_in_parts(store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "PART", 300)
    blob = stored(store, os.urandom(5001))
    assert content(store, blob) == content(store, blob) == store.get(blob.key).data


@pytest.mark.parametrize("damage", [b"", b"short", b"y" * 1000, b"x" * 999 + b"y", b"x" * 1001])
def test_what_was_damaged_here_is_fetched_again(store: Store, cache: Path, damage: bytes) -> None:
    blob = stored(store, b"x" * 1000)
    content(store, blob)
    (cache / blob.hash).write_bytes(damage)
    assert content(store, blob) == b"x" * 1000
    assert (cache / blob.hash).read_bytes() == b"x" * 1000


def test_what_is_damaged_in_the_bucket_is_not_kept(store: Store, cache: Path) -> None:
    blob = stored(store, b"x" * 1000)
    store.put(blob.key, b"y" * 1000)
    with pytest.raises(HashMismatch):
        fetch(store, blob)
    assert list(cache.iterdir()) == []


def test_verify_reads_the_bucket(store: Store, cache: Path) -> None:
    publish(store, history(3))
    Replica(store, heartbeat=0).sync(blank(history(1)[0]))
    key = Run.open(store).manifest(2).links[0].objects[0].key
    data = bytearray(store.get(key).data)
    data[-1] ^= 1
    store.put(key, bytes(data))
    assert verify(Run.open(store)).failure is not None


# ── room ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_used_least_lately_goes_first(store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAWIRE_CACHE_GB", str(3000 / 1e9))
    blobs = [stored(store, os.urandom(1000), version) for version in range(5)]
    for age, blob in enumerate(blobs[:3]):
        content(store, blob)
        os.utime(cache / blob.hash, (0, 1000 + age))
    content(store, blobs[0])  # used again
    with fetch(store, blobs[1]) as reading:
        os.utime(cache / blobs[1].hash, (0, 0))
        content(store, blobs[3])
        assert {path.name for path in cache.iterdir()} == {blobs[n].hash for n in (0, 2, 3)}
        assert reading.read(0, 1000) == store.get(blobs[1].key).data, "who reads it reads to the end"
    content(store, blobs[4])
    assert {path.name for path in cache.iterdir()} == {blobs[n].hash for n in (0, 3, 4)}


def test_objects_larger_than_the_cache_bypass_it(store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAWIRE_CACHE_GB", str(500 / 1e9))
    blob = stored(store, os.urandom(1000))
    assert content(store, blob) == store.get(blob.key).data
    assert not cache.exists()


@pytest.mark.parametrize("text", ["much", "0", "-1", "nan", "inf"])
def test_invalid_bounds_are_refused(store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DELTAWIRE_CACHE_GB", text)
    with pytest.raises(Misconfigured, match="DELTAWIRE_CACHE_GB is"):
        fetch(store, stored(store, b"x" * 100))
    with pytest.raises(Misconfigured):
        Replica(store)


def test_a_full_disk(
    store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetching.os, "pwrite", full)
    with caplog.at_level(logging.WARNING, "deltawire"):
        for version in range(3):
            blob = stored(store, os.urandom(1000), version)
            assert content(store, blob) == store.get(blob.key).data
    assert [record.message for record in caplog.records] == [f"the cache {cache} is full; fetching without it"]
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_one(store: Store, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("a file")
    blob = stored(store, b"x" * 1000)
    with caplog.at_level(logging.WARNING, "deltawire"):
        assert content(store, blob) == b"x" * 1000
    assert "cannot be used: File exists" in caplog.text


# ── several at once ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_threads_wait_for_each_other(store: Store, cache: Path) -> None:
    blob = stored(store, os.urandom(100_000))
    counting = CountingStore(store)
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda: got.append(content(counting, blob))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert got == [store.get(blob.key).data] * 16
    assert counting.bytes_in == blob.size


class Tally:
    """A bucket for several processes: a folder under another name, whose served data is counted in a file."""

    creates_exclusively = True

    def __init__(self, folder: Path, tally: Path) -> None:
        self.inner, self.tally, self.url = LocalStore(folder), tally, "tally://bucket"

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = self.inner.get_range(key, start, length)
        with open(self.tally, "ab", buffering=0) as file:
            file.write(f"{len(data)}\n".encode())
        return data

    def served(self) -> int:
        return sum(map(int, self.tally.read_text().split()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def in_child(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return pid


def test_sixteen_processes_fetch_what_one_does(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAWIRE_THREADS", "1")
    versions: list[Model] = history(6)
    publish(LocalStore(tmp_path / "run"), versions, anchor_ratio=1e6)
    run = Run.open(str(tmp_path / "run"))
    data = sum(link.bytes for v in range(6) for link in run.manifest(v).links)

    def replica() -> None:
        weights = blank(versions[0])
        Replica(Tally(tmp_path / "run", tmp_path / "tally"), heartbeat=0).sync(weights)
        assert same(weights, versions[5])

    children = [in_child(replica) for _ in range(16)]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 16
    assert Tally(tmp_path / "run", tmp_path / "tally").served() == data


class Held(CountingStore):
    """The first request for data waits until it is told to go on, or fail."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.asked, self.go_on, self.fails = threading.Event(), threading.Event(), False

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if not self.asked.is_set():
            self.asked.set()
            self.go_on.wait(120)
            if self.fails:
                raise StoreUnavailable("the network is gone")
        return super().get_range(key, start, length)


def test_when_the_first_one_fails_the_next_one_fetches(store: Store, cache: Path) -> None:
    blob = stored(store, os.urandom(1000))
    held = Held(store)
    held.fails = True
    outcome: list[BaseException] = []

    def first() -> None:
        try:
            fetch(held, blob)
        except StoreUnavailable as error:
            outcome.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    assert held.asked.wait(120)
    threading.Timer(0.1, held.go_on.set).start()
    assert content(store, blob) == store.get(blob.key).data
    thread.join(120)
    assert len(outcome) == 1


def test_nobody_waits_for_one_that_hangs(store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "PATIENCE_S", 0.2)
    blob = stored(store, os.urandom(1000))
    held = Held(store)
    thread = threading.Thread(target=lambda: content(held, blob))
    thread.start()
    assert held.asked.wait(120)
    assert content(store, blob) == store.get(blob.key).data
    assert not held.go_on.is_set()
    held.go_on.set()
    thread.join(120)
    assert (cache / blob.hash).read_bytes() == store.get(blob.key).data


def test_a_process_that_died_blocks_no_other(tmp_path: Path, cache: Path) -> None:
    """It is killed with the lock in its hands; what it left is taken up by the next who wants it, or swept."""
    store = LocalStore(tmp_path / "bucket")
    first, second = stored(store, os.urandom(1000), 1), stored(store, os.urandom(1000), 2)

    class Deadly(Tally):
        def get_range(self, key: str, start: int, length: int) -> bytes:
            (tmp_path / f"reached-{os.getpid()}").touch()
            time.sleep(60)
            return b""

    bucket = Tally(tmp_path / "bucket", tmp_path / "tally")
    for blob in (first, second):
        pid = in_child(lambda: fetch(Deadly(tmp_path / "bucket", tmp_path / "tally"), first))
        while not (tmp_path / f"reached-{pid}").exists():
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert [path.name for path in cache.glob("*.part")] == [f"{first.hash}.part"]
        assert content(bucket, blob) == store.get(blob.key).data
        assert [path.name for path in cache.iterdir()] == [blob.hash]
        (cache / blob.hash).unlink()


def test_a_part_that_somebody_holds_is_not_swept(store: Store, cache: Path) -> None:
    cache.mkdir()
    part = cache / ("0" * 32 + ".part")
    with open(part, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        content(store, stored(store, b"x" * 1000))
        assert part.exists()
    content(store, stored(store, b"y" * 1000))
    assert not part.exists()


def test_hammered_by_threads_with_hardly_any_room(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetched, evicted, damaged and fetched again by many at once: what is read is always right."""
    store = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
    monkeypatch.setenv("DELTAWIRE_CACHE_GB", str(4000 / 1e9))
    blobs = [stored(store, os.urandom(1000), version) for version in range(8)]
    wrong: list[Blob] = []

    def hammer(seed: int) -> None:
        for turn in range(40):
            blob = blobs[(seed * 7 + turn * (seed + 1)) % 8]
            if content(store, blob) != store.get(blob.key).data:
                wrong.append(blob)
            if turn % 10 == seed % 10:
                # by rename, since what is written into an open file its reader sees: the digest is there for that
                damage = cache.parent / f"damage-{seed}"
                damage.write_bytes(b"x" * 1000)
                os.replace(damage, cache / blob.hash)

    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
