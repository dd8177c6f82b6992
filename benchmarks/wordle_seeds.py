"""Does the sync carry the learning? The demo, per seed, and the same with syncing off after step 0.

    python benchmarks/wordle_seeds.py --seeds 1 2 3                 one run after another
    python benchmarks/wordle_seeds.py --seeds 1 2 3 --parallel 6    side by side; each keeps two to three cores busy

Every run is act one of `deltawire demo`: environment, trainer and two rollout servers as processes of their own and a
bucket between them, 512 games at the start and at the end. A control does as many steps, on games that the servers play
with version 0, publishes its last version only, and its end is measured on that. PYTHONPATH=src will do for a checkout
that is not installed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

from _charts import chart
from _report import about, print_about, write_json
from deltawire.cli.ui import sparkline
from deltawire_wordle.report import smoothed

RESULTS = Path(__file__).parent / "results" / "wordle-seeds.json"
EVERY = 10
# steps between two points of a curve


class Job:
    """A demo as a process. It ends its own processes on SIGTERM, and they end with it if it is killed."""

    def __init__(self, folder: Path, seed: int, *options: str) -> None:
        self.seed, self.sync, self._out, self._log = seed, "--no-sync" not in options, folder, folder / "said"
        folder.mkdir()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "deltawire.cli", "demo", "--act", "1", "--seed", str(seed),
                    "--out", str(folder), *options,
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def story(self) -> dict[str, Any]:
        """What the demo wrote down; what it said, if it wrote nothing."""
        report = self._out / "report.json"
        if not report.exists():
            raise SystemExit(f"seed {self.seed}: the demo ended with {self._process.poll()}:\n{self._log.read_text()}")
        return json.loads(report.read_bytes())


def run_all(folder: Path, wanted: Sequence[tuple[int, Sequence[str]]], parallel: int) -> list[Job]:
    """All of them, so many at a time."""
    folder.mkdir()
    jobs: list[Job] = []
    with ExitStack() as stack:
        for number, (seed, options) in enumerate(wanted):
            while sum(job.running for job in jobs) >= parallel:
                time.sleep(0.2)
            jobs.append(Job(folder / str(number), seed, *options))
            stack.callback(jobs[-1].stop)
        while any(job.running for job in jobs):
            time.sleep(0.2)
    return jobs


def row(job: Job) -> dict[str, Any]:
    story = job.story()
    steps, deltas = story["steps"], [version for version in story["published"] if version["version"]]
    rates = smoothed([step["figures"]["solved"] for step in steps])
    solved = [found["solved"] for found in story["evaluated"]]
    return {
        "seed": job.seed,
        "sync": job.sync,
        "start": solved[0] if solved else None,
        "end": solved[-1] if len(solved) > 1 else None,
        "games": story["plan"]["games"],
        "steps": len(steps),
        "seconds": steps[-1]["seconds"] if steps else None,
        "seconds_in_all": story["seconds"],
        "load": story["machine"]["load"],
        "versions": len(story["published"]),
        "bytes": sum(version["bytes"] for version in deltas),
        "bytes_full": sum(2 * version["elements"] for version in deltas),
        "changed": fmean(version["changed"] / version["elements"] for version in deltas) if deltas else None,
        "staleness": fmean(step["staleness"] for step in steps) if steps else None,
        # the demo compares a SHA-256 of each replica's live weights with the trainer's
        "equal": len(story["equal"]) == story["plan"]["replicas"] and not story["problems"],
        "verified": bool(story["verified"] and story["verified"]["ok"]),
        "problems": story["problems"],
        "curve": [[steps[at]["step"], round(rates[at], 4)] for at in range(EVERY - 1, len(rates), EVERY)],
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    print("seed  sync   start     end  steps  versions     bytes  of full  bits equal  verified  solved in training")
    for one in rows:
        sync, share = "on" if one["sync"] else "off", one["bytes"] / one["bytes_full"] if one["bytes_full"] else None
        # the two ends keep the scale from 0 to 1
        curve = sparkline([*(rate for _, rate in one["curve"]), 0.0, 1.0])[:-2]
        print(
            f"{one['seed']:4}  {sync:4} {_percent(one['start']):>7} {_percent(one['end']):>7} {one['steps']:6} "
            f"{one['versions']:9} {one['bytes'] / 1e6:6.1f} MB {_percent(share):>8}  {_yes(one['equal']):>10}  "
            f"{_yes(one['verified']):>8}  {curve}"
        )
        for problem in one["problems"]:
            print(f"      {problem}")
    for sync in (True, False):
        ends = [one["end"] for one in rows if one["sync"] is sync and one["end"] is not None]
        if ends:
            print(f"syncing {'on' if sync else 'off'}: {min(ends):.1%} to {max(ends):.1%} at the end")


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """With syncing above, without below."""
    charts = []
    for title, sync in (("games solved, %; syncing on", True), ("off after step 0", False)):
        chosen = [one for one in rows if one["sync"] is sync]
        lines = {f"seed {one['seed']}": [(step, 100 * rate) for step, rate in one["curve"]] for one in chosen}
        charts.append(chart(title, lines, "step", top=100).replace("<svg ", f'<svg y="{180 * len(charts)}" ', 1))
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="560" height="360">{"".join(charts)}</svg>'


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--parallel", type=int, default=1, help="runs at the same time (%(default)s)")
    parser.add_argument("--steps", type=int, help="end after so many, if that is sooner than the demo's goal")
    parser.add_argument("--games", type=int, default=512, help="in each evaluation (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    facts = about()
    print_about(facts)
    games, ends = ["--games", str(given.games)], ["--steps", str(given.steps)] if given.steps else []
    with tempfile.TemporaryDirectory(prefix="deltawire-seeds-") as scratch:
        folder = Path(scratch)
        # not counted: what numba compiles is kept for the others
        [warm] = run_all(folder / "warm", [(0, ["--steps", "2", "--games", "0"])], 1)
        warm.story()
        jobs = run_all(folder / "synced", [(seed, [*games, *ends]) for seed in given.seeds], given.parallel)
        rows = [row(job) for job in jobs]
        off = [(one["seed"], [*games, "--steps", str(one["steps"]), "--no-sync"]) for one in rows]
        rows += [row(job) for job in run_all(folder / "control", off, given.parallel)]
    show(rows)
    write_json(given.out, {"about": facts, "parallel": given.parallel, "rows": rows})
    given.out.with_suffix(".svg").write_text(draw(rows) + "\n")
    if any(one["problems"] or not one["equal"] for one in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
