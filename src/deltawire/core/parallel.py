"""Ordered work on several threads. The numba kernels release the GIL, so threads are all that is needed."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

from . import settings

T = TypeVar("T")
R = TypeVar("R")

REQUESTS = 16
"""Small objects are read this many at a time: all they cost is the round trip."""

WORTH_THREADS = 1 << 16
"""Weights to read, compare or write from which several threads are quicker than one."""


_LOOK_S = 0.5


class Later(Generic[R]):
    """A result that another thread sets. Any number of threads may wait for it.

    A thread may be interrupted at any line of this, and its signal handler may wait for the same: unlike a Future of
    the standard library, it has no lock that an interrupt could leave taken.
    """

    def __init__(self) -> None:
        self._is_done = False
        self._result: R
        self._error: BaseException | None = None
        self._wait = threading.Lock()
        """Taken until it is done."""
        self._wait.acquire()
        self._thread: threading.Thread | None = None

    def begin(self, work: Callable[[], R], name: str) -> None:
        """Do work in a thread of its own and set what it returns or raises, unless such a thread has begun already."""

        def attempt() -> None:
            if threading.current_thread() is self._thread:
                self.attempt(work)

        # one that was interrupted before it began is replaced: should it begin after all, it finds that and ends
        if self._thread is None or self._thread.ident is None:
            self._thread = threading.Thread(target=attempt, name=name, daemon=True)
            self._thread.start()

    def attempt(self, work: Callable[[], R]) -> None:
        """Do the work, and set what it returns or raises."""
        try:
            self.succeed(work())
        except BaseException as error:
            self.fail(error)

    def succeed(self, result: R) -> None:
        self._result = result
        self._end()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        self._is_done = True
        self._wait.release()

    def done(self) -> bool:
        return self._is_done

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done, or so many seconds. Returns whether it is."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._is_done:
            left = _LOOK_S if until is None else min(_LOOK_S, until - time.monotonic())
            if left <= 0:
                return False
            # now and then in any case: one that waits may be interrupted before it passes the lock on
            if self._wait.acquire(timeout=left):
                self._wait.release()
        return True

    def result(self, timeout: float | None = None) -> R:
        """Wait for it and return it, or raise what it failed with. TimeoutError after `timeout` seconds."""
        if not self.wait(timeout):
            raise TimeoutError(f"not done within {timeout} s")
        if self._error is not None:
            raise self._error
        return self._result


class Workers:
    """Threads that do work in the order in which it is handed in; one of them does it one after the other.

    As with `Later`, a thread that hands in work or waits for it may be interrupted at any line. An executor of the
    standard library has locks that could be left taken then, and would wait for ever.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._starting = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._at_work: dict[threading.Thread, Later[None]] = {}
        self.closed = False

    def submit(self, work: Callable[[], R]) -> Later[R]:
        if self.closed:
            raise RuntimeError(f"the threads {self._name} have ended")
        later = Later[R]()
        self._todo.put(partial(later.attempt, work))
        with self._starting:
            # one that was interrupted before it began is replaced: should it begin after all, it finds that and ends
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            if len(self._threads) < self._count:
                # not waited for at the end of the process: nobody waits for its work either
                self._threads.append(threading.Thread(target=self._run, name=self._name, daemon=True))
                self._threads[-1].start()
        return later

    def close(self, *, wait: bool = True) -> None:
        """Drop what has not begun, and wait for what has."""
        self.closed = True
        for _ in range(self._count):
            self._todo.put(None)
        for at_work in [*self._at_work.values()] if wait else ():
            at_work.wait()

    def _run(self) -> None:
        me = threading.current_thread()
        while me in self._threads and (job := self._todo.get()) is not None:
            # before the look: `close` drops this, or waits for it
            self._at_work[me] = done = Later[None]()
            if not self.closed:
                job()
            # its result is not needed while this waits for the next
            del job, self._at_work[me]
            done.succeed(None)


def default_threads() -> int:
    """DELTAWIRE_THREADS, or the cores this process may use."""
    # only Linux tells which cores a process may use
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return settings.count("DELTAWIRE_THREADS", cores)


def threads_for(units: int, threads: int | None = None) -> int:
    """`threads`, or those of this process; one where starting threads takes longer than the work on so few units."""
    return threads or (default_threads() if units >= WORTH_THREADS else 1)


def ordered_map(work: Callable[[T], R], items: Iterable[T], threads: int | None = None) -> Iterator[R]:
    """`map` on several threads: results in order, and never more than one item per thread plus one in memory."""
    threads = threads or default_threads()
    if threads == 1 or (isinstance(items, Sized) and len(items) == 1):
        yield from map(work, items)
        return
    workers = Workers(threads, "deltawire")
    waiting: deque[Later[R]] = deque()
    abandoned = False
    try:
        for item in items:
            waiting.append(workers.submit(partial(work, item)))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except GeneratorExit:
        # perhaps by the garbage collector, in a thread that holds a lock the workers need: waiting could be a deadlock
        abandoned = True
        raise
    finally:
        workers.close(wait=not abandoned)


def for_each(work: Callable[[T], object], items: Iterable[T], threads: int | None = None) -> None:
    """`ordered_map` for work that returns nothing."""
    deque(ordered_map(work, items, threads), maxlen=0)
