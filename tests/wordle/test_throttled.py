from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltawire.store import ObjectStore
from deltawire_wordle.throttled import ThrottledStore


class Clock:
    """A time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> ThrottledStore:
    """One megabyte per second."""
    inner = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
    return ThrottledStore(inner, 8, clock=clock, sleep=clock.sleep)


def test_bytes_take_their_time(store: ThrottledStore, clock: Clock) -> None:
    store.put("a", bytes(500_000))
    assert clock.now == pytest.approx(0.5)
    store.put("b", lambda: [bytes(250_000), memoryview(bytes(750_000))])
    store.put_if_absent("c", bytes(100_000))
    assert clock.now == pytest.approx(1.6)
    etag = store.get("a").etag
    assert store.get_range("b", 5, 400_000) == bytes(400_000)
    assert clock.now == pytest.approx(2.5)
    assert store.get_if_changed("a", None) is not None
    assert clock.now == pytest.approx(3.0)
    # what carries no object is free
    assert store.get_if_changed("a", etag) is None
    assert store.head("a").size == 500_000
    assert len(list(store.list())) == 3
    store.delete("a")
    assert clock.now == pytest.approx(3.0)


def test_threads_share_the_link() -> None:
    waits: list[float] = []
    store = ThrottledStore(ObjectStore.from_url(f"memory://{uuid.uuid4()}"), 8, clock=lambda: 0.0, sleep=waits.append)
    with ThreadPoolExecutor(4) as pool:
        for number in range(4):
            pool.submit(store.put, f"{number}", bytes(1_000_000))
    assert sorted(waits) == pytest.approx([1.0, 2.0, 3.0, 4.0])
