"""Which objects to fetch. Pure: it is given what is known of the run and returns steps; the caller does the I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .errors import MissingBase, VersionNotFound
from .manifest import Kind, Summary

REQUEST_COST = 64 << 10
"""What one more object costs, in bytes: a round trip to a bucket is worth about this much transfer."""


@dataclass(frozen=True, slots=True)
class Step:
    """Reach `version` by one of its links."""

    version: int
    kind: Kind
    base: int | None
    bytes: int


def plan(
    have: int | None, want: int, versions: Mapping[int, Summary], *, request_cost: int = REQUEST_COST
) -> list[Step]:
    """The cheapest way from `have` (None: nothing) to `want`, over anchors, references, deltas and skip deltas.

    Links always lead from a lower version to a higher one, so one pass in ascending order finds the best path.
    """
    if have == want:
        return []
    if want not in versions:
        newest = max(versions, default=None)
        raise VersionNotFound(f"the run has no version {want}; the newest is {newest}")
    best: dict[int, tuple[int, Step | None]] = {}
    if have is not None:
        best[have] = (0, None)
    for version in sorted(v for v in versions if v <= want):
        for link in versions[version].links:
            if link.kind == "delta":
                if link.base not in best:
                    continue
                before = best[link.base][0]
            else:
                before = 0
            cost = before + link.bytes + request_cost * max(link.objects, 1)
            if version not in best or cost < best[version][0]:
                best[version] = (cost, Step(version, link.kind, link.base, link.bytes))
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


def needed(want: int, versions: Mapping[int, Summary]) -> set[int]:
    """The versions whose objects the cheapest path from nothing to `want` uses."""
    return {step.version for step in plan(None, want, versions)}
