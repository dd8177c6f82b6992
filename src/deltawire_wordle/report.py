"""The figures of a demo, and report.json with everything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from .demo import DemoRecord

SMOOTH = 10
"""Steps that each point of the solve rate is the mean of."""


def write(record: DemoRecord) -> Path:
    """Write report.json into the folder of the demo; returns its path."""
    data = record.plan.folder / "report.json"
    data.write_bytes(msgspec.json.format(msgspec.json.encode(record.as_dict()), indent=1))
    return data


def summary(record: DemoRecord) -> dict[str, float | int | str | None]:
    """The main figures; None where nothing was measured."""
    steps, deltas = record.steps, [version for version in record.published if version["version"]]
    trained = steps[-1]["seconds"] if steps else 0.0
    pauses = [status.pause_s for statuses in record.replicas.values() for status in statuses if status.pause_s]
    lags = [status.lag for statuses in record.replicas.values() for status in statuses if status.lag is not None]
    sent = sum(version["bytes"] for version in deltas)
    full = sum(2 * version["elements"] for version in deltas)
    return {
        "solved_before": record.evaluated[0]["solved"] if record.evaluated else None,
        "solved_after": record.evaluated[-1]["solved"] if len(record.evaluated) > 1 else None,
        "steps": len(steps),
        "seconds_training": trained,
        "ended_by": record.done["ended_by"] if record.done else None,
        "seconds_in_all": record.seconds,
        "tokens_per_second": sum(step["figures"]["tokens"] for step in steps) / trained if trained else None,
        "versions": len(record.published),
        "changed_percent": 100 * fmean(v["changed"] / v["elements"] for v in deltas) if deltas else None,
        "bytes_sent": sent,
        "bytes_full": full,
        "staleness_mean": fmean(step["staleness"] for step in steps) if steps else None,
        "staleness_max": max((step["stalest"] for step in steps), default=None),
        "groups_dropped": sum(step["dropped"] for step in steps),
        "clipped_percent": 100 * fmean(step["figures"]["clipped"] for step in steps) if steps else None,
        "pause_ms_median": 1e3 * median(pauses) if pauses else None,
        "pause_ms_max": 1e3 * max(pauses) if pauses else None,
        "lag_mean": fmean(lags) if lags else None,
    }


def larger(record: DemoRecord) -> dict[str, Any] | None:
    """The figures of act two; None where it was not played to its end. Seconds are medians over its versions."""
    found = record.larger
    if not found.versions or found.full is None or found.encodings is None:
        return None
    versions, weights = found.versions, found.model["weights"]
    bytes_sent = median(version["bytes"] for version in versions)
    return {
        **{name: found.model[name] for name in ("weights", "full_bytes", "rate", "link_mbit_s")},
        "changed_percent": 100 * median(version["changed"] for version in versions) / weights,
        "bytes": bytes_sent,
        "smaller": found.model["full_bytes"] / bytes_sent,
        "bits_per_change": {name: 8 * one["bytes"] / versions[-1]["changed"] for name, one in found.encodings.items()},
        "phases": {name: median(version["phases"][name] for version in versions) for name in versions[0]["phases"]},
        "seconds": median(version["seconds"] for version in versions),
        "seconds_full": found.full["seconds"],
        "phases_full": found.full["phases"],
    }


def smoothed(values: Sequence[float], over: int = SMOOTH) -> list[float]:
    """The mean of each value and those just before it."""
    return [fmean(values[max(0, at - over + 1) : at + 1]) for at in range(len(values))]
