"""`ordered_map`: order, bounds, and no waiting for work that nobody wants any more."""

from __future__ import annotations

import os
import threading

import pytest

from deltawire.core.parallel import WORTH_THREADS, default_threads, ordered_map, threads_for


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
