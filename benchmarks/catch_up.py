"""Catching up from 1,000 and 10,000 versions behind, and joining: with and without the links that a keeper adds.

    python benchmarks/catch_up.py                        # 10,100 versions, about ten minutes on two cores
    python benchmarks/catch_up.py --versions 1100        # a tenth of it

A small model (2 M bf16 weights), of which every version moves 0.1 % by an ulp, others each time. The bucket is in
memory, behind a link of 20 ms a request and 1 Gbit/s. The trainer makes anchors by its own rule; then a keeper goes
through the run. Each catch-up is repeated without the keeper's links, and all weights are compared with the trainer's.
"""

from __future__ import annotations

import argparse
import logging
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from _report import about, print_about, write_json
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.bucket.walk import Walker
from deltawire.core import keys
from deltawire.keeper.keeper import Keeper, KeeperOptions
from deltawire.replica import Replica
from deltawire.store import ObjectStore, Store
from deltawire.trainer import Publisher
from deltawire_wordle.counting import CountingStore

RESULTS = Path(__file__).parent / "results" / "catch-up.json"
LATENCY_S, BYTES_S = 0.020, 125e6
WEIGHTS, CHANGED = 1 << 21, 1 << 11


class Distant(CountingStore):
    """A store behind a link: every request takes a round trip, and bytes their time."""

    def _count(self, method: str) -> None:
        super()._count(method)
        time.sleep(LATENCY_S)

    def _read(self, count: int) -> None:
        super()._read(count)
        time.sleep(count / BYTES_S)


class Plain:
    """A store without the objects that a keeper added."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get_if_changed(self, key: str, etag: str | None, *, limit: int | None = None) -> Any:
        return self._inner.get_if_changed("nothing" if key == keys.ADDED else key, etag, limit=limit)

    def list(self, prefix: str = "", after: str | None = None) -> Any:
        return self._inner.list("nothing/" if prefix == keys.ADDED_PAGES else prefix, after)


def weights_of(version: int) -> np.ndarray:
    return weights_from(first(), 0, version)


def first() -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(WEIGHTS) * 0.02).astype(np.float32).view(np.uint32) >> 16


def weights_from(weights: np.ndarray, version: int, to: int) -> np.ndarray:
    weights = weights.astype(np.uint16)
    for step in range(version + 1, to + 1):
        move(weights, step)
    return weights


def move(weights: np.ndarray, step: int) -> None:
    rng = np.random.default_rng(step)
    where = np.unique(rng.integers(0, WEIGHTS, CHANGED))
    weights[where] += np.where(rng.random(where.size) < 0.5, 1, -1).astype(np.uint16)


def publish(store: Store, versions: int) -> float:
    weights = {"w": weights_of(0).reshape(-1, 1024)}
    began = time.perf_counter()
    with Publisher(store, encoding="packed") as publisher:
        for version in range(versions):
            if version:
                move(weights["w"].reshape(-1), version)
            publisher.publish(weights, wait=True)
            tell("published", version, versions)
    return time.perf_counter() - began


def keep(store: Store, versions: int) -> None:
    keeper = Keeper(store, KeeperOptions(since=0), id="keeper")
    for kept in keeper.once():
        tell("kept", kept.version, versions)
    keeper.close()


def tell(what: str, version: int, versions: int) -> None:
    if version % 500 == 0 or version == versions - 1:
        print(f"  {what} {version:,}", flush=True)


def catch_up(store: Store, have: int | None, want: int, expected: np.ndarray) -> dict[str, Any]:
    distant = Distant(store)
    start = np.zeros(WEIGHTS, np.uint16) if have is None else weights_of(have)
    live = {"w": start.reshape(-1, 1024)}
    replica = Replica(distant, heartbeat=0)
    if have is not None:
        replica.sync(live, have)  # finds that the weights are this version
    distant.reset()
    began = time.perf_counter()
    replica.sync(live, want)
    seconds = time.perf_counter() - began
    requests, size = distant.requests.total(), distant.bytes_in
    if not np.array_equal(live["w"].reshape(-1), expected):
        raise SystemExit(f"wrong weights after a catch-up from {have}")
    run = Run.open(store)
    steps = Walker(run).plan(have, want)
    return {
        "objects": len(steps),
        "object_bytes": sum(step.bytes for step in steps),
        "requests": requests,
        "bytes": size,
        "seconds": round(seconds, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=10_100)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    logging.getLogger("deltawire").setLevel(logging.ERROR)
    facts = about()
    print_about(facts)
    store = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
    publishing = publish(store, given.versions)
    before = sum(item.size for item in store.list())
    keep(store, given.versions)
    run, want = Run.open(store), given.versions - 1
    expected = weights_of(want)
    added = run.added.between(-1, want)
    rows = []
    for behind in (1000, 10_000, None):
        if behind is not None and behind > want:
            continue
        have = None if behind is None else want - behind
        row = {
            "behind": behind,
            "with": catch_up(store, have, want, expected),
            "without": catch_up(Plain(store), have, want, expected),  # type: ignore[arg-type]
        }
        rows.append(row)
        print(f"behind {behind}: {row['with']}  without: {row['without']}", flush=True)
    found = verify(run, first=max(0, want - 64))
    result = {
        "about": facts,
        "versions": given.versions,
        "full_bytes": run.schema.nbytes,
        "delta_bytes": round(sum(x.bytes for v in range(1, 200) for x in run.manifest(v).links[:1]) / 199),
        "latency_ms": 1e3 * LATENCY_S,
        "mbit_s": BYTES_S * 8 / 1e6,
        "trainer_bytes": before,
        "added": {
            "links": len(added),
            "bytes": sum(x.link.bytes for x in added),
            "anchors": sum(x.link.kind == "anchor" for x in added),
            "pages": len(run.added.index().pages),  # type: ignore[union-attr]
        },
        "publish_ms_per_version": round(1e3 * publishing / given.versions, 2),
        "catch_up": rows,
        "verified": found.ok,
    }
    print({name: value for name, value in result.items() if name not in ("about", "catch_up")})
    write_json(given.out, result)


if __name__ == "__main__":
    main()
