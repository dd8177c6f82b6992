"""Kernels beside a model that is being served: in short launches, with breaks between them.

A device finishes what it has begun, whatever stream asks for it. One launch over all weights of a large model would
hold up every kernel of the model for as long as it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from .plan import Launch

TURN = 2048
"""Tiles of one launch of the slowest kernel, which looks for ranks: 128 M weights, 1.3 ms (H200)."""

REST = 3.0
"""Breaks are so many times as long as the launches before them took."""

LONGEST_REST_S = 0.003

_wait: ContextVar[Callable[[], object] | None] = ContextVar("_wait", default=None)


@contextmanager
def gently(wait: Callable[[], object]) -> Iterator[None]:
    """Leave the device to others most of the time. `wait` returns when all that this thread launched is done."""
    token = _wait.set(wait)
    try:
        yield
    finally:
        _wait.reset(token)


def in_turns(launch: Launch, speed: int) -> Iterator[Launch]:
    """The parts of a launch, one after the other; the launch itself where nobody asked for breaks.

    `speed`: how many times as fast as the slowest kernel it takes a tile.
    """
    wait = _wait.get()
    if wait is None:
        yield launch
        return
    for first in range(0, launch.count, speed * TURN):
        began = time.perf_counter()
        tiles = launch.tiles[first : first + speed * TURN]
        yield replace(launch, tiles=tiles, count=len(tiles))
        wait()
        time.sleep(min(REST * (time.perf_counter() - began), LONGEST_REST_S))
