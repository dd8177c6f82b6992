"""One writer at a time: who may publish to a run, also where the store cannot refuse a second one."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core import keys
from deltawire.core.errors import (
    AlreadyExists,
    Misconfigured,
    NotTheSigner,
    ObjectNotFound,
    PublishFailed,
    RunNotFound,
    StoreUnavailable,
    WriterConflict,
)
from deltawire.core.manifest import Writer, dump, parse
from deltawire.core.signing import SigningKey
from deltawire.store import Fetched, LocalStore, ObjectStore, Store
from deltawire.trainer import Publisher, claim
from deltawire.trainer.claim import Claim
from deltawire_wordle.counting import CountingStore
from support import HookedStore, history, verified
from tests import forks


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
    monkeypatch.setenv("DELTAWIRE_WRITER_RENEWAL", "0.5")


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each publisher as if it was in a process of its own."""
    monkeypatch.setattr(claim, "_of_this_process", lambda mark: None)


def owner(bucket: Store) -> Writer:
    return parse(bucket.get(keys.WRITER).data, Writer, keys.WRITER)


def test_each_publisher_claims_the_run_and_goes_on_after_the_last(bucket: Store) -> None:
    models = history(6)
    for epoch, weights in enumerate(models, 1):
        with Publisher(Unconditional(bucket)) as publisher:
            assert publisher.publish(weights).result(60).version == epoch - 1
            assert (owner(bucket).epoch, owner(bucket).ended) == (epoch, False)
        assert (owner(bucket).epoch, owner(bucket).ended) == (epoch, True)
    result = verify(Run.open(bucket))
    assert (result.failure, result.versions) == (None, 6)


def test_a_trainer_that_was_taken_over_stops(bucket: Store) -> None:
    models = history(5)
    old = Publisher(Unconditional(bucket))
    old.publish(models[0]).result(60)
    new = Publisher(Unconditional(bucket))
    with pytest.raises(WriterConflict, match="a later publisher of this process took over"):
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


@pytest.mark.usefixtures("apart")
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
    new = Publisher(Unconditional(bucket), takeover=True)
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


@pytest.mark.usefixtures("apart")
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
    publisher.publish(models[1]).result(60)
    assert owner(bucket).epoch == 1
    bucket.put(keys.WRITER, content)
    with Publisher(Unconditional(bucket)) as again:
        again.publish(models[2]).result(60)
        assert owner(bucket).epoch == 1
    with pytest.raises(WriterConflict):
        publisher.publish(models[0]).result(60)


def test_a_pruned_first_version_is_not_put_back(bucket: Store) -> None:
    models = history(3)
    with Publisher(Unconditional(bucket), anchor_every=1) as publisher:
        publisher.publish(models[0]).result(60)
        publisher.publish(models[1]).result(60)
        bucket.delete(keys.manifest(0))
        publisher.publish(models[2]).result(60)
    assert not Run.open(bucket).exists(0)


def test_a_written_claim() -> None:
    running = Writer(3, "00ff", "gpu-7", 4121, "train.py", 11_520.5, 10.0)
    assert dump(running) == (
        b'{"epoch":3,"writer":"00ff","host":"gpu-7","pid":4121,"program":"train.py","held_s":11520.5,"renews_s":10.0}'
    )
    assert str(running) == "train.py on gpu-7 (process 4121, for 3 h 12 min)"
    assert str(replace(running, held_s=59.9)) == "train.py on gpu-7 (process 4121, for 59 s)"
    assert str(replace(running, held_s=60.0)) == "train.py on gpu-7 (process 4121, for 1 min)"
    hostile = replace(running, host="\x1b[2Jgpu" + "x" * 200, program="", held_s=1e6)
    assert str(hostile) == f"a program on \N{REPLACEMENT CHARACTER}[2Jgpu{'x' * 73} (process 4121, for 11 d 13 h)"


class Ignoring(CountingStore):
    """Says that it refuses to create what exists, and does not: as servers that do not know the condition."""

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.put(key, data)


@pytest.mark.usefixtures("apart")
def test_a_store_that_ignores_the_condition_is_found_out(bucket: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Both would win every version. Only the claim keeps them apart, as where there is no condition."""
    models = history(6)
    first = Publisher(Ignoring(bucket))
    first.publish(models[0]).result(60)
    assert "creates objects that exist already" in caplog.text
    second = Publisher(Ignoring(bucket), takeover=True)
    second.publish(models[1]).result(60)
    with pytest.raises(WriterConflict):
        first.publish(models[2]).result(60)
    with pytest.raises(WriterConflict):
        first.publish(models[3])
    second.publish(models[4]).result(60)
    second.close()
    assert verified(bucket, [models[0], models[1], models[4]]) == 3


@pytest.mark.usefixtures("apart")
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


# ── another process's ────────────────────────────────────────────────────────────────────────────────────────────────


OTHER = Writer(7, "0123456789abcdef", "gpu-7", 4121, "train.py", 3600.0, 0.2)


@pytest.fixture
def used(bucket: Store) -> Store:
    """A run with a version, whose publisher was closed."""
    with Publisher(bucket) as publisher:
        publisher.publish(history(1)[0]).result(60)
    return bucket


@contextmanager
def running(bucket: Store, writer: Writer = OTHER) -> Iterator[None]:
    """Another publisher's renewals."""
    ended = threading.Event()

    def renew() -> None:
        for number in itertools.count():
            bucket.put(keys.WRITER, dump(replace(writer, held_s=writer.held_s + number)))
            if ended.wait(writer.renews_s):
                return

    bucket.put(keys.WRITER, dump(writer))
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_running_publisher_keeps_the_run(used: Store) -> None:
    with running(used):
        with pytest.raises(WriterConflict, match=r"train\.py on gpu-7 \(process 4121, for 1 h 0 min\).*takeover=True"):
            Publisher(used)
        assert owner(used).writer == OTHER.writer
    assert not [*used.list(keys.CLOCK)]


def test_a_publisher_that_ended_without_closing_is_waited_for(used: Store, caplog: pytest.LogCaptureFixture) -> None:
    used.put(keys.WRITER, dump(OTHER))
    with Publisher(used) as publisher:
        assert publisher.publish(history(2)[1]).result(60).version == 1
        assert owner(used).epoch == 8
    assert "waiting 1 s to see whether that still runs" in caplog.text


def test_a_publisher_that_is_closed_meanwhile(used: Store, caplog: pytest.LogCaptureFixture) -> None:
    # renewed so rarely that only the end can be seen
    slow = replace(OTHER, renews_s=2.0)
    used.put(keys.WRITER, dump(slow))

    class Closing(CountingStore):
        reads = 0

        def get(self, key: str, *, limit: int | None = None) -> Fetched:
            if key == keys.WRITER:
                self.reads += 1
                if self.reads == 2:
                    self.inner.put(key, dump(replace(slow, ended=True)))
            return super().get(key, limit=limit)

    Publisher(Closing(used)).close()
    assert "does not run any more" not in caplog.text
    assert (owner(used).epoch, owner(used).ended) == (8, True)


@pytest.mark.parametrize("age, waits", [(60, True), (3600, False)])
def test_one_that_is_old_by_the_clock_of_the_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, age: float, waits: bool
) -> None:
    """A minute may be an outage of the store; an hour is not."""
    store = LocalStore(tmp_path)
    with Publisher(store) as publisher:
        publisher.publish(history(1)[0]).result(60)
    store.put(keys.WRITER, dump(replace(OTHER, renews_s=30.0 if waits else 10.0)))
    at = (tmp_path / keys.WRITER).stat().st_mtime - age
    os.utime(tmp_path / keys.WRITER, (at, at))
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if waits:
            store.put(keys.WRITER, dump(replace(OTHER, ended=True)))

    right = Claim(sleep=sleep)
    right.take(Run.open(store))
    right.release()
    assert ("waiting" in caplog.text) == waits
    # else a tenth of a renewal, that the new claim stands
    assert slept == ([1.0] if waits else [0.05])


def test_two_that_wait_for_the_same_one(used: Store) -> None:
    """One continues, and the other is told of it."""
    used.put(keys.WRITER, dump(OTHER))
    taken, refused = [], []

    def wait() -> None:
        right = Claim()
        try:
            right.take(Run.open(used))
        except WriterConflict as error:
            refused.append(str(error))
        else:
            taken.append(right)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claim, "_of_this_process", lambda mark: None)
        threads = [threading.Thread(target=wait) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (len(taken), len(refused)) == (1, 1)
    taken[0].check()
    taken[0].release()


@pytest.mark.parametrize("alike", [Unconditional, CountingStore], ids=["unconditional", "exclusive"])
def test_a_publisher_that_lost_the_run_and_renews_late(used: Store, alike: Callable[[Store], Store]) -> None:
    """It looked before it was paused. What it writes over the claim is put back, and not taken for a takeover."""
    models = history(4)
    used.put(keys.WRITER, dump(OTHER))
    with Publisher(alike(used), takeover=True) as publisher:
        for renewed in range(3):
            used.put(keys.WRITER, dump(replace(OTHER, held_s=4000.0 + renewed)))
            publisher.publish(models[1 + renewed]).result(60)
            assert owner(used).epoch == 8
        used.delete(keys.WRITER)
        until(lambda: [*used.list(keys.WRITER)])
    assert owner(used).ended


def test_one_that_renews_while_it_is_taken_over(used: Store) -> None:
    used.put(keys.WRITER, dump(OTHER))
    renewed: list[float] = []

    def sleep(seconds: float) -> None:
        if len(renewed) < 3:
            renewed.append(seconds)
            used.put(keys.WRITER, dump(replace(OTHER, held_s=4000.0 + len(renewed))))

    right = Claim(takeover=True, sleep=sleep)
    right.take(Run.open(used))
    assert (owner(used).epoch, len(renewed)) == (8, 3)
    right.release()


@pytest.mark.usefixtures("apart")
def test_a_publisher_that_is_taken_over_between_two_publishes_says_so(
    bucket: Store, caplog: pytest.LogCaptureFixture
) -> None:
    models = history(3)
    old = Publisher(bucket)
    old.publish(models[0]).result(60)
    with Publisher(bucket, takeover=True) as new:
        new.publish(models[1]).result(60)
        until(lambda: "another trainer took over" in caplog.text)
        with pytest.raises(WriterConflict, match="another trainer took over memory"):
            old.publish(models[2]).result(60)
        with pytest.raises(WriterConflict):
            old.close()
        assert not owner(bucket).ended
    assert verified(bucket, models[:2]) == 2


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("sign", [None, SigningKey.generate()])
def test_a_publisher_that_may_not_sign_replaces_nobody(bucket: Store, sign: SigningKey | None) -> None:
    models, key = history(3), SigningKey.generate()
    with Publisher(bucket, sign=key) as old:
        old.publish(models[0]).result(60)
        with pytest.raises(NotTheSigner):
            Publisher(bucket, sign=sign, takeover=True)
        old.publish(models[2]).result(60)
    assert Run.open(bucket, trust=(key.public,)).newest() == 1


# ── renewals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def renewals(bucket: Store, count: int) -> None:
    """Wait for some."""
    for _ in range(count):
        before = bucket.get(keys.WRITER).data
        until(lambda before=before: bucket.get(keys.WRITER).data != before)


def test_it_is_renewed_while_nothing_is_published(bucket: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAWIRE_WRITER_RENEWAL", "0.05")
    with Publisher(bucket) as publisher:
        assert not [*bucket.list()], "there is no run yet"
        publisher.publish(history(1)[0]).result(60)
        mine = owner(bucket)
        renewals(bucket, 3)
        assert replace(owner(bucket), held_s=mine.held_s) == mine
        assert owner(bucket).held_s > mine.held_s


def test_a_store_that_fails_for_a_while(
    bucket: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing can be renewed. Afterwards the publisher goes on, and says nothing more."""
    monkeypatch.setenv("DELTAWIRE_WRITER_RENEWAL", "0.05")
    down, asked = threading.Event(), []

    def hook(when: str, verb: str, key: str) -> None:
        if down.is_set() and key == keys.WRITER:
            asked.append(verb)
            raise StoreUnavailable("the store is down")

    models = history(2)
    with Publisher(HookedStore(bucket, hook)) as publisher:
        publisher.publish(models[0]).result(60)
        down.set()
        until(lambda: len(asked) > 3)
        down.clear()
        renewals(bucket, 2)
        publisher.publish(models[1]).result(60)
    assert caplog.text.count("cannot renew") == 1
    assert owner(bucket).ended


def test_a_store_that_fails_while_the_claim_is_released(bucket: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    down = threading.Event()

    def hook(when: str, verb: str, key: str) -> None:
        if down.is_set():
            raise StoreUnavailable("the store is down")

    publisher = Publisher(HookedStore(bucket, hook))
    publisher.publish(history(1)[0]).result(60)
    down.set()
    publisher.close()
    assert not owner(bucket).ended


def test_an_outage_does_not_count_as_silence(used: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store answers nobody, the other one cannot renew."""
    clock = [0.0]
    monkeypatch.setattr(claim.time, "monotonic", lambda: clock[0])
    used.put(keys.WRITER, dump(OTHER))
    slept: list[float] = []

    class Slow(CountingStore):
        def get(self, key: str, *, limit: int | None = None) -> Fetched:
            if len(slept) == 2:
                # it answers again after an hour
                clock[0] += 3600
            if len(slept) == 3:
                self.inner.put(key, dump(replace(OTHER, held_s=7200.0)))
            return super().get(key, limit=limit)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    with pytest.raises(WriterConflict):
        Claim(sleep=sleep).take(Run.open(Slow(used)))
    assert len(slept) == 3


# ── this process ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_later_publisher_of_this_process_replaces_the_earlier_one(
    bucket: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a cell of a notebook is run again."""
    models = history(3)
    first = Publisher(bucket)
    first.publish(models[0]).result(60)
    second = Publisher(bucket)
    second.publish(models[1]).result(60)
    assert "waiting" not in caplog.text
    for _ in range(2):
        with pytest.raises(WriterConflict, match="a later publisher of this process"):
            first.publish(models[2]).result(60)
    second.close()
    assert verified(bucket, models[:2]) == 2


def test_a_publisher_that_nobody_has_any_more_has_ended(bucket: Store) -> None:
    publisher = Publisher(bucket)
    publisher.publish(history(1)[0]).result(60)
    assert not owner(bucket).ended
    del publisher
    gc.collect()
    until(lambda: owner(bucket).ended)


def test_a_program_that_ends_without_closing_has_ended(tmp_path: Path) -> None:
    code = (
        "import sys, numpy, deltawire as dw\n"
        "publisher = dw.Publisher(sys.argv[1])\n"
        "publisher.publish({'x': numpy.zeros(8, 'u2')}).result()\n"
        "raise SystemExit(3)"
    )
    ended = forks.run([sys.executable, "-c", code, str(tmp_path)], timeout=120)
    assert ended.returncode == 3, ended.stderr
    assert owner(LocalStore(tmp_path)).ended


def test_a_forked_process_does_not_end_it(tmp_path: Path) -> None:
    code = (
        "import gc, os, sys, numpy, deltawire as dw\n"
        "publisher = dw.Publisher(sys.argv[1])\n"
        "publisher.publish({'x': numpy.zeros(8, 'u2')}).result()\n"
        "if not (child := os.fork()):\n"
        "    try:\n"
        "        dw.Publisher(sys.argv[1])\n"
        "    except dw.errors.WriterConflict as error:\n"
        "        print(error, flush=True)\n"
        "    del publisher\n"
        "    gc.collect()\n"
        "    sys.exit(4)\n"
        "print(os.waitpid(child, 0)[1] >> 8, b'ended' in open(sys.argv[1] + '/writer.json', 'rb').read())"
    )
    environment = {**os.environ, "DELTAWIRE_WRITER_RENEWAL": "1"}
    ended = forks.run([sys.executable, "-c", code, str(tmp_path)], timeout=120, env=environment)
    assert ended.stdout.splitlines()[0].startswith(f"{tmp_path.as_uri()} is being written by")
    assert ended.stdout.splitlines()[1:] == ["4 False"], ended.stderr


def test_one_that_cannot_be_opened_gives_the_run_back(used: Store, tmp_path: Path) -> None:
    with pytest.raises(NotTheSigner):
        Publisher(used, sign=SigningKey.generate())
    assert owner(used).ended


@pytest.mark.parametrize("text", ["0", "-1", "61", "soon", "nan"])
def test_a_wrong_interval(used: Store, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAWIRE_WRITER_RENEWAL", text)
    with pytest.raises(Misconfigured, match="DELTAWIRE_WRITER_RENEWAL"):
        Publisher(used)


def test_a_deleted_run_stays_deleted(bucket: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal does not put anything there."""
    monkeypatch.setenv("DELTAWIRE_WRITER_RENEWAL", "0.05")
    publisher = Publisher(bucket)
    publisher.publish(history(1)[0]).result(60)
    for item in [*bucket.list()]:
        bucket.delete(item.key)
    thread = publisher._pipeline._claim._thread
    assert thread is not None
    thread.join(60)
    assert not [*bucket.list()]
    with pytest.raises(RunNotFound):
        publisher.publish(history(2)[1]).result(60)
    assert not [*bucket.list(keys.WRITER)]
