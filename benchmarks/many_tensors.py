"""What a model of 100,000 tensors costs beyond its weights: a publish, a sync, commands, and the size of the objects.

    python benchmarks/many_tensors.py                     # 1,000, 10,000 and 100,000; five minutes on two busy cores
    python benchmarks/many_tensors.py --tensors 20000 --profile

Tensors are experts as checkpoints have them, each of 16 × 64 bf16 weights, so that nothing but their number costs
time; ten weights of each change. CPU seconds of all threads, and those of the clock. `bend` is the slope in log-log
between the last two sizes: 1 is proportional. A replica must have the trainer's bits in the end.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import logging
import math
import os
import pstats
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

import deltawire as dw
from _report import about, print_about, write_json
from deltawire.cli import app
from deltawire.core import keys
from deltawire.store import open_store

RESULTS = Path(__file__).parent / "results" / "many-tensors.json"
ROWS, COLUMNS, CHANGED = 16, 64, 10
WORDS = ("gate", "up", "down")


def names(count: int) -> list[str]:
    return [
        f"model.layers.{n // 1152}.mlp.experts.{n // 3 % 384}.{WORDS[n % 3]}_proj.weight" for n in range(count)
    ]  # 384 experts a layer


class Session:
    """A run of many tensors, and what each step on it took."""

    def __init__(self, tensors: int, folder: Path, profiled: bool) -> None:
        rng = np.random.default_rng(0)
        self.folder, self.url, self.profiled = folder, (folder / "run").as_uri(), profiled
        self.names = names(tensors)
        self.weights = {name: rng.integers(0, 1 << 16, (ROWS, COLUMNS), dtype=np.uint16) for name in self.names}
        self.places = [rng.choice(ROWS * COLUMNS, CHANGED, replace=False) for _ in range(16)]
        self.took: dict[str, dict[str, float]] = {}

    def step(self, name: str, work: Callable[[], Any]) -> None:
        profile = cProfile.Profile()
        began, used = time.perf_counter(), time.process_time()
        if self.profiled:
            profile.enable()
        work()
        profile.disable()
        row = {"cpu": round(time.process_time() - used, 4), "seconds": round(time.perf_counter() - began, 4)}
        if name not in self.took or row["cpu"] < self.took[name]["cpu"]:
            self.took[name] = row
        print(f"  {name:28} {row['cpu']:8.3f} s CPU {row['seconds']:8.3f} s", flush=True)
        if self.profiled:
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(10)

    def move(self) -> None:
        for number, array in enumerate(self.weights.values()):
            array.reshape(-1)[self.places[number % len(self.places)]] ^= 1

    def all(self) -> None:
        with dw.Publisher(self.url, group=None, anchor_ratio=1e9) as publisher:
            self.step("publish, the first", lambda: publisher.publish(self.weights).result())
            for _ in range(3):
                self.move()
                self.step("publish", lambda: publisher.publish(self.weights).result())
            self.step("publish, nothing changed", lambda: publisher.publish(self.weights).result())
        live = {name: np.zeros((ROWS, COLUMNS), np.uint16) for name in self.names}
        replica = dw.Replica(self.url, heartbeat=0)
        self.step("sync, from nothing", lambda: replica.sync(live, 0))
        for version in (1, 2, 3):
            self.step("sync", lambda version=version: replica.sync(live, version))  # type: ignore[misc]
        self.step("sync, nothing changed", lambda: replica.sync(live, 4))
        if any(not np.array_equal(live[name], bits) for name, bits in self.weights.items()):
            raise SystemExit("the replica has other weights than the trainer")
        self.step("log", lambda: command("log", self.url))
        self.step("show", lambda: command("show", f"{self.url}@2"))
        self.step("show, two versions", lambda: command("show", f"{self.url}@1", f"{self.url}@2"))
        self.step("dash", lambda: command("dash", self.url, "--out", str(self.folder / "page.html")))
        self.step("verify", lambda: command("verify", self.url))

    def sizes(self) -> dict[str, int]:
        found = {item.key: item.size for item in open_store(self.url).list()}
        manifest = dw.Run.open(self.url).manifest(2)
        (blob,) = manifest.main.objects
        return {
            "run.json": found[keys.RUN],
            "manifest": found[keys.manifest(2)],
            "delta": blob.size,
            "header and index of the delta": blob.head_size,
        }


def command(*words: str) -> None:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        app([*words], standalone_mode=False)


def measure(tensors: int, profiled: bool) -> dict[str, Any]:
    print(f"{tensors:,} tensors")
    with tempfile.TemporaryDirectory(prefix="deltawire-tensors-") as folder:
        out = Path(folder) / "figures.json"
        # a process of its own: what one size leaves behind does not slow the next
        if not (child := os.fork()):
            try:
                session = Session(tensors, Path(folder), profiled)
                session.all()
                out.write_text(json.dumps({"tensors": tensors, "bytes": session.sizes(), "took": session.took}))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise SystemExit("failed")
        found: dict[str, Any] = json.loads(out.read_text())
    print(f"  {found['bytes']}")
    return found


def table(rows: list[dict[str, Any]]) -> list[str]:
    """CPU seconds by number of tensors, as lines of Markdown."""
    few, many = rows[-2], rows[-1]
    sizes = " | ".join(f"{row['tensors']:,}" for row in rows)
    lines = [f"| | {sizes} | per tensor | bend |"]
    lines.append("|---" * (3 + len(rows)) + "|")
    for name, took in many["took"].items():
        seconds = " | ".join(f"{row['took'][name]['cpu']:.2f} s" for row in rows)
        ratio = took["cpu"] / max(few["took"][name]["cpu"], 1e-4)
        bend = math.log(ratio) / math.log(many["tensors"] / few["tensors"])
        lines.append(f"| {name} | {seconds} | {1e6 * took['cpu'] / many['tensors']:.0f} µs | {bend:.2f} |")
    for name in many["bytes"]:
        sizes = " | ".join(f"{row['bytes'][name] / 1e3:,.1f} kB" for row in rows)
        lines.append(f"| {name} | {sizes} | {many['bytes'][name] / many['tensors']:.1f} B | |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", default="1000,10000,100000", help="by comma")
    parser.add_argument("--profile", action="store_true", help="say where the time goes; writes no JSON")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    logging.getLogger("deltawire").setLevel(logging.ERROR)
    facts = about()
    facts["load"] = os.getloadavg()[0]
    print_about(facts)
    rows = [measure(int(size), given.profile) for size in given.tensors.split(",")]
    if not given.profile and len(rows) > 1:
        print("\n".join(table(rows)))
    if not given.profile:
        write_json(given.out, {"about": facts, "rows": rows})


if __name__ == "__main__":
    main()
