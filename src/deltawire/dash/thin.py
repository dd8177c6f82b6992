"""Thin out: many versions as few points, many tensors as few rows. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from ..core.manifest import Summary, main_link
from .document import Columns

POINTS = 1200
"""Points of a chart: more than a screen shows."""

METRICS = 12
"""Metrics with a chart: those that most versions have."""

LARGEST = 1 << 53
"""Integers up to here are exact in JavaScript."""


def columns(found: Sequence[Summary], elements: int) -> Columns:
    """Versions as columns, POINTS at most: in a long run neighbours are merged, as many into each point."""
    each = max(math.ceil(len(found) / POINTS), 1)
    parts = [found[at : at + each] for at in range(0, len(found), each)]
    counted = Counter(name[:40] for summary in found for name in summary.metrics)
    names = [name for name, _ in counted.most_common(METRICS)]
    made = Columns([], [], [], [], [], [], [], [], {name: [] for name in names})
    for part in parts:
        last = part[-1]
        made.version.append(last.version)
        made.count.append(len(part))
        made.at.append(last.created if math.isfinite(last.created) and 1e9 < last.created < 4e9 else None)
        made.bytes.append(_figure(sum(_bytes(s) for s in part) / len(part)))
        made.changed.append(_figure(sum(share(s, elements) for s in part) / len(part)))
        made.anchor.append(sum(any(x.kind != "delta" for x in s.links) for s in part))
        made.skip.append(sum(any(x.kind == "delta" and x.base != s.parent for x in s.links) for s in part))
        made.step.append(last.step if last.step is not None and abs(last.step) < LARGEST else None)
        for name in names:
            values = [s.metrics[name] for s in part if name in s.metrics]
            values = [value for value in values if math.isfinite(value) and abs(value) < 1e300]
            made.metrics[name].append(_figure(sum(values) / len(values)) if values else None)
    return made


def share(summary: Summary, elements: int) -> float:
    """Share of changed weights, 0 to 1."""
    return _figure(min(max(summary.changed / max(elements, 1), 0.0), 1.0))


def _bytes(summary: Summary) -> int:
    return min(max(main_link(summary).bytes, 0), LARGEST) if summary.links else 0


def _figure(value: float) -> float:
    return float(f"{value:.6g}")


# ── tensors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def groups(names: Sequence[str], most: int) -> list[list[str]]:
    """Tensor names in the order of people (layer 2 before layer 10), neighbours together where there are too many."""
    # of very many, nobody reads the order
    ordered = sorted(names, key=_natural if len(names) <= 10_000 else None)
    each = max(math.ceil(len(ordered) / most), 1)
    return [ordered[at : at + each] for at in range(0, len(ordered), each)]


def _natural(name: str) -> list[tuple[int, int, str]]:
    # at most 18 digits at a time: a name is a stranger's
    parts = re.findall(r"[0-9]{1,18}|[^0-9]+", name)
    return [(0, int(part), "") if part[0] in "0123456789" else (1, 0, part) for part in parts]


def merged(changed: Mapping[str, int], sizes: Mapping[str, int], rows: Sequence[Sequence[str]]) -> list[float]:
    """Share of changed weights of each row of tensors, 0 to 1."""
    found = []
    for row in rows:
        size = sum(sizes.get(name, 0) for name in row)
        share = sum(changed.get(name, 0) for name in row) / size if size else 0.0
        found.append(float(f"{min(max(share, 0.0), 1.0):.4g}"))
    return found
