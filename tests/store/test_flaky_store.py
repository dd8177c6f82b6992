from __future__ import annotations

import contextlib
import threading
import uuid
from collections import Counter
from collections.abc import Callable

import pytest

from deltawire.core.errors import DeltawireError, ObjectNotFound, StoreUnavailable, TruncatedFile
from deltawire.store import ObjectStore
from flaky_store import FlakyStore

EVERYTHING = {
    "drop": 0.2, "delay": 0.2, "truncate_read": 0.2, "truncate_put": 0.2, "duplicate": 0.2, "reorder": 0.3,
}  # fmt: skip


@pytest.fixture
def memory() -> ObjectStore:
    return ObjectStore.from_url(f"memory://{uuid.uuid4()}")


def some_calls(flaky: FlakyStore, number: int) -> list[Callable[[], object]]:
    key, data = f"k/{number % 7}", b"%d" % number * 50
    return [
        lambda: flaky.put(key, data),
        lambda: flaky.get(key).data,
        lambda: flaky.put(key, lambda: [data, data]),
        lambda: flaky.get_range(key, 10, 20),
        lambda: flaky.head(key).size,
        lambda: flaky.put_if_absent(f"once/{number}", data),
        lambda: [info.key for info in flaky.list("k/")],
        lambda: flaky.delete(f"once/{max(0, number - 3)}"),
    ]


def diary(seed: int, **faults: float) -> tuple[list[object], Counter[str], dict[str, bytes]]:
    """Everything a caller can observe of a fixed sequence of calls."""
    inner = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
    seen: list[object] = []
    flaky = FlakyStore(inner, seed=seed, sleep=seen.append, **faults)
    for number in range(60):
        for call in some_calls(flaky, number):
            try:
                seen.append(call())
            except DeltawireError as error:
                seen.append(type(error))
    flaky.settle()
    return seen, flaky.injected, {info.key: inner.get(info.key).data for info in inner.list()}


def test_the_same_seed_does_the_same() -> None:
    assert diary(7, **EVERYTHING) == diary(7, **EVERYTHING)
    assert diary(7, **EVERYTHING) != diary(8, **EVERYTHING)


def test_every_fault_is_counted() -> None:
    _, injected, _ = diary(1, **EVERYTHING)
    assert set(injected) == {
        "delay", "drop_after", "drop_before", "duplicate", "reorder", "truncate_put", "truncate_read",
    }  # fmt: skip
    assert min(injected.values()) >= 5


def test_no_rates_no_faults() -> None:
    seen, injected, _ = diary(1)
    assert not injected
    assert not any(isinstance(item, type) for item in seen)


@pytest.mark.parametrize("fault", EVERYTHING)
def test_one_rate_one_fault(fault: str) -> None:
    _, injected, _ = diary(1, **{fault: 0.5})
    assert injected
    assert all(name.startswith(fault) for name in injected)


def test_rates_are_rates(memory: ObjectStore) -> None:
    flaky = FlakyStore(memory, drop=0.25)
    memory.put("key", b"x")
    for _ in range(2000):
        with contextlib.suppress(StoreUnavailable):
            flaky.get("key")
    assert 400 < flaky.injected["drop_before"] + flaky.injected["drop_after"] < 600
    assert 150 < flaky.injected["drop_before"] < 350


def test_threads_share_the_fate_of_the_key_not_of_the_moment(memory: ObjectStore) -> None:
    def fates(order: list[int]) -> dict[int, list[bool]]:
        flaky = FlakyStore(memory, seed=5, drop=0.5)
        found: dict[int, list[bool]] = {number: [] for number in order}

        def work(number: int) -> None:
            for _ in range(20):
                try:
                    flaky.put(f"{number}", b"x")
                    found[number].append(True)
                except StoreUnavailable:
                    found[number].append(False)

        threads = [threading.Thread(target=work, args=(number,)) for number in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    assert fates([0, 1, 2, 3]) == fates([3, 1, 0, 2])


def test_a_drop_is_before_or_after_the_effect(memory: ObjectStore) -> None:
    flaky = FlakyStore(memory, drop=1.0)
    for number in range(50):
        with pytest.raises(StoreUnavailable):
            flaky.put(f"{number}", b"x")
    assert len(list(memory.list())) == flaky.injected["drop_after"]
    assert 0 < flaky.injected["drop_after"] < 50


def test_a_truncated_read(memory: ObjectStore) -> None:
    data = bytes(range(256))
    memory.put("key", data)
    memory.put("empty", b"")
    flaky = FlakyStore(memory, truncate_read=1.0)
    for fetched in (flaky.get("key"), flaky.get_if_changed("key", None)):
        assert fetched is not None
        assert len(fetched.data) < 256
        assert data.startswith(fetched.data)
        assert fetched.etag == memory.get("key").etag
    with pytest.raises(TruncatedFile):
        flaky.get_range("key", 0, 256)
    assert flaky.get("empty").data == b""


def test_a_truncated_put_leaves_nothing(memory: ObjectStore) -> None:
    pulled = 0

    def chunks():
        nonlocal pulled
        for _ in range(100):
            pulled += 1
            yield b"x"

    memory.put("old", b"old")
    flaky = FlakyStore(memory, truncate_put=1.0)
    for key in ("old", "new"):
        for put, data in ((flaky.put, b"x"), (flaky.put, chunks)):
            with pytest.raises(StoreUnavailable):
                put(key, data)
    with pytest.raises(StoreUnavailable):
        flaky.put_if_absent("new", b"x")
    assert 0 < pulled < 100
    assert [info.key for info in memory.list()] == ["old"]
    assert memory.get("old").data == b"old"


def test_late_puts_show_up_out_of_order() -> None:
    orders = set()
    for seed in range(20):
        inner = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
        flaky = FlakyStore(inner, seed=seed, reorder=0.5)
        appeared: list[str] = []
        flaky.put("first", b"1")
        flaky.put("second", b"2")
        for _ in range(6):
            appeared += [info.key for info in flaky.list() if info.key not in appeared]
        orders.add(tuple(appeared))
    assert orders == {("first", "second"), ("second", "first")}


def test_a_late_put_takes_further_calls_or_settling(memory: ObjectStore) -> None:
    flaky = FlakyStore(memory, reorder=1.0, max_late=3)
    flaky.put("key", lambda: [b"la", b"te"])
    waited = 0
    while True:
        try:
            assert flaky.get("key").data == b"late"
            break
        except ObjectNotFound:
            waited += 1
    assert 1 <= waited <= 3
    flaky.put("key", b"later")
    assert flaky.get("key").data == b"late"
    flaky.settle()
    assert flaky.get("key").data == b"later"


def test_the_puts_of_one_key_keep_their_order(memory: ObjectStore) -> None:
    flaky = FlakyStore(memory, seed=2, reorder=0.5, max_late=10)
    for number in range(100):
        flaky.put("key", b"%03d" % number)
        if number % 10 == 9:
            flaky.settle()
            assert memory.get("key").data == b"%03d" % number
    flaky.put("gone", b"x")
    flaky.delete("gone")
    flaky.settle()
    assert [info.key for info in memory.list()] == ["key"]


def test_a_late_put_shows_before_the_next_of_its_key(memory: ObjectStore) -> None:
    flaky = FlakyStore(memory, reorder=1.0)
    flaky.put("key", b"1")
    flaky.put("key", b"2")
    assert memory.get("key").data == b"1"


def test_a_late_put_still_blocks_a_create(memory: ObjectStore) -> None:
    flaky = FlakyStore(memory, reorder=1.0)
    flaky.put("key", b"x")
    with pytest.raises(DeltawireError):
        flaky.put_if_absent("key", b"y")
