"""`fleet`, `log` and `dash` with thousands of heartbeats, real and forged, and what a flood costs trainer and replica.

    python benchmarks/heartbeats.py                                     # writes results/heartbeats.json
    python benchmarks/heartbeats.py --real 1000 --forged 0 5000 --stores file

In a bucket (SeaweedFS) and in a folder, with and without the roster that a keeper writes (keeper/roster.py). Commands
run in this process, so that the start of a program, half a second on an idle machine, is not among the seconds.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from _report import about, print_about, write_json
from deltawire.bucket.run import Run
from deltawire.cli import app
from deltawire.core import keys
from deltawire.core.manifest import Heartbeat, SyncRecord, dump
from deltawire.dash.collect import Collector
from deltawire.fleet import Fleet
from deltawire.keeper.roster import RosterWriter
from deltawire.replica import Replica
from deltawire.store import LocalStore, Store
from deltawire.trainer import Publisher
from deltawire_wordle.counting import CountingStore
from deltawire_wordle.seaweed import SeaweedFS

RESULTS = Path(__file__).parent / "results" / "heartbeats.json"
WEIGHTS, CHANGED, VERSIONS = 4_000_000, 0.01, 10
WRITERS = 16


def write(run: Run, names: list[str]) -> None:
    """Write a heartbeat of each, as large as those of servers that follow."""
    syncs = tuple(
        SyncRecord(v, v - 1, time.time(), 0.5, 43_000, {"fetch": 0.1, "stage": 0.2, "pause": 0.02, "prove": 0.1})
        for v in range(1, 25)
    )

    def one(name: str) -> None:
        beat = Heartbeat(
            run.info.run, name, VERSIONS, VERSIONS, True, time.time(), syncs=syncs, address="10.0.0.7:8000"
        )
        run.store.put(keys.replica(name), dump(beat))

    with ThreadPoolExecutor(WRITERS) as pool:
        for _ in pool.map(one, names, chunksize=100):
            pass


def seconds_of(command: list[str]) -> tuple[float, Any]:
    """Run a command in this process, and return how long it took and the JSON that it printed."""
    printed, began = io.StringIO(), time.perf_counter()
    with redirect_stdout(printed):
        app([*command, "--json"], standalone_mode=False)
    return round(time.perf_counter() - began, 2), json.loads(printed.getvalue())


def look(run: Run, real: list[str], *, has_roster: bool) -> dict[str, Any]:
    """What the commands take and find now."""
    address, known = run.store.url, {*real}
    fleet = Fleet(run, keepers=True)
    fleet.read()
    fleet_s, found = seconds_of(["fleet", address])
    log_s, _ = seconds_of(["log", address])
    began = time.perf_counter()
    collector = Collector(run.store)
    document = collector.look()
    first_s = time.perf_counter() - began
    began = time.perf_counter()
    collector.look()
    shown = {replica["replica"] for replica in found["replicas"] if replica["health"] == "ok"}
    return {
        "roster": has_roster,
        "requests": fleet.requests,
        "fleet_s": fleet_s,
        "log_s": log_s,
        "dash_first_s": round(first_s, 2),
        "dash_next_s": round(time.perf_counter() - began, 2),
        "dash_counts": document.headline.following,
        "real_shown": len(shown & known),
    }


def training(run: Run, trainer: Publisher, weights: dict[str, Any], replica: Replica, live: Any) -> dict[str, float]:
    """Seconds of a publish and of a sync, the median of some."""
    rng, published, synced = np.random.default_rng(1), [], []
    for _ in range(VERSIONS):
        changed = rng.choice(WEIGHTS, int(WEIGHTS * CHANGED), replace=False)
        weights["w"][changed] ^= 1
        began = time.perf_counter()
        version = trainer.publish(weights).result(60).version
        published.append(time.perf_counter() - began)
        began = time.perf_counter()
        replica.sync(live, version)
        replica.beat()
        synced.append(time.perf_counter() - began)
    return {
        "publish_s": round(statistics.median(published), 4),
        "sync_s": round(statistics.median(synced), 4),
        "newest": version,
    }


def measure(store: Store, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of forged heartbeats."""
    weights = {"w": np.zeros(WEIGHTS, np.uint16)}
    live = {"w": np.zeros(WEIGHTS, np.uint16)}
    counting = CountingStore(store)
    with Publisher(counting, anchor_ratio=1e9) as trainer:
        trainer.publish(weights).result(60)
        run = Run.open(store)
        replica = Replica(counting, id="watched", heartbeat=1e-9)
        replica.sync(live)
        training(run, trainer, weights, replica, live)  # kernels are loaded, files are warm
        seconds_of(["fleet", store.url])  # all is imported
        real = [f"gpu-{number:05}" for number in range(options.real)]
        writer, there = RosterWriter(run), 0
        for forged in options.forged:
            write(run, [f"a-forged-{number:06}" for number in range(there, forged)])
            there = forged
            write(run, real)
            counting.reset()
            row: dict[str, Any] = {
                "real": len(real),
                "forged": forged,
                **training(run, trainer, weights, replica, live),
            }
            row["requests_per_version"] = round(counting.requests.total() / VERSIONS, 1)
            row["looks"] = [look(run, real, has_roster=False)]
            began = time.perf_counter()
            # a keeper that has seen the real ones before
            writer.update()
            row["roster_first_s"] = round(time.perf_counter() - began, 2)
            write(run, real)
            began = time.perf_counter()
            row["members"] = writer.update()
            row["roster_next_s"] = round(time.perf_counter() - began, 2)
            row["roster_bytes"] = len(store.get(keys.ROSTER).data)
            row["looks"].append(look(run, real, has_roster=True))
            store.delete(keys.ROSTER)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", type=int, default=10_000)
    parser.add_argument("--forged", type=int, nargs="+", default=[0, 20_000, 200_000], help="ascending")
    parser.add_argument("--stores", nargs="+", default=["s3", "file"], choices=["s3", "file"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    facts = about()
    print_about(facts)
    found: dict[str, Any] = {"about": facts, "rows": []}
    for name in options.stores:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deltawire-heartbeats-")))
            store: Store = LocalStore(folder / "run")
            if name == "s3":
                seaweed = stack.enter_context(SeaweedFS(folder / "seaweed"))
                os.environ.update(seaweed.environment)
                store = seaweed.store("deltawire/chat")
            for row in measure(store, options):
                found["rows"].append({"store": name, **row})
                print(line(found["rows"][-1]), flush=True)
                write_json(options.out, found)


def line(row: dict[str, Any]) -> str:
    """A line of the table in docs/fleet.md."""
    without, roster = row["looks"]

    def seconds(found: dict[str, Any]) -> str:
        return f"{found['requests']:,} | {found['fleet_s']:.1f}, {found['log_s']:.1f}, {found['dash_first_s']:.1f} s"

    return (
        f"| {'bucket' if row['store'] == 's3' else 'folder'} | {row['forged']:,} | {seconds(without)}; "
        f"{without['real_shown']:,} | {seconds(roster)}; {roster['real_shown']:,} | "
        f"{1000 * row['publish_s']:.0f}, {1000 * row['sync_s']:.0f} ms; {row['requests_per_version']:g} |"
    )


if __name__ == "__main__":
    main()
