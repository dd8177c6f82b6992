"""What a folder adds to the protocol: processes, crashes, full disks, and files that are not ours."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deltawire.core.errors import (
    AlreadyExists,
    ObjectNotFound,
    PermissionDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    UnsafeName,
)
from deltawire.store import LocalStore

# Workers are forked from a fresh process, which is one import for all of them and safe from the threads of this one.
RACE = """
import multiprocessing, sys
from deltawire.core.errors import AlreadyExists
from deltawire.store.local import LocalStore

root, workers, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
processes = multiprocessing.get_context("fork")
barrier, wins = processes.Barrier(workers), processes.Queue()

def work(number):
    store = LocalStore(root)
    won = []
    for turn in range(rounds):
        barrier.wait()
        try:
            store.put_if_absent(f"versions/{turn:06}.json", str(number).encode() * 5000)
            won.append(turn)
        except AlreadyExists:
            pass
    wins.put((number, won))

children = [processes.Process(target=work, args=(number,)) for number in range(workers)]
for child in children: child.start()
found = [wins.get(timeout=240) for _ in children]
for child in children: child.join()
for number, won in found:
    for turn in won: print(turn, number)
"""

ENDLESS_PUT = """
import sys, time
from deltawire.store.local import LocalStore

def chunks():
    yield bytes(1 << 20)
    print("half", flush=True)
    time.sleep(600)

LocalStore(sys.argv[1]).put(sys.argv[2], chunks)
"""


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


def temp_files(store: LocalStore) -> list[Path]:
    return [path for path in store.root.rglob(".tmp-*") if path.is_file()]


# ── processes and crashes ────────────────────────────────────────────────────────────────────────────────────────────


def test_one_of_sixteen_processes_wins(store: LocalStore) -> None:
    rounds = 10
    command = [sys.executable, "-c", RACE, str(store.root), "16", str(rounds)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True).stdout
    wins = [line.split() for line in printed.splitlines()]
    assert sorted(int(turn) for turn, _ in wins) == list(range(rounds)), "each round has one winner"
    for turn, number in wins:
        assert store.get(f"versions/{int(turn):06}.json").data == number.encode() * 5000
    assert temp_files(store) == []


@pytest.mark.parametrize("old", [None, b"old"])
def test_a_killed_put_leaves_nothing_visible(store: LocalStore, old: bytes | None) -> None:
    if old is not None:
        store.put("anchors/step", old)
    command = [sys.executable, "-c", ENDLESS_PUT, str(store.root), "anchors/step"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        writer.send_signal(signal.SIGKILL)
    assert writer.returncode == -signal.SIGKILL

    assert [info.key for info in store.list()] == ([] if old is None else ["anchors/step"])
    if old is None:
        with pytest.raises(ObjectNotFound):
            store.get("anchors/step")
    else:
        assert store.get("anchors/step").data == old
    assert len(temp_files(store)) == 1

    assert store.sweep(older_than_s=3600) == 0, "it could be a live writer's"
    assert store.sweep(older_than_s=0) == 1
    assert temp_files(store) == []
    store.put("anchors/step", b"new")
    assert store.get("anchors/step").data == b"new"


def test_sweep_spares_objects_and_young_files(store: LocalStore) -> None:
    store.put("a/b", b"x")
    young, old = store.root / "a" / ".tmp-1-young", store.root / ".tmp-1-old"
    for path in (young, old):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 100, time.time() - 100))
    assert store.sweep(older_than_s=50) == 1
    assert temp_files(store) == [young]
    assert store.get("a/b").data == b"x"
    assert LocalStore(store.root / "nowhere").sweep(0) == 0


def test_an_interrupted_put_cleans_up(store: LocalStore) -> None:
    def interrupted():
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.put("key", interrupted)
    assert temp_files(store) == []


def test_object_is_synced_before_it_is_named(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power cut could leave a name without its bytes."""
    steps: list[str] = []
    for name in ("fsync", "replace", "link"):
        real: Callable[..., object] = getattr(os, name)

        def spy(*args: object, name: str = name, real: Callable[..., object] = real) -> object:
            steps.append(name)
            return real(*args)

        monkeypatch.setattr(os, name, spy)
    store.root.mkdir()
    store.put("key", b"x")
    assert steps == ["fsync", "replace", "fsync"]
    steps.clear()
    store.put_if_absent("other", b"x")
    assert steps == ["fsync", "link", "fsync"]


def test_a_put_sets_its_own_time(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's clock for files may tick every few milliseconds only, and an inode come back within one tick."""
    tick, fstat = 1_800_000_000_000_000_000, os.fstat

    def stopped(descriptor: int) -> os.stat_result:
        os.utime(descriptor, ns=(tick, tick))
        return fstat(descriptor)

    for now in (1_900_000_000_000_000_001, 1_900_000_000_000_000_002):
        monkeypatch.setattr(time, "time_ns", lambda now=now: now)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", stopped)
            store.put("head.json", b"0001")
        assert (store.root / "head.json").stat().st_mtime_ns == tick + now % 1_000_000


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ENOSPC, StoreFull),
        (errno.EDQUOT, StoreFull),
        (errno.EACCES, PermissionDenied),
        (errno.EROFS, PermissionDenied),
        (errno.EIO, StoreUnavailable),
        (errno.ESTALE, StoreUnavailable),
        (errno.EMFILE, StoreUnavailable),
        (errno.ENAMETOOLONG, UnsafeName),
        (errno.EXDEV, StoreError),
    ],
)
def test_errors_are_translated(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int, expected: type[Exception]
) -> None:
    def fail(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    store.put("old", b"old")
    monkeypatch.setattr(os, "fsync", fail)
    for put in (store.put, store.put_if_absent):
        with pytest.raises(StoreError if expected is not UnsafeName else UnsafeName) as caught:
            put("new", b"x")
        assert type(caught.value) is expected
        assert f"{store.url}/new" in str(caught.value)
    monkeypatch.undo()
    assert [info.key for info in store.list()] == ["old"]
    assert temp_files(store) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltawire.store.local._create", lambda temp: os.open("/dev/full", os.O_WRONLY))
    for data in (b"small", bytes(1 << 20), lambda: [b"small"] * 3):
        with pytest.raises(StoreFull, match="prune"):
            store.put("key", data)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_forbidden_folder(store: LocalStore) -> None:
    store.put("a/b", b"x")
    (store.root / "a").chmod(0o500)
    with pytest.raises(PermissionDenied):
        store.put("a/c", b"x")


def test_a_file_system_without_links(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError, match="no hard links"):
        store.put_if_absent("key", b"x")
    assert list(store.list()) == []


def test_a_link_whose_answer_was_lost(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS: the link was made, the client repeats the request and hears that the name is taken."""
    link = os.link

    def link_and_lose_the_answer(source: str, target: str) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", link_and_lose_the_answer)
    store.put_if_absent("key", b"mine")
    assert store.get("key").data == b"mine"
    monkeypatch.undo()
    with pytest.raises(AlreadyExists):
        store.put_if_absent("key", b"other")


def test_an_object_is_not_a_folder(store: LocalStore) -> None:
    store.put("a", b"x")
    store.put("b/c", b"x")
    for key in ("a/b", "b"):
        for put in (store.put, store.put_if_absent):
            with pytest.raises(StoreError):
                put(key, b"x")
    assert [info.key for info in store.list()] == ["a", "b/c"]
    assert temp_files(store) == []


# ── files that are not ours ──────────────────────────────────────────────────────────────────────────────────────────


def test_list_shows_only_what_get_can_read(store: LocalStore) -> None:
    store.put("a/b", b"x")
    for name in (".tmp-1-2", "a/.tmp-3-4", "back\\slash", "new\nline"):
        (store.root / name).write_bytes(b"?")
    (store.root / os.fsdecode(b"latin-\xe9")).write_bytes(b"?")
    (store.root / "loop").symlink_to(store.root)
    (store.root / "dangling").symlink_to(store.root / "nowhere")
    (store.root / ".tmp-folder").mkdir()
    (store.root / ".tmp-folder" / "x").write_bytes(b"?")
    assert [info.key for info in store.list()] == ["a/b"]
    for info in store.list():
        store.get(info.key)


def test_folders_that_no_key_leads_into(store: LocalStore) -> None:
    """More deeply nested than a key is long, or a call stack is high."""
    store.put("versions/a/object", b"x")
    deep = os.open(store.root / "versions", os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("b", dir_fd=deep)
        below = os.open("b", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)
    assert [info.key for info in store.list("versions/")] == ["versions/a/object"]
    assert store.sweep(0) == 0
    subprocess.run(["rm", "-rf", str(store.root / "versions")], check=True)  # pytest's own way would not get to the end


def test_files_are_readable_by_others(store: LocalStore) -> None:
    old = os.umask(0o022)
    try:
        store.put("key", b"x")
        store.put_if_absent("other", b"x")
    finally:
        os.umask(old)
    for key in ("key", "other"):
        assert (store.root / key).stat().st_mode & 0o777 == 0o644


def test_a_stream_is_not_gathered_in_memory(store: LocalStore) -> None:
    resource = pytest.importorskip("resource")
    chunk = bytes(1 << 20)
    store.put("warm", lambda: [chunk])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    store.put("big", lambda: (chunk for _ in range(128)))
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert store.head("big").size == 128 << 20
    assert grown_kb < 32 << 10
