"""Ordered work on several threads. The numba kernels release the GIL, so threads are all that is needed."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def default_threads() -> int:
    """DELTAWIRE_THREADS, or the cores this process may use."""
    configured = os.environ.get("DELTAWIRE_THREADS")
    if configured:
        return max(1, int(configured))
    # only Linux tells which cores a process may use
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(work: Callable[[T], R], items: Iterable[T], threads: int | None = None) -> Iterator[R]:
    """`map` on several threads: results in order, and never more than one item per thread plus one in memory."""
    threads = threads or default_threads()
    if threads == 1:
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
        # perhaps by the garbage collector, in a thread that holds a lock the workers need: to wait could be for ever
        abandoned = True
        raise
    finally:
        for future in waiting:
            future.cancel()
        pool.shutdown(wait=not abandoned)
