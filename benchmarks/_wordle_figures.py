"""What the arms of wordle_gpu.py have written down: as figures, as tables of docs/wordle-gpu.md, on a terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any

from _charts import chart

SOLVED = 0.9
"""The least reward of a game that was solved (_wordle_arm.py)."""
WINDOW = 256
"""Games that a share of solved ones is taken of while training goes on."""
BIN_S = 10.0
"""Seconds between two points of a curve."""


class Lines:
    """The JSON lines of a file that have been written so far."""

    def __init__(self, file: Path) -> None:
        self._file, self._read = file, 0
        self.all: list[dict[str, Any]] = []
        if file.exists() and not file.read_bytes().endswith(b"\n"):
            # cut off; what is added must not become a part of it
            with open(file, "ab") as out:
                out.write(b"\n")

    def more(self) -> list[dict[str, Any]]:
        """Those that are new."""
        if not self._file.exists():
            return []
        with open(self._file, "rb") as file:
            file.seek(self._read)
            *whole, _ = file.read().split(b"\n")
        self._read += sum(len(line) + 1 for line in whole)
        found = []
        for line in whole:
            # a process that was killed may have left half of one
            with suppress(ValueError):
                found.append(json.loads(line))
        found = [line for line in found if isinstance(line, dict)]
        self.all += found
        return found

    def add(self, **line: Any) -> None:
        """Whole, or not at all: more than one process may write."""
        with open(self._file, "ab") as out:
            out.write(json.dumps(line).encode() + b"\n")
        self.more()


class Notes:
    """The folder of an arm: what its trainer and its driver have written down, in this call and earlier ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.steps, self.games, self.versions, self.served, self.events = (
            Lines(folder / f"{name}.jsonl") for name in ("steps", "games", "versions", "served", "events")
        )
        for lines in (self.steps, self.games, self.versions, self.served, self.events):
            lines.more()
        if len(self.of("began")) > len(self.of("ended")):
            # the call that began was cut off
            self.note("ended", at=max(line["at"] for line in [*self.events.all, *self.steps.all, *self.games.all]))

    def note(self, event: str, **more: Any) -> None:
        self.events.add(**{"event": event, "at": time.time(), **more})

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.events.all if line["event"] == event]


def spans(arm: Notes) -> list[tuple[float, float]]:
    """When it trained: from the opening of the gate to the end, once for each call."""
    found: list[tuple[float, float]] = []
    begin = None
    for line in arm.events.all:
        if line["event"] == "began":
            begin = line["at"]
        if line["event"] == "ended" and begin is not None:
            found.append((begin, line["at"]))
            begin = None
    return [*found, (begin, time.time())] if begin is not None else found


def trained_s(at: float, when: Sequence[tuple[float, float]]) -> float:
    """Seconds of training until a moment."""
    return sum(max(0.0, min(at, end) - begin) for begin, end in when)


def syncs(arm: Notes) -> list[dict[str, Any]]:
    """For each version that was served: seconds from its capture in the trainer until then, and the server's own."""
    published = {line["version"]: line for line in arm.versions.all}
    found, before = [], -1
    for line in arm.served.all:
        made = published.get(line["version"])
        # not what a server that was started again goes through
        if made and line["version"] > before >= 0:
            upload = sum(made["timings"].get(part, 0.0) for part in ("detect", "encode", "put"))
            found.append({
                "at": line["at"], "version": line["version"], "seconds": line["at"] - made["created"] + upload,
                "pause_ms": 1e3 * line["timings"].get("pause", 0.0), "server_s": line["timings"].get("total", 0.0),
            })  # fmt: skip
        before = max(before, line["version"])
    return found


def figures(arm: Notes) -> dict[str, Any]:
    when = spans(arm)
    seconds = sum(end - begin for begin, end in when)
    # the first sync is before the first step, and changes nothing
    sent = [line for line in arm.versions.all if line["version"] and line["changed"]]
    steps = max((line["step"] for line in arm.steps.all), default=0)
    followed = syncs(arm)
    played = arm.of("played")
    stale = [game["stale"] for game in arm.games.all]
    full = sent[0]["full"] if sent else None
    late = sent[len(sent) // 2 :]
    bytes_per_step = sum(line["bytes"] for line in sent) / steps if steps else None
    later = sum(line["bytes"] for line in late) / max(1, steps - (late[0]["step"] or 1) + 1) if late else None
    solved = [game["reward"] >= SOLVED for game in arm.games.all]

    def of_steps(name: str) -> float | None:
        values = [line[name] for line in arm.steps.all if isinstance(line.get(name), (int, float))]
        return median(values) if values else None

    return {
        "solved_first": next((line["solved"] for line in played if line["when"] == "before"), None),
        "solved_last": next((line["solved"] for line in reversed(played) if line["when"] == "after"), None),
        "steps": steps,
        "seconds": round(seconds, 1),
        "bytes_per_step": bytes_per_step,
        "bytes_per_step_later_half": later,
        "full_bytes": full,
        "share_of_full": bytes_per_step / full if full and bytes_per_step else None,
        "changed_later_half": fmean(line["changed"] / line["elements"] for line in late) if late else None,
        "steps_per_hour": 3600 * steps / seconds if seconds else None,
        "versions": len(sent),
        "served": len(followed),
        "anchors": sum("anchor" in line["kinds"] for line in sent),
        "sync_s": _spread([sync["seconds"] for sync in followed]),
        "server_s": _spread([sync["server_s"] for sync in followed]),
        "pause_ms": _spread([sync["pause_ms"] for sync in followed]),
        "put_s": _spread([line["timings"].get("put", 0.0) for line in sent]),
        "trainer_held_s": of_steps("perf/weight_sync_s"),
        "guard": arm.served.all[-1]["guard"] if arm.served.all else None,
        "games": len(solved),
        "solved_in_training_first": fmean(solved[:WINDOW]) if solved else None,
        "solved_in_training_last": fmean(solved[-WINDOW:]) if solved else None,
        "staleness_mean": fmean(stale) if stale else None,
        "staleness_max": max(stale, default=None),
        "generated_tokens_per_s": of_steps("rollout/generated_tok_s"),
        "step_s": of_steps("perf/step_s"),
        "rollout_wait_s": of_steps("perf/rollout_wait_s"),
        "evaluations": [{key: line[key] for key in ("when", "solved", "reward", "games", "versions")}
                        for line in played],
        "restarts": [line["what"] for line in arm.of("restart")],
        "curve": curve(arm, when, followed),
    }  # fmt: skip


def curve(arm: Notes, when: Sequence[tuple[float, float]], followed: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A point for each ten seconds of training."""
    timed = partial(trained_s, when=when)
    bins: dict[int, dict[str, list[Any]]] = {}
    for kind, lines in (("games", arm.games.all), ("steps", arm.steps.all), ("syncs", followed)):
        for line in lines:
            bins.setdefault(int(timed(line["at"]) / BIN_S), {"games": [], "steps": [], "syncs": []})[kind].append(line)
    points, step = [], 0
    for number in sorted(bins):
        games, steps, synced = (bins[number][kind] for kind in ("games", "steps", "syncs"))
        step = max([step, *(line["step"] for line in steps)])
        if not games:
            continue
        points.append({
            "seconds": (number + 1) * BIN_S, "step": step, "games": len(games),
            "solved": round(fmean(game["reward"] >= SOLVED for game in games), 4),
            "reward": round(fmean(game["reward"] for game in games), 4),
            "staleness": round(fmean(game["stale"] for game in games), 2),
            "trained_tokens_per_s": round(sum(game["tokens"] for game in games) / BIN_S, 1),
            "sync_s": round(median(sync["seconds"] for sync in synced), 3) if synced else None,
        })  # fmt: skip
    return points


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {"median": median(ordered), "p90": ordered[ceil(0.9 * (len(ordered) - 1))], "max": ordered[-1]}


def of_seeds(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The means of what seeds have in common, and each of them."""
    scalars = {
        name: fmean(one[name] for one in found)
        for name, value in found[0].items()
        if isinstance(value, (int, float)) and all(isinstance(one[name], (int, float)) for one in found)
    }
    return {**scalars, "seeds": [*found]}


def show(found: dict[str, Any]) -> None:
    print(
        "\narm                 solved first   last   steps  seconds  MB/step  share  sync s  pause ms  stale  tokens/s"
    )
    rows = [(name, found[name]) for name in ("deltas", "full", "none") if name in found]
    rows += [(f"{sync} {mbit} Mbit/s", one) for mbit, of in found.get("slow", {}).items() for sync, one in of.items()]
    rows += [(f"deltas, lr {rate}", one) for rate, one in found.get("rates", {}).items()]
    for name, of in rows:
        one = of["seeds"][0]
        print(
            f"{name:20} {_text(of.get('solved_first'), '.1%'):>11} {_text(of.get('solved_last'), '.1%'):>6} "
            f"{_text(of.get('steps'), '.0f'):>7} {_text(of.get('seconds'), '.0f'):>8} "
            f"{_text(of.get('bytes_per_step'), '.3f', 1e-6):>8} {_text(of.get('share_of_full'), '.2%'):>6} "
            f"{_text((one['sync_s'] or {}).get('median'), '.2f'):>7} "
            f"{_text((one['pause_ms'] or {}).get('median'), '.1f'):>9} "
            f"{_text(of.get('staleness_mean'), '.1f'):>6} {_text(of.get('generated_tokens_per_s'), '.0f'):>9}"
        )


QWEN3_BYTES = 2 * 596_049_920
"""Of Qwen3-0.6B in bf16."""
ARMS = {"deltas": "deltas", "full": "full weights", "none": "no sync"}
Cell = Callable[[dict[str, Any]], str]


def tables(found: dict[str, Any]) -> list[str]:
    """The tables of docs/wordle-gpu.md, in Markdown."""
    result = []
    slow = [(f"{mbit} Mbit/s", of, SLOW) for mbit, of in found.get("slow", {}).items()]
    for title, of, rows in [("", found, COMPARED), *slow]:
        if names := [name for name in ARMS if name in of]:
            head = [title, *(ARMS[name] for name in names)]
            result.append(_table(head, [of[name]["seeds"][0] for name in names], rows))
    if rates := sorted(found.get("rates", {}).items(), key=lambda one: float(one[0])):
        if "deltas" in found:
            rates.append((f"{found['training']['learning_rate']}, the curves", found["deltas"]))
        head = ["learning rate", *(rate for rate, _ in rates)]
        result.append(_table(head, [of["seeds"][0] for _, of in rates], RATES))
    for checked in found.get("labels", {}).values():
        away = sorted((int(name), value) for name, value in checked["mean_difference"].items())
        head = ["versions from that of the label", *(f"{name:+d}" if name else "0" for name, _ in away)]
        result.append(_table(head, [{"difference": value} for _, value in away], LABELS))
    return [*result, _beside(found)]


def draw(found: dict[str, Any]) -> str:
    """Solved games over time, and over steps, of the first seed."""
    charts = []
    for axis, text in (("seconds", "seconds"), ("step", "steps")):
        lines = {
            label: [(point[axis], 100 * point["solved"]) for point in found[name]["seeds"][0]["curve"]]
            for name, label in reversed(ARMS.items())
            if name in found
        }
        made = chart(f"games solved, %, by {text}", lines, text, top=100)
        charts.append(made.replace("<svg ", f'<svg y="{180 * len(charts)}" ', 1))
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="560" height="360" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(charts)}</svg>\n'
    )


def _beside(found: dict[str, Any]) -> str:
    """What was published of delta weight sync for TRL with Qwen3-0.6B, and this run; payloads scaled by weights."""
    arms = {f"{float(rate):g}": of["seeds"][0] for rate, of in found.get("rates", {}).items()}
    if "deltas" in found:
        arms[f"{float(found['training']['learning_rate']):g}"] = found["deltas"]["seeds"][0]
    lines = [["", "published", "this run", "scaled to 0.6B weights"], ["---"] * 4]
    for rate, arm in sorted(arms.items(), key=lambda one: float(one[0])):
        if sent := _delta_bytes(arm):
            share = sent / arm["full_bytes"]
            published = "20 to 35 MB, 1.7 to 2.9 %" if rate == "1e-06" else "–"
            here = f"{sent / 1e6:.2f} MB, {share:.2%}"
            lines.append([f"a delta, learning rate {rate}", published, here, f"{share * QWEN3_BYTES / 1e6:.1f} MB"])
    if "deltas" in found and (curves := found["deltas"]["seeds"][0])["sync_s"]:
        lines.append(["from a step to the server", "9.4 to 12 s", f"{curves['sync_s']['median']:.2f} s", "–"])
        lines.append(["pause of the server", "1.1 s", f"{curves['pause_ms']['median']:.1f} ms", "–"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _table(head: Sequence[str], columns: Sequence[dict[str, Any]], rows: dict[str, Cell]) -> str:
    lines = [head, ["---"] * len(head), *([name, *map(cell, columns)] for name, cell in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _of(name: str, form: str, unit: str = "", scale: float = 1.0) -> Cell:
    return lambda arm: _text(arm.get(name), form, scale) + (unit if arm.get(name) is not None else "")


def _both(one: Cell, other: Cell) -> Cell:
    return lambda arm: f"{one(arm)}, {other(arm)}"


def _spreads(name: str, form: str, unit: str) -> Cell:
    """Median, 90 %, longest."""
    return lambda arm: (
        ", ".join(f"{arm[name][of]:{form}}" for of in ("median", "p90", "max")) + unit if arm[name] else "–"
    )


def _sent(name: str) -> Cell:
    def text(arm: dict[str, Any]) -> str:
        return f"{arm[name] / 1e6:.2f} MB, {arm[name] / arm['full_bytes']:.2%}" if arm[name] else "0"

    return text


def _delta_bytes(arm: dict[str, Any]) -> float | None:
    """Of the deltas of a step alone, without the anchors that go out now and then; None where every version is one."""
    if not arm["steps"] or arm["anchors"] >= arm["versions"]:
        return None
    return float(arm["bytes_per_step"] - arm["anchors"] * arm["full_bytes"] / arm["steps"])


def _deltas(arm: dict[str, Any]) -> str:
    sent = _delta_bytes(arm)
    return "–" if sent is None else f"{sent / 1e6:.2f} MB, {sent / arm['full_bytes']:.2%}"


COMPARED: dict[str, Cell] = {
    "games solved before, after": _both(_of("solved_first", ".1%"), _of("solved_last", ".1%")),
    "in training, first and last 256 games": _both(
        _of("solved_in_training_first", ".1%"), _of("solved_in_training_last", ".1%")
    ),
    "steps, seconds": _both(_of("steps", ".0f"), _of("seconds", ".0f")),
    "steps per hour": _of("steps_per_hour", ",.0f"),
    "sent per step, share of full weights": _sent("bytes_per_step"),
    "the deltas alone": _deltas,
    "from a step to the server: median, 90 %, longest": _spreads("sync_s", ".2f", " s"),
    "pause of the server: median, 90 %, longest": _spreads("pause_ms", ".1f", " ms"),
    "the trainer waited per sync": _of("trainer_held_s", ".0f", " ms", 1e3),
    "steps that a sample is old: mean, most (above 4 it is dropped)": _both(
        _of("staleness_mean", ".1f"), _of("staleness_max", ".0f")
    ),
    "tokens generated per second": _of("generated_tokens_per_s", ",.0f"),
    "versions, served, with full weights": _both(
        _of("versions", ".0f"), _both(_of("served", ".0f"), _of("anchors", ".0f"))
    ),
}
SLOW: dict[str, Cell] = {
    "steps, seconds": _both(_of("steps", ".0f"), _of("seconds", ".0f")),
    "steps per hour": _of("steps_per_hour", ",.0f"),
    "games solved in training, first and last 256": _both(
        _of("solved_in_training_first", ".1%"), _of("solved_in_training_last", ".1%")
    ),
    "sent per step, share of full weights": _sent("bytes_per_step"),
    "versions, served": _both(_of("versions", ".0f"), _of("served", ".0f")),
    "from a step to the server: median, 90 %, longest": _spreads("sync_s", ".1f", " s"),
    "seconds of a step, of which it waited for samples": _both(_of("step_s", ".1f"), _of("rollout_wait_s", ".1f")),
}
RATES: dict[str, Cell] = {
    "steps": _of("steps", ".0f"),
    "sent per step, share of full weights": _sent("bytes_per_step"),
    "the deltas alone": _deltas,
    "changed per step in the later half": _of("changed_later_half", ".2%"),
}
LABELS: dict[str, Cell] = {"mean difference of log-probabilities": _of("difference", ".4f")}


def _text(value: float | None, form: str, scale: float = 1.0) -> str:
    return "–" if value is None else format(value * scale, form)
