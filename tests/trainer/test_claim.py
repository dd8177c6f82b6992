"""One writer at a time where the store cannot refuse a second one."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core import keys
from deltawire.core.errors import AlreadyExists, ObjectNotFound, PublishFailed, StoreUnavailable, WriterConflict
from deltawire.core.manifest import Writer, dump, parse
from deltawire.store import ObjectStore, Store
from deltawire.trainer import Publisher, claim
from deltawire_wordle.counting import CountingStore
from support import history, verified


class Unconditional(CountingStore):
    """Looks, then puts: as a store without a conditional put does. `between` and `after` happen before and after it."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.creates_exclusively = False
        self.between: Callable[[str], object] = lambda key: None
        self.after: Callable[[str], object] = lambda key: None

    def put_if_absent(self, key: str, data: bytes) -> None:
        try:
            self.inner.head(key)
        except ObjectNotFound:
            self.between(key)
            self.inner.put(key, data)
            self.after(key)
            return
        raise AlreadyExists(key)


@pytest.fixture
def bucket() -> Store:
    return ObjectStore.from_url(f"memory://{uuid.uuid4()}")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "SETTLE_S", 0.05)


def owner(bucket: Store) -> Writer:
    return parse(bucket.get(keys.WRITER).data, Writer, keys.WRITER)


def test_each_publisher_claims_the_run_and_goes_on_after_the_last(bucket: Store) -> None:
    models = history(6)
    for epoch, weights in enumerate(models, 1):
        with Publisher(Unconditional(bucket)) as publisher:
            assert publisher.publish(weights).result(60).version == epoch - 1
        assert owner(bucket).epoch == epoch
    result = verify(Run.open(bucket))
    assert (result.failure, result.versions) == (None, 6)


def test_stores_with_conditional_puts_need_no_claim(bucket: Store) -> None:
    with Publisher(bucket) as publisher:
        publisher.publish(history(1)[0]).result(60)
    with pytest.raises(ObjectNotFound):
        bucket.get(keys.WRITER)


def test_a_trainer_that_was_taken_over_stops(bucket: Store) -> None:
    models = history(5)
    old = Publisher(Unconditional(bucket))
    old.publish(models[0]).result(60)
    new = Publisher(Unconditional(bucket))
    with pytest.raises(WriterConflict, match=r"another trainer took over .*epoch 2; ours is 1"):
        old.publish(models[1]).result(60)
    for _ in range(2):
        with pytest.raises(WriterConflict):
            old.publish(models[1])
    for weights in models[2:]:
        new.publish(weights).result(60)
    new.close()
    result = verify(Run.open(bucket))
    assert (result.failure, result.versions) == (None, 4)
    assert {Run.open(bucket).manifest(v).writer for v in (1, 2, 3)} == {Run.open(bucket).manifest(1).writer}


def test_a_paused_trainer_that_wakes_after_a_takeover_does_no_harm(bucket: Store) -> None:
    """It looked before it was paused, so nothing stops its write; the new one puts back what was there."""
    models = history(6)
    paused, awake = threading.Event(), threading.Event()
    store = Unconditional(bucket)
    old = Publisher(store)
    old.publish(models[0]).result(60)

    def sleep(key: str) -> None:
        paused.set()
        assert awake.wait(60)

    store.between = sleep
    late = old.publish(models[1])
    assert paused.wait(60)
    new = Publisher(Unconditional(bucket))
    new.publish(models[2]).result(60)
    mine = bucket.get(keys.manifest(1)).data
    new.publish(models[3]).result(60)
    awake.set()
    with pytest.raises(WriterConflict):
        late.result(60)
    assert bucket.get(keys.manifest(1)).data != mine
    new.publish(models[4]).result(60)
    assert bucket.get(keys.manifest(1)).data == mine
    new.close()
    result = verify(Run.open(bucket))
    assert (result.failure, result.versions) == (None, 4)


def test_two_trainers_that_start_together(bucket: Store) -> None:
    """Whatever the order of their steps: one of them goes on, or one after the other, and what they published holds."""
    models = history(4)
    winners = 0
    for turn in range(8):
        run = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
        gate = threading.Barrier(2)

        def start(number: int, run: Store = run, gate: threading.Barrier = gate, turn: int = turn) -> bool:
            store = Unconditional(run)
            # they meet between looking for run.json and writing it, and once both have written
            store.between = store.after = lambda key: gate.wait(120) if key == keys.RUN else None
            try:
                with Publisher(store) as publisher:
                    for weights in models if number == turn % 2 else reversed(models):
                        publisher.publish(weights).result(60)
            except (WriterConflict, PublishFailed):
                return False
            return True

        with ThreadPoolExecutor(2) as pool:
            done = list(pool.map(start, range(2)))
        winners += sum(done)
        opened = Run.open(run)
        writers = [opened.manifest(version).writer for version in opened.listed()]
        assert len([*itertools.groupby(writers)]) == len({*writers}), "never in turns"
        if any(done):
            result = verify(opened)
            assert result.failure is None
            assert result.versions >= 4 * sum(done)
    assert winners


def test_a_claim_that_shows_late(bucket: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Unconditional):
        hidden = 3

        def get(self, key: str, *, limit: int | None = None) -> object:
            found = super().get(key, limit=limit)
            if key == keys.WRITER and self.hidden:
                self.hidden -= 1
                raise ObjectNotFound(key)
            return found

    with Publisher(Late(bucket)) as publisher:
        publisher.publish(history(1)[0]).result(60)
    monkeypatch.setattr(claim, "VISIBLE_S", 0.1)
    Late.hidden = 1000
    with pytest.raises(StoreUnavailable, match="does not show"):
        Publisher(Late(bucket))


@pytest.mark.parametrize("content", [b"", b"nonsense", b"{}", b"[1]", bytes(100_000), b'{"epoch":"x"}'])
def test_a_spoilt_claim(bucket: Store, content: bytes) -> None:
    models = history(3)
    publisher = Publisher(Unconditional(bucket))
    publisher.publish(models[0]).result(60)
    bucket.put(keys.WRITER, content)
    with pytest.raises(WriterConflict, match="gone or damaged"):
        publisher.publish(models[1]).result(60)
    with Publisher(Unconditional(bucket)) as again:
        again.publish(models[2]).result(60)
    assert owner(bucket).epoch == 1


def test_a_pruned_first_version_is_not_put_back(bucket: Store) -> None:
    models = history(3)
    with Publisher(Unconditional(bucket), anchor_every=1) as publisher:
        publisher.publish(models[0]).result(60)
        publisher.publish(models[1]).result(60)
        bucket.delete(keys.manifest(0))
        publisher.publish(models[2]).result(60)
    assert not Run.open(bucket).exists(0)


def test_dumped_claims_hold_no_more_than_they_say() -> None:
    assert dump(Writer(3, "00ff", 1.5)) == b'{"epoch":3,"writer":"00ff","at":1.5}'


class Ignoring(CountingStore):
    """Says that it refuses to create what exists, and does not: as servers that do not know the condition."""

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.put(key, data)


def test_a_store_that_ignores_the_condition_is_found_out(bucket: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Both would win every version. The trainer that starts later takes over, as where there is no condition."""
    models = history(6)
    first = Publisher(Ignoring(bucket))
    first.publish(models[0]).result(60)
    assert "creates objects that exist already" in caplog.text
    second = Publisher(Ignoring(bucket))
    second.publish(models[1]).result(60)
    with pytest.raises(WriterConflict):
        first.publish(models[2]).result(60)
    with pytest.raises(WriterConflict):
        first.publish(models[3])
    second.publish(models[4]).result(60)
    second.close()
    assert verified(bucket, [models[0], models[1], models[4]]) == 3


def test_two_that_start_together_where_the_condition_is_ignored(bucket: Store) -> None:
    weights = history(1)[0]
    start = threading.Barrier(2)

    def work(_: int) -> int | None:
        start.wait()
        try:
            with Publisher(Ignoring(bucket)) as publisher:
                return publisher.publish(weights).result(60).version
        except WriterConflict:
            return None

    with ThreadPoolExecutor(2) as pool:
        won = sorted(version for version in pool.map(work, range(2)) if version is not None)
    # one of them; or one after the other, where the second was slow to begin
    assert won in ([0], [0, 1])
    assert verified(bucket, [weights] * len(won)) == len(won)
