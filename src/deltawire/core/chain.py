"""Which objects to fetch. Pure: it is given what is known of the run and returns steps; the caller does the I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .errors import MissingBase, VersionNotFound
from .manifest import Kind, Summary

REQUEST_COST = 64 << 10
"""Cost of one more object, in bytes: about what is transferred during a round trip to a bucket."""


@dataclass(frozen=True, slots=True)
class Step:
    """Reach `version` by one of its links."""

    version: int
    kind: Kind
    base: int | None
    bytes: int


def plan(have: int | None, want: int, versions: Mapping[int, Summary]) -> list[Step]:
    """The cheapest way from `have` (None: nothing) to `want`, over anchors, references, deltas and skip deltas."""
    if have == want:
        return []
    if want not in versions:
        newest = max(versions, default=None)
        raise VersionNotFound(f"the run has no version {want}; the newest is {newest}")
    best = _cheapest(have, {v: s for v, s in versions.items() if v <= want})
    if want not in best:
        bases = sorted({link.base for link in versions[want].links if link.base is not None})
        raise MissingBase(
            f"version {want} needs {' or '.join(map(str, bases)) or 'an anchor'}, this replica has "
            f"{'nothing' if have is None else have}, and no anchor leads there"
        )
    steps: list[Step] = []
    at: int | None = want
    while at is not None and (step := best[at][1]) is not None:
        steps.append(step)
        at = step.base
    return steps[::-1]


MAX_PLANS = 64
"""Paths that are tried to one version. Each that fails costs a plan, and what was fetched for it."""


def needed(wants: Iterable[int], versions: Mapping[int, Summary]) -> set[int]:
    """The versions whose objects are on the cheapest paths from nothing to `wants`, those included."""
    best = _cheapest(None, versions)
    found: set[int] = set()
    for want in wants:
        if want not in best:
            plan(None, want, versions)  # raises, with the reason
        at: int | None = want
        while at is not None and at not in found:
            found.add(at)
            step = best[at][1]
            at = step.base if step else None
    return found


def reachable(versions: Mapping[int, Summary]) -> set[int]:
    """The versions that can be reached without any weights to start from."""
    return set(_cheapest(None, versions))


def _cheapest(have: int | None, versions: Mapping[int, Summary]) -> dict[int, tuple[int, Step | None]]:
    """Map each reachable version to the cost of reaching it and the last step on the way.

    Links always lead from a lower version to a higher one, so one pass in ascending order finds every best path.
    """
    best: dict[int, tuple[int, Step | None]] = {}
    if have is not None:
        best[have] = (0, None)
    for version in sorted(versions):
        for link in versions[version].links:
            base: int | None
            if link.kind == "delta":
                # summaries are untrusted: a link from itself or from later would lead round in circles
                if link.base is None or link.base >= version or link.base not in best:
                    continue
                before, base = best[link.base][0], link.base
            else:
                # full weights start from nothing, whatever base a summary gives them
                before, base = 0, None
            cost = before + max(link.bytes, 0) + REQUEST_COST * max(link.objects, 1)
            if version not in best or cost < best[version][0]:
                best[version] = (cost, Step(version, link.kind, base, link.bytes))
    return best
