"""Work that takes long, out of the event loop: a few threads, and a deadline for each piece of work."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class Offload:
    """Daemon threads: a thread cannot be ended, but must not keep the process from ending either.

    A function gets, as its first argument, a question to ask now and then: whether nobody waits for it any more.
    """

    def __init__(self, threads: int) -> None:
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    async def run(self, seconds: float, function: Callable[..., T], *args: Any) -> T:
        """What it returns or raises; asyncio.TimeoutError where that takes longer, the wait for a thread included."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put((loop, future, function, args))
        return await asyncio.wait_for(future, seconds)

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            loop, future, function, args = job
            if future.cancelled():
                continue
            result, error = None, None
            try:
                result = function(future.cancelled, *args)
            except Exception as raised:
                error = raised
            # a loop that is gone has nobody who waits either
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, future, result, error)
            del job, args, result, error, future


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
