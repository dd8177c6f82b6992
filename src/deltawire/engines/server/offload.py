"""Run slow functions in threads, outside the event loop, with deadlines."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Offload:
    """A thread pool that does not keep the process from ending: its threads are daemons, unlike concurrent.futures'."""

    def __init__(self, threads: int) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    async def run(self, seconds: float, function: Callable[[], T]) -> T:
        """Return the result of a function. asyncio.TimeoutError after `seconds`, including the wait for a thread."""
        future: Future[T] = Future()
        self._jobs.put((future, function))
        return await asyncio.wait_for(asyncio.wrap_future(future), seconds)

    def close(self) -> None:
        """End the threads that have nothing to do; does not wait for the others."""
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            # False if the caller has stopped waiting
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)
            del job, future, function
