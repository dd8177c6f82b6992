"""Requests that a bucket gets from many followers, directly and through an nginx.

    python benchmarks/proxy.py                      # 100 followers; writes results/proxy.json
    python benchmarks/proxy.py --followers 20 --versions 4

Followers are threads of this process that look for versions and fetch their objects as replicas do (bucket/watch.py,
bucket/fetch.py), without weights to apply them to. nginx has the configuration of deploy/nginx, and the bucket is
SeaweedFS. Requests of followers are what the bucket would get without nginx; what it gets with it is what nginx passed
on. The same machine does all of it, so times are those of a busy machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from _report import about, print_about, write_json
from deltawire.bucket.fetch import fetch
from deltawire.bucket.run import Run
from deltawire.bucket.watch import Watcher
from deltawire.store import open_store
from deltawire.trainer import Publisher
from deltawire_wordle.seaweed import SeaweedFS
from soak.nginx import Nginx, let_read

RESULTS = Path(__file__).parent / "results" / "proxy.json"
PLACE = "deltawire/chat"
WEIGHTS, CHANGED = 4_000_000, 0.01


class Followers:
    """Followers of one address, and when each had each version."""

    def __init__(self, url: str, count: int, poll: float) -> None:
        self.url, self.poll = url, poll
        self.had: list[dict[int, float]] = [{} for _ in range(count)]
        self.stop = threading.Event()
        self._threads = [threading.Thread(target=self._follow, args=(had,)) for had in self.had]

    def _follow(self, had: dict[int, float]) -> None:
        store, newest = open_store(self.url), None
        run = Run.open(store)
        with Watcher(store, poll=self.poll, stop=self.stop) as watcher:
            while not self.stop.is_set():
                found = watcher.look(run, newest)
                if found is not None and found != newest:
                    link = run.manifest(found).links[0]
                    for blob in link.objects:
                        fetch(store, blob, shared=False).close()
                    had[found] = time.monotonic()
                newest = found
                watcher.wait()

    def wait(self, version: int) -> None:
        while not all(version in had for had in self.had):
            time.sleep(0.05)

    def __enter__(self) -> Followers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join()


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    rng, weights = np.random.default_rng(0), {"w": np.zeros(WEIGHTS, np.uint16)}
    with SeaweedFS(folder / "seaweed") as seaweed:
        let_read(seaweed, "deltawire")
        bucket = seaweed.store(PLACE)
        with Nginx(folder / "nginx", seaweed.ports["s3.port"]) as proxy, Publisher(bucket, anchor_ratio=1e9) as trainer:
            trainer.publish(weights).result(60)
            rows, published = [], {}
            with Followers(f"{proxy.url}/{PLACE}", options.followers, options.poll) as followers:
                followers.wait(0)
                began = time.monotonic()
                for version in range(1, options.versions + 1):
                    time.sleep(max(0.0, began + version * options.every - time.monotonic()))
                    changed = rng.choice(WEIGHTS, int(WEIGHTS * CHANGED), replace=False)
                    weights["w"][changed] ^= 1
                    before = proxy.answers
                    published[version] = time.monotonic()
                    handle = trainer.publish(weights).result(60)
                    followers.wait(version)
                    rows.append({"bytes": handle.bytes, "before": len(before), "before_above": above(before)})
                time.sleep(max(0.0, began + (options.versions + 1) * options.every - time.monotonic()))
                answers = proxy.answers
            late = [had[v] - at for v, at in published.items() if v > 2 for had in followers.had]
    # from the third version on: followers know the rhythm by then
    first = rows[2]
    counted = options.versions - 2
    return {
        "followers": options.followers,
        "versions": counted,
        "requests_per_version": (len(answers) - first["before"]) / counted,
        "at_bucket_per_version": (above(answers) - first["before_above"]) / counted,
        "bytes_per_version": statistics.mean(row["bytes"] for row in rows[2:]),
        "latest_s": {f"p{share}": round(float(np.percentile(late, share)), 2) for share in (50, 99, 100)},
    }


def above(answers: list[tuple[str, str, str]]) -> int:
    """Number of requests that went on to the bucket."""
    return sum(status != "-" for _, _, status in answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--followers", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--versions", type=int, default=8)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two versions")
    parser.add_argument("--poll", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    facts = about()
    print_about(facts)
    rows = []
    for count in options.followers:
        with tempfile.TemporaryDirectory(prefix="deltawire-proxy-") as folder:
            row = measure(Path(folder), argparse.Namespace(**{**vars(options), "followers": count}))
        rows.append(row)
        print(
            f"{count:>5} followers: {row['requests_per_version']:8.1f} requests per version, "
            f"{row['at_bucket_per_version']:6.1f} of them at the bucket; a version reaches the median follower after "
            f"{row['latest_s']['p50']} s, 99 % after {row['latest_s']['p99']} s"
        )
    write_json(options.out, {"about": facts, "rows": rows})


if __name__ == "__main__":
    main()
