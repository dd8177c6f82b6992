"""One publisher in the hands of several threads."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core import keys
from deltawire.core.errors import OutOfStep, PublisherClosed, PublishFailed
from deltawire.models import ModelView
from deltawire.replica import Replica
from deltawire.store import ObjectStore, Store
from deltawire.trainer import Publisher, background
from deltawire.trainer.pending import PendingVersion
from support import HookedStore, Model, blank, held, history, model, replayed, same, trained

WAIT = 120


@pytest.fixture
def store() -> Store:
    return ObjectStore.from_url(f"memory://{uuid.uuid4()}")


class Slow:
    """Weights that are read only once the test says so."""

    def __init__(self, weights: Model) -> None:
        self._view = ModelView(weights)
        self.schema = self._view.schema
        self.reached, self.go = threading.Event(), threading.Event()

    def region(self, region: Any) -> Any:
        self.reached.set()
        assert self.go.wait(WAIT), "nobody let it go on"
        return self._view.region(region)


def in_thread(work: Callable[[], Any]) -> Any:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("threads", [2, 8])
def test_every_version_is_what_one_of_the_threads_published(store: Store, threads: int, wait: bool) -> None:
    """Each thread trains a copy of its own; the last publish, when they are done, is the newest version."""
    first = model()
    published: list[list[Model]] = [[] for _ in range(threads)]
    with Publisher(store) as publisher:

        def work(thread: int) -> list[int]:
            weights, handles = first, []
            for step in range(48 // threads):
                weights = trained(weights, 1000 * thread + step)
                published[thread].append(weights)
                handles.append(publisher.publish(weights, wait=wait))
            return [handle.result(WAIT).version for handle in handles]

        with ThreadPoolExecutor(threads) as pool:
            versions = list(pool.map(work, range(threads)))
        last = trained(first, 99)
        newest = publisher.publish(last, wait=True).result(0).version
    assert all(ascending == sorted(ascending) for ascending in versions)
    assert Run.open(store).newest() == newest
    assert verify(Run.open(store)).ok
    known = [weights for steps in published for weights in steps]
    for version, state in replayed(store):
        weights = held(state, last)
        assert any(same(weights, one) for one in ([last] if version == newest else known))


def test_close_lets_a_publish_end_and_refuses_the_next(store: Store) -> None:
    first, second = history(2)
    publisher = Publisher(store)
    publisher.publish(first).result(WAIT)
    slow = Slow(second)
    publishing = in_thread(lambda: publisher.publish(slow))
    assert slow.reached.wait(WAIT)
    with pytest.raises(TimeoutError, match="another thread"):
        publisher.close(0.01)
    closing = in_thread(publisher.close)
    slow.go.set()
    assert publishing.result(WAIT).result(WAIT).version == 1
    closing.result(WAIT)
    with pytest.raises(PublisherClosed):
        publisher.publish(first)


def test_close_with_a_timeout_ends_between_the_publishes_of_a_thread_that_goes_on(store: Store) -> None:
    first, second = history(2)
    publisher, refused = Publisher(store), list[str]()
    publisher.publish(first).result(WAIT)
    several = threading.Event()

    def go_on() -> None:
        with pytest.raises(PublisherClosed) as found:
            while True:
                publisher.publish(second)
                several.set()
        refused.append(str(found.value))

    training = in_thread(go_on)
    assert several.wait(WAIT)
    publisher.close(WAIT)
    training.result(WAIT)
    assert refused
    assert Run.open(store).newest() == 1 or verify(Run.open(store)).ok


@pytest.mark.parametrize("fails", [False, True])
def test_what_ends_the_publishing_stays_whatever_becomes_of_the_version_in_flight(fails: bool) -> None:
    """Of several ranks one would publish on, and wait for the others, which have ended."""
    reached, go, left = threading.Event(), threading.Event(), []

    def write(pending: Any) -> Any:
        reached.set()
        assert go.wait(WAIT)
        if fails:
            raise PublishFailed("no room")

    at_work = background.Background(write, "here", lambda: left.append(True))
    pending: Any = PendingVersion(None, {}, None, None)
    at_work.submit(pending, lambda *_: None)
    assert reached.wait(WAIT)
    at_work.give_up(OutOfStep("ranks publish different steps together"))
    go.set()
    with suppress(PublishFailed):
        pending.handles[0].result(WAIT)
    for call in (at_work.check, at_work.flush, at_work.close):
        with pytest.raises(OutOfStep):
            call()
    assert not left


def test_a_fork_refuses_what_only_the_first_process_can_do(store: Store) -> None:
    """The thread that publishes is not there any more: what waits for it would wait for ever."""
    first, second = history(2)
    with Publisher(store) as publisher:
        publisher.publish(first).result(WAIT)
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (publisher.flush, publisher.close, lambda: publisher.publish(second)):
                try:
                    call()
                except PublishFailed as error:
                    refused += "forked" in str(error)
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert publisher.publish(second).result(WAIT).version == 1


def publish_anew(folder: str) -> None:
    with Publisher(folder) as publisher:
        publisher.publish(model(rows=4096), wait=True)


def test_a_fork_publishes_and_follows_with_objects_of_its_own(tmp_path: Path) -> None:
    """Threads that hash are those of one process: a fork that waited for its parent's would wait for ever."""
    publish_anew(str(tmp_path / "first"))
    child = multiprocessing.get_context("fork").Process(target=publish_anew, args=[str(tmp_path / "second")])
    child.start()
    child.join(WAIT)
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0


ENDS = """
import numpy as np, sys, time
from deltawire import Publisher
from deltawire.store import LocalStore

class Slow(LocalStore):
    def put_if_absent(self, key, data):
        if key.startswith("versions/"):
            time.sleep(3600)
        super().put_if_absent(key, data)

class Trainer:
    def __init__(self, store):
        self.publisher, self.weights = Publisher(store), {"w": np.zeros(9, np.float32)}

    def __del__(self):
        self.publisher.publish(self.weights, wait=True)

run, how = sys.argv[1:]
if how == "finalizer":
    trainer = Trainer(run)
    trainer.itself = trainer
else:
    Publisher(Slow(run)).publish({"w": np.zeros(9, np.float32)})
"""


@pytest.mark.parametrize(
    ("how", "said"), [("finalizer", "PublishFailed: the program has ended"), ("unfinished", "is not in file:")]
)
def test_a_program_that_ends_says_what_is_lost_and_waits_for_no_thread(how: str, said: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS, str(tmp_path / "run"), how]
    found = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=True)
    assert said in " ".join(found.stderr.split())


class Gates:
    """Holds the commits of some versions until the test lets them through."""

    def __init__(self, *versions: int) -> None:
        self.reached = {keys.manifest(version): threading.Event() for version in versions}
        self.open = {keys.manifest(version): threading.Event() for version in versions}

    def __call__(self, moment: str, verb: str, key: str) -> None:
        if (moment, verb) == ("before", "put_if_absent") and key in self.reached:
            self.reached[key].set()
            assert self.open[key].wait(WAIT), "nobody opened the gate"


def test_a_close_that_ran_out_of_time_can_be_repeated(store: Store) -> None:
    first, second = history(2)
    gates = Gates(1)
    publisher = Publisher(HookedStore(store, gates))
    publisher.publish(first).result(WAIT)
    last = publisher.publish(second)
    with pytest.raises(TimeoutError, match="not taken everything"):
        publisher.close(0.01)
    with pytest.raises(PublisherClosed):
        publisher.publish(first)
    closing = in_thread(publisher.close)
    gates.open[keys.manifest(1)].set()
    closing.result(WAIT)
    assert last.done()
    assert Run.open(store).newest() == 1


def test_a_version_that_waits_is_written_while_another_thread_captures_the_next(store: Store) -> None:
    versions, gates = history(4), Gates(1)
    with Publisher(HookedStore(store, gates)) as publisher:
        publisher.publish(versions[0]).result(WAIT)
        in_flight = publisher.publish(versions[1])
        assert gates.reached[keys.manifest(1)].wait(WAIT)
        waiting = publisher.publish(versions[2])
        slow = Slow(versions[3])
        publishing = in_thread(lambda: publisher.publish(slow))
        assert slow.reached.wait(WAIT)
        gates.open[keys.manifest(1)].set()
        in_flight.result(WAIT)
        publisher.flush(WAIT)
        assert waiting.result(0).version == 2
        slow.go.set()
        assert publishing.result(WAIT).result(WAIT).version == 3


def test_flush_returns_while_others_go_on_publishing(store: Store) -> None:
    """It waits for what was published before it, not until nobody publishes any more."""
    versions, gates = history(3), Gates(1, 2)
    with Publisher(HookedStore(store, gates)) as publisher:
        publisher.publish(versions[0]).result(WAIT)
        publisher.publish(versions[1])
        assert gates.reached[keys.manifest(1)].wait(WAIT)
        waits = threading.Event()
        flushing = in_thread(lambda: publisher._pipeline.background.flush(WAIT, waits.set))
        assert waits.wait(WAIT)
        last = publisher.publish(versions[2])
        gates.open[keys.manifest(1)].set()
        flushing.result(WAIT)
        assert not last.done()
        gates.open[keys.manifest(2)].set()


def test_the_thread_that_publishes_cannot_wait_for_itself(store: Store) -> None:
    """As a callback would that is called when a version is committed."""
    first, second = history(2)
    refused: list[str] = []

    def hook(moment: str, verb: str, key: str) -> None:
        if (moment, key) == ("after", keys.manifest(0)):
            for call in (publisher.flush, publisher.close, lambda: publisher.publish(second)):
                with pytest.raises(PublishFailed, match="would wait for itself"):
                    call()
                refused.append(key)

    with Publisher(HookedStore(store, hook)) as publisher:
        publisher.publish(first).result(WAIT)
        assert publisher.publish(second).result(WAIT).version == 1
    assert len(refused) == 3


def test_ranks_that_publish_together_refuse_a_second_thread(store: Store) -> None:
    class Together:
        """Stands in for what publishes with the other ranks."""

        version, together, is_open = None, True, True

        def __init__(self) -> None:
            self.reached, self.go = threading.Event(), threading.Event()
            self.background = self

        def publish(self, *_: Any) -> None:
            self.reached.set()
            assert self.go.wait(WAIT)

        def close(self, *_: Any) -> None:
            pass

        def refuse_own_thread(self) -> None:
            pass

    class Turn:
        """The publisher's lock, which tells when a thread finds it taken."""

        def __init__(self) -> None:
            self._lock, self.was_taken = threading.RLock(), threading.Event()

        def __enter__(self) -> None:
            if not self._lock.acquire(blocking=False):
                self.was_taken.set()
                self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    publisher = Publisher(store)
    publisher._turn = turn = Turn()  # type: ignore[assignment]
    publisher._pipeline = together = Together()  # type: ignore[assignment]
    publishing = in_thread(lambda: publisher.publish(blank(model())))
    assert together.reached.wait(WAIT)
    second = in_thread(lambda: publisher.publish(blank(model())))
    assert turn.was_taken.wait(WAIT)
    together.go.set()
    with pytest.raises(OutOfStep, match="two threads of a rank"):
        second.result(WAIT)
    publishing.result(WAIT)


def test_a_failure_between_reading_and_forgetting_the_last_one_is_raised() -> None:
    """The thread fails while another one is asking for failures: it must not forget what it has not seen."""
    writing, asked = threading.Event(), threading.Event()

    class Asked(deque[BaseException]):
        def __iter__(self) -> Iterator[BaseException]:
            found = [*super().__iter__()]
            if threading.current_thread() is threading.main_thread() and not asked.is_set():
                asked.set()
                # the thread can only fail in this time if nothing keeps it out
                threading.Event().wait(0.2)
            return iter(found)

    def fails(_: PendingVersion) -> Any:
        writing.set()
        assert asked.wait(WAIT)
        raise OSError("upload failed")

    thread = background.Background(fails, "memory://x")
    thread._failures = Asked(maxlen=1)
    thread.submit(PendingVersion(1, {}, None, None), lambda *_: None)
    assert writing.wait(WAIT)
    with pytest.raises(PublishFailed, match="upload failed"):
        thread.check()
        thread.flush()
    thread.close()


def test_what_an_interrupted_publish_has_captured_goes_with_the_next(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between the capture and its thread: the snapshot has moved on, so its changes must not be lost."""
    first, second, third = history(3)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with Publisher(store) as publisher:
        publisher.publish(first).result(WAIT)
        with monkeypatch.context() as patched:
            patched.setattr(background.Background, "submit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                publisher.publish(second)
        assert publisher.publish(third).result(WAIT).version == 1
    live = blank(first)
    assert Replica(store, heartbeat=0).sync(live) == 1
    assert same(live, third)
    assert verify(Run.open(store)).ok
