"""Ordered work on several threads. The numba kernels release the GIL, so threads are all that is needed."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

WORTH_THREADS = 1 << 16
"""Weights to read, compare or write from which several threads are quicker than one."""


def default_threads() -> int:
    """DELTAWIRE_THREADS, or the cores this process may use."""
    configured = os.environ.get("DELTAWIRE_THREADS")
    if configured:
        return max(1, int(configured))
    # only Linux tells which cores a process may use
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for(units: int, threads: int | None = None) -> int:
    """`threads`, or those of this process; one where starting threads takes longer than the work on so few units."""
    return threads or (default_threads() if units >= WORTH_THREADS else 1)


def ordered_map(work: Callable[[T], R], items: Iterable[T], threads: int | None = None) -> Iterator[R]:
    """`map` on several threads: results in order, and never more than one item per thread plus one in memory."""
    threads = threads or default_threads()
    if threads == 1 or (isinstance(items, Sized) and len(items) == 1):
        yield from map(work, items)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="deltawire")
    waiting: deque[Future[R]] = deque()
    abandoned = False
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except GeneratorExit:
        # perhaps by the garbage collector, in a thread that holds a lock the workers need: waiting could be a deadlock
        abandoned = True
        raise
    finally:
        for future in waiting:
            future.cancel()
        pool.shutdown(wait=not abandoned)


def for_each(work: Callable[[T], object], items: Iterable[T], threads: int | None = None) -> None:
    """`ordered_map` for work that returns nothing."""
    deque(ordered_map(work, items, threads), maxlen=0)
