"""Summaries of old versions in few requests.

A manifest carries the summaries since the last multiple of 16 (`recent`). When version v = k·16 is committed, a page is
written first that holds the `lowbit(v)` versions before it: 16, 32, 16, 64 … as in a Fenwick tree. Walking
v → v − lowbit(v) → … → 0 covers all history in O(log n) pages, and each version is written O(log n) times in all.
"""

from __future__ import annotations

import msgspec

from .manifest import RECENT, Summary

STRIDE = RECENT

FIRST_REACH = 255
"""Versions before the newest one that are read first."""


class Page(msgspec.Struct, frozen=True):
    run: str
    end: int
    """Covers the versions from end − span(end) up to, not including, end."""
    versions: tuple[Summary, ...]


def recent_start(version: int) -> int:
    """First version that a manifest of `version` must carry in `recent`."""
    return version - version % STRIDE


def needs_page(version: int) -> bool:
    """True if a page must exist before this version is committed."""
    return version > 0 and version % STRIDE == 0


def span(end: int) -> int:
    """How many versions the page ending at `end` covers: the lowest set bit."""
    return end & -end


def pages(version: int, since: int = 0) -> list[int]:
    """The ends of the pages that cover the versions from `since` to `recent_start(version)`, newest first."""
    ends = []
    end = recent_start(version)
    while end > since:
        ends.append(end)
        end -= span(end)
    return ends


def reaches(newest: int, oldest: int = 0) -> list[int]:
    """How far back to read for what is likely to be found near the newest version: sixteen times as far each time.

    Reading again costs a sixteenth more than reading all at once, or saves nearly all of it.
    """
    found, back = [], FIRST_REACH
    # no reading again for a few more
    while newest - 2 * back > oldest:
        found.append(newest - back)
        back *= 16
    return [*found, oldest]
