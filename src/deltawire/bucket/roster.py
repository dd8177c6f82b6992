"""Which heartbeats to read, and those of a large fleet in one object, which a keeper writes (keeper/roster.py).

A heartbeat is an object of its own, so that replicas need no agreement; ten thousand of them are ten thousand requests.
`roster.json` is a hint: whoever reads it believes no more of it than of the heartbeats themselves, and without one that
is fresh reads those.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

from ..store import ObjectInfo

RENEWED_S = 60.0
"""Age up to which a heartbeat that is known is read before others."""

STORE_SKEW_S = 300.0
"""Seconds by which a store's clock may be ahead of this machine's."""

FRESH_S = 60.0
"""Age up to which a roster is used: a keeper writes one every ten seconds."""


def latest_heartbeats(items: Iterable[ObjectInfo], limit: int, known: Sequence[str] = ()) -> list[ObjectInfo]:
    """Choose which heartbeats to read, by the store's time of each: anybody may write any number of them.

        chosen = dw.latest_heartbeats(run.heartbeat_objects(), 1000)
        for item, beat in run.heartbeats(chosen):
            ...

    The latest come first. Up to half are ones that are `known` (keys, the first of them first) and were written within
    a minute, so that they are found however many new ones there are. A time in the future counts as the oldest: files
    can be given one.
    """
    clock = time.time()

    def age(item: ObjectInfo) -> tuple[float, float]:
        seconds = clock - item.modified
        return (seconds if seconds > -STORE_SKEW_S else math.inf), -item.modified

    ordered = sorted(items, key=age)
    renewed = {item.key: item for item in ordered if age(item)[0] < RENEWED_S}
    first = [renewed[key] for key in known if key in renewed][: limit // 2]
    kept = {item.key for item in first}
    return [*first, *(item for item in ordered if item.key not in kept)][:limit]


def is_fresh(modified: float) -> bool:
    """Whether a roster that was written then, by the store's clock, is still of use."""
    return -STORE_SKEW_S < time.time() - modified < FRESH_S
