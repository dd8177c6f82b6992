from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltawire.core.errors import ObjectNotFound
from deltawire.store import ObjectStore
from deltawire_wordle.counting import CountingStore


@pytest.fixture
def store() -> CountingStore:
    return CountingStore(ObjectStore.from_url(f"memory://{uuid.uuid4()}"))


def test_counts_calls_and_bytes(store: CountingStore) -> None:
    store.put("a", b"12345")
    store.put("b", lambda: [b"123", memoryview(b"4567")])
    store.put_if_absent("c", b"1")
    assert (store.bytes_in, store.bytes_out) == (0, 13)
    etag = store.get("a").etag
    store.get_if_changed("a", etag)
    store.get_if_changed("a", None)
    store.get_range("b", 1, 2)
    store.head("a")
    assert len(list(store.list())) == 3
    store.delete("a")
    with pytest.raises(ObjectNotFound):
        store.get("a")
    assert (store.bytes_in, store.bytes_out) == (12, 13)
    assert store.requests == {
        "put": 2, "put_if_absent": 1, "get": 2, "get_if_changed": 2, "get_range": 1, "head": 1, "list": 1, "delete": 1,
    }  # fmt: skip
    store.reset()
    assert (store.requests, store.bytes_in, store.bytes_out) == ({}, 0, 0)


def test_threads_lose_no_count(store: CountingStore) -> None:
    store.put("a", b"12345")
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: store.get("a"), range(2000)))
    assert store.requests["get"] == 2000
    assert store.bytes_in == 10_000
