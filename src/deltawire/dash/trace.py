"""Syncs as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: a track for the trainer and one per replica."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .document import Document

TRAINER, REPLICAS = 1, 2
"""Process ids of the two groups of tracks."""

PHASES = ("fetch", "verify", "decode", "stage", "stop", "apply", "prove", "audit")
"""Phases of a sync in their order; `pause` is the time of others and no phase of its own."""


def trace(document: Document) -> dict[str, Any]:
    """Return the trace, in the JSON format of Chrome's trace events; times in microseconds."""
    return {"traceEvents": [*_trainer(document), *_replicas(document)], "displayTimeUnit": "ms"}


def _trainer(document: Document) -> Iterator[dict[str, Any]]:
    yield _name("process_name", TRAINER, 0, "trainer")
    yield _name("thread_name", TRAINER, 1, "versions")
    timed = {found.version: found for found in document.trainer}
    for version in document.recent:
        if version.at is None:
            continue
        phases = timed[version.version].phases if version.version in timed else {}
        spent = [(name, phases[name]) for name in ("encode", "put") if name in phases]
        about = {"changed share": version.changed, "bytes": version.links[0].bytes if version.links else 0}
        yield from _slices(TRAINER, 1, f"v{version.version}", version.at, sum(s for _, s in spent), spent, about)


def _replicas(document: Document) -> Iterator[dict[str, Any]]:
    yield _name("process_name", REPLICAS, 0, "replicas")
    for track, replica in enumerate(document.replicas, 1):
        yield _name("thread_name", REPLICAS, track, replica.replica)
        for sync in replica.syncs:
            spent = [(name, sync.phases[name]) for name in PHASES if name in sync.phases]
            name = f"v{sync.version} failed" if sync.error else f"v{sync.version}"
            about = {"bytes": sync.bytes, "previous": sync.previous, "error": sync.error, "pause ms": 1e3 * sync.pause}
            yield from _slices(REPLICAS, track, name, sync.at, sync.seconds, spent, about)


def _slices(
    process: int, track: int, name: str, end: float, seconds: float, phases: Sequence[tuple[str, float]], about: Any
) -> Iterator[dict[str, Any]]:
    """A slice and, inside it, its phases one after the other, the last one at its end."""
    yield _slice(process, track, name, end - seconds, seconds, about)
    at = max(end - sum(spent for _, spent in phases), end - seconds)
    for phase, spent in phases:
        spent = min(spent, end - at)
        if spent > 0:
            yield _slice(process, track, phase, at, spent, {})
            at += spent


def _slice(process: int, track: int, name: str, start: float, seconds: float, about: Any) -> dict[str, Any]:
    times = {"ts": round(1e6 * start), "dur": max(round(1e6 * seconds), 1)}
    return {"ph": "X", "pid": process, "tid": track, "name": name, "cat": "sync", **times, "args": about}


def _name(what: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": track, "name": what, "args": {"name": name}}
