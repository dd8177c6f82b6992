"""`ordered_map`: order, bounds, no waiting for work that nobody wants; and an interrupt leaves nothing taken."""

from __future__ import annotations

import os
import threading

import pytest

from deltawire.core import parallel
from deltawire.core.parallel import WORTH_THREADS, Later, Workers, default_threads, ordered_map, threads_for
from interrupting import Interrupted, raising_at_each_line


def test_where_a_system_does_not_tell_which_cores_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.delenv("DELTAWIRE_THREADS", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert default_threads() == os.cpu_count()


@pytest.mark.parametrize("threads", [1, 3])
def test_results_come_in_order(threads: int) -> None:
    assert list(ordered_map(lambda n: n * n, range(50), threads)) == [n * n for n in range(50)]


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_comes_in_its_place(threads: int) -> None:
    results = ordered_map(lambda n: 10 // (5 - n), range(10), threads)
    assert [next(results) for _ in range(5)] == [2, 2, 3, 5, 10]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_little_work_stays_in_this_thread() -> None:
    assert threads_for(WORTH_THREADS - 1) == 1
    assert threads_for(WORTH_THREADS) == default_threads()
    assert threads_for(1, threads=3) == 3, "what is asked for counts"
    here = threading.get_ident()
    assert list(ordered_map(lambda _: threading.get_ident(), [0], 3)) == [here]
    assert here not in ordered_map(lambda _: threading.get_ident(), [0, 1], 3)


def test_a_map_dropped_half_way_does_not_wait_for_its_workers() -> None:
    """It may be dropped by the garbage collector, in a thread that holds what the workers wait for."""
    release, started = threading.Event(), threading.Event()

    def work(n: int) -> int:
        if n:
            started.set()
            release.wait(120)
        return n

    results = ordered_map(work, range(3), 2)
    assert next(results) == 0
    assert started.wait(120)
    results.close()  # type: ignore[attr-defined]
    assert not release.is_set()
    release.set()


def test_a_result_that_is_there_later() -> None:
    later = Later[int]()
    assert not later.done()
    assert not later.wait(0)
    with pytest.raises(TimeoutError):
        later.result(0.001)
    threads = [threading.Thread(target=later.result) for _ in range(3)]
    for thread in threads:
        thread.start()
    later.succeed(7)
    for thread in threads:
        thread.join(120)
    assert later.done()
    assert later.result() == 7
    failed = Later[int]()
    failed.attempt(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failed.result()


def test_work_that_is_begun_once() -> None:
    later, begun = Later[int](), []
    for _ in range(2):
        later.begin(lambda: begun.append(1) or 5, "test")
        assert later.result(120) == 5
    assert begun == [1]


def test_workers_keep_the_order_and_end() -> None:
    workers, done = Workers(1, "test"), []
    for number in range(50):
        last = workers.submit(lambda number=number: done.append(number))
    last.result(120)
    assert done == [*range(50)]
    workers.close()
    with pytest.raises(RuntimeError, match="have ended"):
        workers.submit(list)


def test_who_waits_may_be_interrupted_at_every_line() -> None:
    """All others get their results, nothing is done twice, and nothing waits for ever."""

    def operation(interrupted: Interrupted) -> None:
        interrupted(lambda: list(ordered_map(lambda n: n * n, range(9), 3)))
        assert list(ordered_map(lambda n: n * n, range(9), 3)) == [n * n for n in range(9)]
        workers, done = Workers(1, "test"), []
        for number in range(3):
            interrupted(lambda number=number: workers.submit(lambda: done.append(number)).result(120))
        workers.submit(lambda: done.append(3)).result(120)
        assert done == sorted(set(done))
        assert done[-1] == 3
        interrupted(workers.close)
        workers.close()
        later = Later[int]()
        interrupted(lambda: later.begin(lambda: 5, "test"))
        later.begin(lambda: 5, "test")
        interrupted(later.result)
        assert later.result(120) == 5

    assert len(raising_at_each_line([parallel], operation)) > 50
