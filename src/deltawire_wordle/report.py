"""What a demo leaves behind: report.json with everything, report.html with charts, in one file that needs no other."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean, median

import msgspec

from .charts import Points, chart, number
from .demo import Story

SMOOTH = 10
# steps that a point of the solve rate is the mean of


def write(story: Story) -> tuple[Path, Path]:
    """The two files, HTML first."""
    page, data = story.plan.folder / "report.html", story.plan.folder / "report.json"
    data.write_bytes(msgspec.json.format(msgspec.json.encode(story.as_dict()), indent=1))
    page.write_text(html(story), "utf-8")
    return page, data


def summary(story: Story) -> dict[str, float | int | None]:
    """The figures that matter, all from what was recorded; None where there is nothing to measure."""
    steps, deltas = story.steps, [version for version in story.published if version["version"]]
    trained = steps[-1]["seconds"] if steps else 0.0
    pauses = [glimpse.pause_s for glimpses in story.replicas.values() for glimpse in glimpses if glimpse.pause_s]
    lags = [glimpse.lag for glimpses in story.replicas.values() for glimpse in glimpses if glimpse.lag is not None]
    sent = sum(version["bytes"] for version in deltas)
    full = sum(2 * version["elements"] for version in deltas)
    return {
        "solved_before": story.evaluated[0]["solved"] if story.evaluated else None,
        "solved_after": story.evaluated[-1]["solved"] if len(story.evaluated) > 1 else None,
        "steps": len(steps),
        "seconds_training": trained,
        "seconds_in_all": story.seconds,
        "tokens_per_second": sum(step["figures"]["tokens"] for step in steps) / trained if trained else None,
        "versions": len(story.published),
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


def html(story: Story) -> str:
    steps, versions = story.steps, [version for version in story.published if version["version"]]
    rates = smoothed([100 * step["figures"]["solved"] for step in steps])
    solved = [(step["step"], rate) for step, rate in zip(steps, rates, strict=True)]
    marks = [
        (0 if number == 0 else (steps[-1]["step"] if steps else 0), 100 * found["solved"])
        for number, found in enumerate(story.evaluated)
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
        chart("lag, versions", _of_replicas(story, "lag", 1), "seconds"),
        chart("pause of the last sync, ms", _of_replicas(story, "pause_s", 1e3), "seconds"),
        chart("age of samples, steps", {"mean": ages, "oldest": oldest}, "step"),
        chart("tokens whose ratio was clipped, %", {"": clipped}, "step"),
    ]
    figures = "".join(
        f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{number(value)}</td></tr>"
        for name, value in summary(story).items()
    )
    verdict = "".join(f"<li class=bad>{escape(problem)}</li>" for problem in story.problems) or (
        f"<li>{escape(_equal(story))}</li><li>{escape(_verified(story))}</li>"
    )
    remarks = "".join(f"<li>{at:.0f} s: {escape(text)}</li>" for at, text in story.remarks)
    settings = {name: value for name, value in story.as_dict()["plan"].items() if name != "folder"}
    return f"""<!doctype html><html lang=en><meta charset=utf-8><title>deltawire demo</title>
<style>body{{font:15px/1.45 system-ui,sans-serif;max-width:1180px;margin:2em auto;padding:0 1em;color:#111}}
svg{{background:#fafafa;margin:4px}} svg text{{font:11px system-ui,sans-serif;fill:#444}} td{{padding:1px 14px 1px 0}}
td+td{{text-align:right;font-variant-numeric:tabular-nums}} .bad{{color:#b91c1c;font-weight:600}}
code{{font-size:13px}}</style>
<h1>A policy learns Wordle; its weights travel as deltas through a bucket</h1>
<p><code>{escape(story.url)}</code></p><ul>{verdict}</ul><table>{figures}</table>
<div>{"".join(charts)}</div>
{f"<h2>What happened on the way</h2><ul>{remarks}</ul>" if remarks else ""}
<p><code>{escape(str(settings))}</code></p></html>
"""


def _equal(story: Story) -> str:
    version = story.done["version"] if story.done else "?"
    how = ", ".join(f"{name} (by {what})" for name, what in story.equal.items())
    return f"after version {version} bit-identical to the trainer: {how}"


def _verified(story: Story) -> str:
    found = story.verified or {}
    return f"verified: {found.get('versions', 0)} versions, {found.get('proven', 0)} anchors and deltas proven"


def _of_replicas(story: Story, field: str, scale: float) -> dict[str, Points]:
    return {
        name: [(glimpse.at, scale * value) for glimpse in glimpses if (value := getattr(glimpse, field)) is not None]
        for name, glimpses in story.replicas.items()
    }
