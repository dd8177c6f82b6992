"""A run of 100,000 versions: what publishing, joining, catching up, `log`, the page and `prune` cost as it grows.

    python benchmarks/long_run.py                    # about ten minutes, 1.5 GB in memory (/dev/shm)
    python benchmarks/long_run.py --versions 10000   # a tenth of it

Every version is written by the real Publisher into a folder, one after the other: 4,096 weights of which a few change,
two metrics, an anchor every 100 versions. After a tenth of them a real SeaweedFS gets a copy of the objects that are
there, sixteen at a time, and 100 more versions by the Publisher. Each question is asked by a process of its own:
requests by kind (a listing counts as one for each thousand keys), bytes, seconds, and the memory that it needs beyond
its imports.

`98,307` is asked too: a page of history of 32,768 versions ends there, more than any reader who is a few versions
behind needs. Last comes `prune` with the default rule, twice, and the questions once more.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import deltawire as dw
from _report import about, print_about, write_json
from deltawire.bucket.walk import Walker
from deltawire.core import keys
from deltawire.dash.collect import Collector
from deltawire.store import ObjectInfo, Store, open_store
from deltawire.trainer import Publisher
from deltawire_wordle.counting import CountingStore
from deltawire_wordle.seaweed import SeaweedFS

RESULTS = Path(__file__).parent / "results" / "long-run.json"
WEIGHTS, CHANGED = 4096, 8
ANCHOR_EVERY = 100
PAGE = 1000
"""Keys of a page of a listing."""
MORE = 100
S3 = "s3://deltawire/long"


class Counting(CountingStore):
    """Counts a listing by its pages."""

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        self._count("list")
        for number, item in enumerate(self.inner.list(prefix, after), 1):
            if number % PAGE == 0:
                self._count("list")
            yield item


class Trainer:
    """Weights that move, and the publisher of them."""

    def __init__(self, store: Store, at: int = 0) -> None:
        self.store = Counting(store)
        self.weights = np.zeros(WEIGHTS, np.uint16)
        self.version = 0
        while self.version < at:
            self._move()
        self._publisher = Publisher(
            self.store, anchor_every=ANCHOR_EVERY, anchor_ratio=1e9, group=None, continues=at > 0
        )

    def _move(self) -> None:
        self.weights[(self.version * 37 + np.arange(CHANGED) * 511) % WEIGHTS] += 1
        self.version += 1

    def publish(self, versions: int) -> dict[str, Any]:
        self.store.reset()
        began, took = time.perf_counter(), []
        for _ in range(versions):
            metrics = {"loss": 1 / (1 + self.version), "reward": self.version / 1e5}
            clock = time.perf_counter()
            self._publisher.publish({"w": self.weights.reshape(64, 64)}, step=self.version, metrics=metrics, wait=True)
            took.append(time.perf_counter() - clock)
            self._move()
        return {
            "versions": versions,
            "ms_each": round(1e3 * (time.perf_counter() - began) / versions, 3),
            "median_ms": round(1e3 * float(np.median(took)), 3),
            "longest_ms": round(1e3 * max(took), 3),
            "requests_each": round(self.store.requests.total() / versions, 3),
            "bytes_each": round(self.store.bytes_out / versions),
            "resident_mb": round(resident() / 1e6, 1),
        }

    def close(self) -> None:
        self._publisher.close()


# ── questions, each in a process of its own ──────────────────────────────────────────────────────────────────────────


def sync(store: Store, version: int, behind: int | None) -> int:
    """A replica that starts from nothing, or so many versions behind."""
    live = {"w": np.zeros((64, 64), np.uint16)}
    replica = dw.Replica(store, heartbeat=0)
    if behind is not None:
        replica.sync(live, version - behind)
        reset(store)
    replica.sync(live, version)
    return len(Walker(dw.Run.open(open_store(store.url))).plan(None if behind is None else version - behind, version))


def command(store: Store, *words: str) -> int:
    """A command of the command line, in this process."""
    import deltawire.store as stores
    from deltawire.bucket import run as runs
    from deltawire.cli import app

    stores.open_store = runs.open_store = lambda where: store  # type: ignore[assignment]
    app([*words, "--json"], standalone_mode=False)
    return 0


def page(store: Store, again: bool) -> int:
    """The page of `dash`: a first look, or one when nothing is new."""
    collector = Collector(store)
    document = collector.look()
    if again:
        reset(store)
        document = collector.look()
    return document.totals.versions


def publisher(store: Store) -> int:
    """A publisher that continues the run, up to its first publish."""
    with Publisher(store, group=None, continues=True) as opened:
        return int(opened.version or 0)


def newest(store: Store) -> int:
    return int(dw.Run.open(store).newest() or 0)


def prune(store: Store, apply: bool) -> int:
    # all that is not among the last is old enough
    plan = dw.prune(dw.Run.open(store), dw.Retention(grace=0.0), apply=apply)
    return len(plan.objects)


QUESTIONS: dict[str, Any] = {
    "newest version": lambda store, version: newest(store),
    "join": lambda store, version: sync(store, version, None),
    "catch up, 4 behind": lambda store, version: sync(store, version, 4),
    "catch up, 900 behind": lambda store, version: sync(store, version, min(900, version)),
    "log -n 20": lambda store, version: command(store, "log", f"{store.url}@{version}", "-n", "20"),
    "log --all": lambda store, version: command(store, "log", store.url, "--all"),
    "dash, first look": lambda store, version: page(store, False),
    "dash, nothing new": lambda store, version: page(store, True),
    "publisher continues": lambda store, version: publisher(store),
    "prune, plan": lambda store, version: prune(store, False),
    "prune": lambda store, version: prune(store, True),
}
AT_A_PAGE = ("catch up, 4 behind", "log -n 20")
"""Questions about a version that is not the newest."""


def reset(store: Store) -> None:
    if isinstance(store, Counting):
        store.reset()


def answer(question: str, url: str, version: int) -> dict[str, Any]:
    """Ask in this process. The baseline is what it holds after importing everything and asking a toy run."""
    logging.getLogger("deltawire").setLevel(logging.ERROR)
    out, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115
    toy = open_store("memory://toy")
    with Publisher(toy, group=None) as opened:
        for _ in range(8):
            opened.publish({"w": np.zeros((64, 64), np.uint16)}, wait=True)
    if question in QUESTIONS:
        QUESTIONS[question](Counting(toy), 6)
    store = Counting(open_store(url))
    baseline = resident()
    Path("/proc/self/clear_refs").write_text("5")
    began = time.perf_counter()
    result = QUESTIONS[question](store, version)
    seconds = time.perf_counter() - began
    peak = memory("VmHWM") - baseline
    sys.stdout = out
    return {
        "question": question,
        "version": version,
        "result": result,
        "requests": store.requests.total(),
        "by_kind": dict(store.requests),
        "bytes": store.bytes_in,
        "seconds": round(seconds, 3),
        "memory_mb": round(max(peak, 0) / 1e6, 1),
    }


def resident() -> int:
    return memory("VmRSS")


def memory(which: str) -> int:
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def ask(question: str, url: str, version: int, environment: dict[str, str] | None = None) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--answer", question, "--url", url, "--at", str(version)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **(environment or {})},
    )
    found: dict[str, Any] = json.loads(done.stdout)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in found["by_kind"].items())
    print(
        f"  {question:24} {found['requests']:>8,} requests {found['bytes'] / 1e6:>9.3f} MB {found['seconds']:>8.3f} s "
        f"{found['memory_mb']:>8.1f} MB memory   {found['result']:,} ({kinds})",
        flush=True,
    )
    return found


def ask_all(url: str, newest: int, environment: dict[str, str] | None = None) -> list[dict[str, Any]]:
    print(f"version {newest:,}")
    questions = [name for name in QUESTIONS if name not in ("prune", "prune, plan")]
    rows = [ask(name, url, newest, environment) for name in questions]
    end = 1 << (newest.bit_length() - 2)
    # the version three after the end of the longest page below: half of all, and a quarter more
    at = 3 * end + 3 if 3 * end + 3 <= newest else 2 * end + 3
    print(f"version {at:,} of them, three after a page of {at - 3 & -(at - 3):,} versions")
    return rows + [ask(name, url, at, environment) for name in AT_A_PAGE]


def ask_pruned(url: str, newest: int, environment: dict[str, str] | None = None) -> list[dict[str, Any]]:
    rows = [ask("prune, plan", url, newest, environment)]
    rows += [{**ask("prune", url, newest, environment), "run": number} for number in (1, 2)]
    print("after prune")
    names = [name for name in QUESTIONS if not name.startswith("prune") and "behind" not in name]
    return [*rows, *({**ask(name, url, newest, environment), "pruned": True} for name in names)]


def contents(store: Store) -> dict[str, dict[str, int]]:
    """Objects and bytes by folder."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for item in store.list():
        folder = item.key.rpartition("/")[0] or item.key
        counts[folder] += 1
        sizes[folder] += item.size
    return {name: {"objects": counts[name], "bytes": sizes[name]} for name in sorted(counts)}


def copy(source: Store, target: Store) -> float:
    """Put all objects of a run elsewhere, head last."""
    began = time.perf_counter()
    listed = [item.key for item in source.list() if item.key not in (keys.HEAD, keys.WRITER)]
    with ThreadPoolExecutor(16) as threads:
        for _ in threads.map(lambda key: target.put(key, source.get(key).data), listed):
            pass
    target.put(keys.HEAD, source.get(keys.HEAD).data)
    return time.perf_counter() - began


def table(rows: list[dict[str, Any]], s3: list[dict[str, Any]]) -> list[str]:
    """What each question cost after a tenth of the versions and after all, as lines of Markdown."""
    first, last = (which(row["version"] for row in rows if row["question"] == "join") for which in (min, max))
    lines = [
        f"| | requests at {first:,} | SeaweedFS at {first + MORE:,} | at {last:,} | bytes | memory | seconds |",
        "|---|---|---|---|---|---|---|",
    ]

    def of(found: list[dict[str, Any]], newest: int) -> dict[tuple[Any, ...], dict[str, Any]]:
        """The answers about one run, by question: of its newest version, or of one after a page of history."""
        here = [row for row in found if newest // 2 < row["version"] <= newest]
        return {
            (row["question"], row["version"] < newest, row.get("run", 1), row.get("pruned", False)): row for row in here
        }

    few, away = of(rows, first), of(s3, first + MORE)
    for key, row in of(rows, last).items():
        question, at_page, run, pruned = key
        label = f"{question}{', after a long page' * at_page}{', again' * (run == 2)}{', after `prune`' * pruned}"
        before, there = (f"{found[key]['requests']:,}" if key in found else "" for found in (few, away))
        lines.append(
            f"| {label} | {before} | {there} | {row['requests']:,} | {row['bytes'] / 1e6:,.3f} MB | "
            f"{row['memory_mb']:,.0f} MB | {row['seconds']:.2f} s |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="for the run; by default a temporary one in /dev/shm")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--at", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.answer:
        print(json.dumps(answer(given.answer, given.url, given.at)))
        return
    logging.getLogger("deltawire").setLevel(logging.ERROR)
    facts = about()
    print_about(facts)
    shared = Path("/dev/shm")
    folder = given.folder or Path(tempfile.mkdtemp(prefix="deltawire-long-", dir=shared if shared.is_dir() else None))
    try:
        measure(folder, given.versions, lambda result: write_json(given.out, {"about": facts, **result}))
    finally:
        if not given.folder:
            shutil.rmtree(folder)
    found = json.loads(given.out.read_text())
    print("\n".join(table(found["asked"], found["s3"]["asked"])))


def measure(folder: Path, versions: int, save: Callable[[dict[str, Any]], None]) -> None:
    url, each, tenth = (folder / "run").as_uri(), versions // 20, versions // 10
    trainer = Trainer(open_store(url))
    result: dict[str, Any] = {"versions": versions, "published": [], "asked": []}
    for done in range(each, versions + 1, each):
        result["published"].append({"to": done, **trainer.publish(each)})
        print(f"published {done:,}: {result['published'][-1]}", flush=True)
        if done in (tenth, versions):
            trainer.close()
            result["asked"] += ask_all(url, done - 1)
            save(result)
        if done == tenth:
            result["s3"] = in_seaweedfs(url, tenth)
            save(result)
            trainer = Trainer(open_store(url), done)
    result["contents"] = contents(open_store(url))
    result["asked"] += ask_pruned(url, versions - 1)
    result["left"] = contents(open_store(url))
    save(result)


def in_seaweedfs(url: str, versions: int) -> dict[str, Any]:
    with SeaweedFS() as server:
        store = server.store(S3.removeprefix("s3://"))
        copied = copy(open_store(url), store)
        print(f"copied to SeaweedFS in {copied:.0f} s")
        trainer = Trainer(store, versions)
        more = trainer.publish(MORE)
        trainer.close()
        print(f"published {MORE} more: {more}", flush=True)
        newest = versions + MORE - 1
        found = ask_all(S3, newest, server.environment) + ask_pruned(S3, newest, server.environment)
        return {"copied_s": round(copied, 1), "published": more, "asked": found, "left": contents(store)}


if __name__ == "__main__":
    main()
