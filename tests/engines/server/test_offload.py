"""Slow functions run in threads, with deadlines."""

from __future__ import annotations

import asyncio
import threading

import pytest

from deltawire.engines.server.offload import Offload


def test_results_and_errors_come_back() -> None:
    offload = Offload(2)

    def fail() -> None:
        raise ValueError("no")

    async def use() -> None:
        assert await offload.run(60, lambda: 7) == 7
        with pytest.raises(ValueError, match="no"):
            await offload.run(60, fail)

    asyncio.run(use())
    offload.close()


def test_what_takes_too_long_is_given_up_and_what_waits_for_it_never_starts() -> None:
    offload, release, started = Offload(1), threading.Event(), []
    holds = threading.Event()

    def hold() -> None:
        holds.set()
        release.wait(120)

    async def use() -> None:
        # again where its thread was not even started in time
        while not holds.is_set():
            with pytest.raises(asyncio.TimeoutError):
                await offload.run(0.01, hold)
        with pytest.raises(asyncio.TimeoutError):
            await offload.run(0.01, lambda: started.append(1))
        release.set()
        assert await offload.run(60, lambda: "next") == "next"

    asyncio.run(use())
    assert started == []
    offload.close()
