"""A data object is fetched whole and checked, wherever its bytes are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3

from deltawire.bucket import fetch as module
from deltawire.bucket.fetch import FetchedObject, fetch
from deltawire.core.errors import HashMismatch, ObjectNotFound
from deltawire.core.manifest import Blob
from deltawire.store import Store
from deltawire_wordle.counting import CountingStore

DATA = bytes(range(256)) * 40


def blob(data: bytes = DATA) -> Blob:
    return Blob("deltas/x", len(data), blake3(data).hexdigest(length=16))


@pytest.mark.parametrize("small, in_memory", [(1 << 20, 64 << 20), (0, 64 << 20), (0, 0)])
def test_bytes_are_the_same_in_memory_and_in_files(
    store: Store, monkeypatch: pytest.MonkeyPatch, small: int, in_memory: int
) -> None:
    monkeypatch.setattr(module, "SMALL", small)
    monkeypatch.setattr(module, "IN_MEMORY", in_memory)
    monkeypatch.setattr(module, "PART", 1000)
    store.put("deltas/x", DATA)
    seen: list[int] = []
    with fetch(store, blob(), seen.append) as fetched:
        assert fetched.read(0, len(DATA)) == DATA
        assert fetched.read(10_000, 1000) == DATA[10_000:]
        assert fetched.read(5, 7) == DATA[5:12]
    assert sum(seen) == len(DATA)
    assert len(seen) == 11


def test_a_bad_transfer_is_repeated_once(store: Store) -> None:
    class Flipped(CountingStore):
        def get_range(self, key: str, start: int, length: int) -> bytes:
            data = super().get_range(key, start, length)
            return data[:-1] + b"?" if self.requests["get_range"] == 1 else data

    store.put("deltas/x", DATA)
    with fetch(Flipped(store), blob()) as fetched:
        assert fetched.read(0, len(DATA)) == DATA


def test_another_object_than_the_manifest_names_is_refused(store: Store) -> None:
    with pytest.raises(ObjectNotFound):
        fetch(store, blob())
    store.put("deltas/x", DATA[:-1] + b"?")
    with pytest.raises(HashMismatch, match="its manifest says"):
        fetch(store, blob())


def test_writes_go_anywhere() -> None:
    fetched = FetchedObject(6)
    fetched.write(3, b"def")
    fetched.write(0, b"abc")
    assert fetched.read(0, 6) == b"abcdef"
    assert fetched.hash() == blake3(b"abcdef").hexdigest(length=16)


def test_an_empty_object_comes_through_the_cache(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAWIRE_CACHE", str(tmp_path))
    empty = blob(b"")
    store.put(empty.key, b"")
    with fetch(store, empty) as fetched:
        assert fetched.read(0, 10) == b""


def test_a_host_that_forbids_files_in_memory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module, "SMALL", 10)
    monkeypatch.setattr(module.os, "memfd_create", refused)
    store.put(blob().key, DATA)
    with fetch(store, blob()) as fetched:
        assert fetched.read(0, len(DATA)) == DATA
