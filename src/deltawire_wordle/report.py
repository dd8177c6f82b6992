"""The report of a demo: report.json with everything, report.html with charts in one self-contained file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean, median

import msgspec

from .charts import Points, chart, number
from .demo import DemoRecord

SMOOTH = 10
"""Steps that each point of the solve rate is the mean of."""


def write(record: DemoRecord) -> tuple[Path, Path]:
    """Write the two files; returns their paths, HTML first."""
    page, data = record.plan.folder / "report.html", record.plan.folder / "report.json"
    data.write_bytes(msgspec.json.format(msgspec.json.encode(record.as_dict()), indent=1))
    page.write_text(html(record), "utf-8")
    return page, data


def summary(record: DemoRecord) -> dict[str, float | int | None]:
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


def smoothed(values: Sequence[float], over: int = SMOOTH) -> list[float]:
    """The mean of each value and those just before it."""
    return [fmean(values[max(0, at - over + 1) : at + 1]) for at in range(len(values))]


def html(record: DemoRecord) -> str:
    steps, versions = record.steps, [version for version in record.published if version["version"]]
    rates = smoothed([100 * step["figures"]["solved"] for step in steps])
    solved = [(step["step"], rate) for step, rate in zip(steps, rates, strict=True)]
    marks = [
        (0 if number == 0 else (steps[-1]["step"] if steps else 0), 100 * found["solved"])
        for number, found in enumerate(record.evaluated)
    ]
    speed = [(step["seconds"], step["step"]) for step in steps]
    changed = [(version["version"], 100 * version["changed"] / version["elements"]) for version in versions]
    sent = [(version["version"], version["bytes"] / 1e3) for version in versions]
    full = [(version["version"], 2 * version["elements"] / 1e3) for version in versions]
    ages = [(step["step"], step["staleness"]) for step in steps]
    oldest = [(step["step"], step["stalest"]) for step in steps]
    clipped = [(step["step"], 100 * step["figures"]["clipped"]) for step in steps]
    charts = [
        chart("games solved while training, %", {"mean of 10 steps": solved}, "step", marks=marks, top=100),
        chart("steps", {"": speed}, "seconds of training"),
        chart("weights changed, %", {"": changed}, "version"),
        chart("kB per version", {"sent": sent, "full weights": full}, "version"),
        chart("lag, versions", _of_replicas(record, "lag", 1), "seconds"),
        chart("pause of the last sync, ms", _of_replicas(record, "pause_s", 1e3), "seconds"),
        chart("age of samples, steps", {"mean": ages, "oldest": oldest}, "step"),
        chart("tokens whose ratio was clipped, %", {"": clipped}, "step"),
    ]
    figures = "".join(
        f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{number(value)}</td></tr>"
        for name, value in summary(record).items()
    )
    verdict = "".join(f"<li class=bad>{escape(problem)}</li>" for problem in record.problems) or (
        f"<li>{escape(_equal(record))}</li><li>{escape(_verified(record))}</li>"
    )
    remarks = "".join(f"<li>{at:.0f} s: {escape(text)}</li>" for at, text in record.remarks)
    settings = {name: value for name, value in record.as_dict()["plan"].items() if name != "folder"}
    return f"""<!doctype html><html lang=en><meta charset=utf-8><title>deltawire demo</title>
<style>body{{font:15px/1.45 system-ui,sans-serif;max-width:1180px;margin:2em auto;padding:0 1em;color:#111}}
svg{{background:#fafafa;margin:4px}} svg text{{font:11px system-ui,sans-serif;fill:#444}} td{{padding:1px 14px 1px 0}}
td+td{{text-align:right;font-variant-numeric:tabular-nums}} .bad{{color:#b91c1c;font-weight:600}}
code{{font-size:13px}}</style>
<h1>A policy learns Wordle; its weights travel as deltas through a bucket</h1>
<p><code>{escape(record.url)}</code></p><ul>{verdict}</ul><table>{figures}</table>
<div>{"".join(charts)}</div>
{f"<h2>What happened on the way</h2><ul>{remarks}</ul>" if remarks else ""}
<p><code>{escape(str(settings))}</code></p></html>
"""


def _equal(record: DemoRecord) -> str:
    version = record.done["version"] if record.done else "?"
    how = ", ".join(f"{name} (by {what})" for name, what in record.equal.items())
    return f"after version {version} bit-identical to the trainer: {how}"


def _verified(record: DemoRecord) -> str:
    found = record.verified or {}
    return f"verified: {found.get('versions', 0)} versions, {found.get('proven', 0)} anchors and deltas proven"


def _of_replicas(record: DemoRecord, field: str, scale: float) -> dict[str, Points]:
    return {
        name: [(status.at, scale * value) for status in statuses if (value := getattr(status, field)) is not None]
        for name, statuses in record.replicas.items()
    }
