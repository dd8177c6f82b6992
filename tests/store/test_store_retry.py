from __future__ import annotations

import contextlib
import random
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from deltawire.core.errors import AlreadyExists, ObjectNotFound, StoreFull, StoreUnavailable, TruncatedFile
from deltawire.store import LocalStore, ObjectStore, Retrying, Store
from deltawire_wordle.counting import CountingStore
from flaky_store import FlakyStore


@pytest.fixture
def memory() -> ObjectStore:
    return ObjectStore.from_url(f"memory://{uuid.uuid4()}")


class Time:
    """A clock that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def clock(self) -> float:
        return self.now


class Failing(CountingStore):
    """Answers StoreUnavailable `failures` times, before or after the effect, then works."""

    def __init__(self, inner: Store, failures: int, *, after: bool = False) -> None:
        super().__init__(inner)
        self.failures, self.after = failures, after

    def get(self, key: str, *, limit: int | None = None):
        return self._maybe(lambda: super(Failing, self).get(key, limit=limit))

    def put(self, key: str, data) -> None:
        self._maybe(lambda: super(Failing, self).put(key, data))

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._maybe(lambda: super(Failing, self).put_if_absent(key, data))

    def _maybe(self, call: Callable):
        if self.failures == 0:
            return call()
        self.failures -= 1
        if self.after:
            call()
        else:
            self.requests["failed"] += 1
        raise StoreUnavailable("try again")


def patient(inner: Store, time: Time | None = None, **policy) -> Retrying:
    time = time or Time()
    return Retrying(inner, sleep=time.sleep, clock=time.clock, rng=random.Random(1), **policy)


# ── the policy ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_attempts_are_bounded(memory: ObjectStore) -> None:
    memory.put("key", b"x")
    assert patient(Failing(memory, 4), attempts=5).get("key").data == b"x"
    failing = Failing(memory, 5)
    with pytest.raises(StoreUnavailable, match="try again; gave up after 5 attempts in"):
        patient(failing, attempts=5).get("key")
    assert failing.requests["failed"] == 5


def test_the_log_says_how_often_it_is_tried_again(memory: ObjectStore, caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing(memory, 10**6)
    with pytest.raises(StoreUnavailable):
        patient(failing).get("key")
    (said,) = [record.getMessage() for record in caplog.records]
    assert "retrying up to 6 more times, for 60 s at most" in said
    assert failing.requests["failed"] == 4 + 6


def test_a_full_disk_is_not_tried_again(memory: ObjectStore) -> None:
    class Full(CountingStore):
        def put(self, key: str, data) -> None:
            self.requests["put"] += 1
            raise StoreFull("no room")

    time, full = Time(), Full(memory)
    with pytest.raises(StoreFull):
        patient(full, time).put("key", b"x")
    assert (full.requests["put"], time.slept) == (1, [])


def test_time_is_bounded(memory: ObjectStore) -> None:
    time = Time()
    with pytest.raises(StoreUnavailable):
        patient(Failing(memory, 10**6), time, attempts=10**6, total_s=30.0).get("key")
    assert 20.0 < time.now <= 30.0


def test_delays_grow_with_full_jitter(memory: ObjectStore) -> None:
    first: list[float] = []
    tenth: list[float] = []
    for seed in range(200):
        time = Time()
        store = Retrying(
            Failing(memory, 10), attempts=12, total_s=1e9, first_delay_s=0.1, max_delay_s=5.0,
            sleep=time.sleep, clock=time.clock, rng=random.Random(seed),
        )  # fmt: skip
        with pytest.raises(ObjectNotFound):
            store.get("key")
        first.append(time.slept[0])
        tenth.append(time.slept[9])
    assert min(first) < 0.01 < 0.09 < max(first) <= 0.1
    assert min(tenth) < 0.5 < 4.5 < max(tenth) <= 5.0


def test_a_store_that_says_how_long(memory: ObjectStore) -> None:
    class Busy(CountingStore):
        def get(self, key: str, *, limit: int | None = None):
            raise StoreUnavailable("busy", retry_after=7.0)

    time = Time()
    with pytest.raises(StoreUnavailable) as caught:
        patient(Busy(memory), time, attempts=3, first_delay_s=0.1).get("key")
    assert all(7.0 <= slept <= 9.0 for slept in time.slept)
    assert len(time.slept) == 2
    assert caught.value.retry_after == 7.0, "whoever waits above knows it too"
    time = Time()
    with pytest.raises(StoreUnavailable):
        patient(Busy(memory), time, total_s=5.0).get("key")
    assert time.slept == [], "it asks for more patience than there is"


def test_what_is_left_is_swept_where_there_is_a_way(memory: ObjectStore, tmp_path: Path) -> None:
    folder = LocalStore(tmp_path)
    (tmp_path / ".tmp-1").touch()
    assert patient(folder).sweep(0) == 1
    assert patient(memory).sweep(0) == 0
    assert patient(CountingStore(folder)).sweep(0) == 0


def test_other_errors_are_answers(memory: ObjectStore) -> None:
    time = Time()
    store = patient(CountingStore(memory), time)
    memory.put("key", b"x")
    for error, call in (
        (ObjectNotFound, lambda: store.get("absent")),
        (TruncatedFile, lambda: store.get_range("key", 0, 2)),
        (AlreadyExists, lambda: store.put_if_absent("key", b"x")),
    ):
        with pytest.raises(error):
            call()
    assert time.slept == []
    assert store.inner.requests == {"get": 1, "get_range": 1, "put_if_absent": 1}


def test_a_stream_starts_again(memory: ObjectStore) -> None:
    started = 0

    def chunks():
        nonlocal started
        started += 1
        yield b"one"
        yield b"two"

    patient(Failing(memory, 2, after=True)).put("key", chunks)
    assert started == 3
    assert memory.get("key").data == b"onetwo"


def test_policy_is_checked(memory: ObjectStore) -> None:
    with pytest.raises(ValueError):
        Retrying(memory, attempts=0)


# ── creating once, though answers get lost ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("data", [b"mine", b""])
@pytest.mark.parametrize("after", [False, True])
def test_a_lost_answer_to_our_own_create(memory: ObjectStore, data: bytes, after: bool) -> None:
    patient(Failing(memory, 1, after=after)).put_if_absent("key", data)
    assert memory.get("key").data == data


def test_another_writer_was_first(memory: ObjectStore) -> None:
    memory.put("key", b"theirs")
    for data in (b"mine..", b"longer than theirs", b""):
        with pytest.raises(AlreadyExists):
            patient(Failing(memory, 1)).put_if_absent("key", data)
    assert memory.get("key").data == b"theirs"


def test_equal_bytes_alone_do_not_make_a_winner(memory: ObjectStore) -> None:
    memory.put("key", b"same")
    with pytest.raises(AlreadyExists):
        patient(memory).put_if_absent("key", b"same")


def test_the_last_attempt_counts_too(memory: ObjectStore) -> None:
    class AnswersNever(CountingStore):
        def put_if_absent(self, key: str, data: bytes) -> None:
            with contextlib.suppress(AlreadyExists):
                super().put_if_absent(key, data)
            raise StoreUnavailable("no answer")

    patient(AnswersNever(memory), attempts=3).put_if_absent("key", b"mine")
    assert memory.get("key").data == b"mine"
    memory.put("other", b"theirs")
    with pytest.raises(StoreUnavailable):
        patient(AnswersNever(memory), attempts=3).put_if_absent("other", b"mine")


# ── over a bad network ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(20))
def test_all_ends_well_over_a_flaky_store(memory: ObjectStore, seed: int) -> None:
    flaky = FlakyStore(
        memory, seed=seed, drop=0.3, delay=0.1, duplicate=0.2, truncate_put=0.2, truncate_read=0.1, sleep=lambda s: None
    )
    store = patient(flaky, attempts=60, total_s=1e9)
    for number in range(40):
        store.put(f"data/{number:02}", b"%d" % number * 100)
        store.put(f"streams/{number:02}", lambda number=number: [b"%d" % number] * 7)
        store.put_if_absent(f"versions/{number:02}", b"manifest %d" % number)
        with pytest.raises(AlreadyExists):
            store.put_if_absent(f"versions/{number:02}", b"another trainer's")
    for number in range(0, 40, 4):
        store.delete(f"data/{number:02}")

    left = [number for number in range(40) if number % 4]
    keys = [f"data/{number:02}" for number in left]
    keys += [f"{folder}/{number:02}" for folder in ("streams", "versions") for number in range(40)]
    assert [info.key for info in store.list()] == keys == [info.key for info in memory.list()]
    for number in left:
        assert memory.get(f"data/{number:02}").data == b"%d" % number * 100
    for number in range(40):
        assert memory.get(f"streams/{number:02}").data == b"%d" % number * 7
        assert memory.get(f"versions/{number:02}").data == b"manifest %d" % number
    assert {"drop_before", "drop_after", "duplicate", "truncate_put"} <= set(flaky.injected)


def test_a_broken_listing_goes_on_where_it_broke(memory: ObjectStore) -> None:
    keys = [f"{number:04}" for number in range(500)]
    for key in keys:
        memory.put(key, b"")
    broken = 0
    for seed in range(30):
        flaky = FlakyStore(memory, seed=seed, drop=0.7)
        assert [info.key for info in patient(flaky, attempts=100, total_s=1e9).list()] == keys
        broken += flaky.injected["drop_after"]
    assert broken > 10


def test_a_listing_that_gets_nowhere_ends(memory: ObjectStore) -> None:
    with pytest.raises(StoreUnavailable):
        list(patient(FlakyStore(memory, drop=1.0)).list())
