"""The document behind the page: everything it shows, as JSON. `deltawire dash RUN --json` prints it.

What comes from a bucket is untrusted: numbers are finite and times plausible here, or None, and text has a limit.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

import deltawire as dw

from ..fleet import LARGEST, Member

POINTS = 1200
"""Points of a chart: more than a screen shows."""

METRICS = 12
"""Metrics with a chart: those that most versions have."""


class Totals(msgspec.Struct):
    """Sums over all versions that the bucket lists."""

    versions: int = 0
    deltas: int = 0
    anchors: int = 0
    skips: int = 0
    """Deltas that span more than one version."""
    delta_bytes: int = 0
    """Bytes of the deltas from one version to the next."""
    stored_bytes: int = 0
    """Bytes of all links: deltas, skip deltas, anchors."""
    changed_share: float | None = None
    """Mean share of weights that a version changes, 0 to 1."""


class Columns(msgspec.Struct):
    """Versions by column. In a long run one entry stands for several versions: their means, and their last number."""

    version: list[int]
    count: list[int]
    """Number of versions that an entry stands for."""
    at: list[float | None]
    """When it was published, by the trainer's clock; seconds since the epoch."""
    bytes: list[float]
    """Mean bytes that a follower fetches per version."""
    changed: list[float]
    """Mean share of changed weights, 0 to 1."""
    anchor: list[int]
    """Number of versions that have full weights."""
    skip: list[int]
    step: list[int | None]
    metrics: dict[str, list[float | None]]
    """Means of the metrics that were given to `publish`."""


class PageLink(msgspec.Struct):
    kind: str
    base: int | None
    bytes: int
    encoding: str
    why: str


class Version(msgspec.Struct):
    """A version in detail."""

    version: int
    parent: int | None
    at: float | None
    step: int | None
    changed: float
    """Share of changed weights, 0 to 1."""
    links: list[PageLink]
    metrics: dict[str, float]
    tags: list[str]
    proven: int
    """Number of replicas known to have recomputed its digest from their live weights."""


class Heat(msgspec.Struct):
    """Share of changed weights per tensor and version, from the headers of deltas."""

    tensors: list[str]
    versions: list[int]
    shares: list[list[float]]
    """One list per version, one entry per tensor."""
    grouped: int
    """Number of tensors of the model, where neighbours were merged into one entry; else 0."""


class Steps(msgspec.Struct):
    """How far the weights of one version moved."""

    version: int | None
    rows: list[tuple[str, int, int]]
    """Step size in ulps, number of weights that moved up, and down."""
    note: str
    """Why there is nothing to show; empty if there is."""


class Trainer(msgspec.Struct):
    """Seconds by phase of a version's publication, from its manifest."""

    version: int
    at: float | None
    phases: dict[str, float]


class Headline(msgspec.Struct):
    """The figures that come first."""

    smaller: float | None = None
    """How many times smaller the deltas are than full weights for the same versions."""
    saved_bytes: int = 0
    """Bytes that one follower of every version does not fetch."""
    current: int = 0
    """Number of replicas that serve the newest version."""
    following: int = 0
    """Number of replicas that are not silent; where all are, their number."""
    slowest: str = ""
    """The replica that is furthest behind; where all are current, the one with the longest syncs."""
    slowest_lag: int = 0
    slowest_sync_s: float | None = None
    """Its median sync, in seconds."""
    pause_s: float | None = None
    """The longest pause of a sync, first loads aside."""
    pause_replica: str = ""
    pause_version: int | None = None
    arrival_s: float | None = None
    """Median seconds from a version's publication to its proof in a replica; clocks of two machines are compared."""
    failures: int = 0
    """Number of failed syncs in the heartbeats."""


class Document(msgspec.Struct):
    """A run at one moment."""

    url: str
    looked: float
    """When the bucket was looked at; seconds since the epoch."""
    problem: str = ""
    """Why there is nothing newer, or nothing at all; empty if all is well."""
    run: str = ""
    model: str = ""
    created: float | None = None
    tensors: int = 0
    elements: int = 0
    full_bytes: int = 0
    """Bytes of the full weights."""
    newest: int | None = None
    headline: Headline = msgspec.field(default_factory=Headline)
    totals: Totals = msgspec.field(default_factory=Totals)
    versions: Columns | None = None
    recent: list[Version] = []
    """The newest versions in detail, oldest first."""
    tags: dict[str, int] = {}
    replicas: list[Member] = []
    trainer: list[Trainer] = []
    heat: Heat | None = None
    steps: Steps | None = None
    notes: list[str] = []
    """A note about what was left out, for people."""


def encode(document: Any) -> bytes:
    return msgspec.json.encode(document)


# ── many versions as few points, many tensors as few rows ────────────────────────────────────────────────────────────


def columns(found: Sequence[dw.Summary], elements: int) -> Columns:
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


def share(summary: dw.Summary, elements: int) -> float:
    """Share of changed weights, 0 to 1."""
    return _figure(min(max(summary.changed / max(elements, 1), 0.0), 1.0))


def _bytes(summary: dw.Summary) -> int:
    return min(max(summary.main.bytes, 0), LARGEST) if summary.links else 0


def _figure(value: float) -> float:
    return float(f"{value:.6g}")


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
