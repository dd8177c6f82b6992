"""When a version gets an anchor of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..core import chain
from ..core.errors import MissingBase, VersionNotFound
from ..core.manifest import Summary


@dataclass(frozen=True, slots=True)
class AnchorPolicy:
    every: int | None = None
    """An anchor at the latest every so many versions; 0: anchors and nothing else."""
    ratio: float = 1.0
    """An anchor once catching up from the last one would cost more than this many times its bytes."""

    def wants_delta(self, delta_bytes: int, full_bytes: int, anchor: bool) -> bool:
        """Whether a version gets a delta; `anchor`: it gets an anchor anyway.

        Not where full weights are no larger, nor where nothing else is wanted. Beside an anchor, not where it has more
        than half of its bytes either: it would save readers little, and a dense run would cost more than full weights.
        """
        return self.every != 0 and (2 * delta_bytes <= full_bytes if anchor else delta_bytes < full_bytes)

    def wants_anchor(self, version: int, delta_bytes: int, full_bytes: int, versions: dict[int, Summary]) -> bool:
        """Pure: decided from what was published before and the size of the delta at hand."""
        since = _since_full(versions)
        if not since or (self.every is not None and version - min(since) >= self.every):
            return True
        return replay_bytes(since) + delta_bytes > self.ratio * full_bytes


def _since_full(versions: dict[int, Summary]) -> dict[int, Summary]:
    """The last version that has full weights and those after it; none where none has. A run may be long: looked for
    from the end, so that deciding costs the same at version 100,000 as at version 10. They are in ascending order."""
    found: dict[int, Summary] = {}
    for version in reversed(versions):
        found[version] = versions[version]
        if any(link.kind != "delta" for link in versions[version].links):
            return found
    return {}


def replay_bytes(versions: Mapping[int, Summary]) -> int:
    """What a newcomer must fetch on top of full weights to reach the newest of these versions."""
    try:
        steps = chain.plan(None, max(versions), versions)
    except (MissingBase, VersionNotFound):
        return 1 << 62
    return sum(step.bytes for step in steps if step.kind == "delta")
