"""Real followers of one run, as many as fit: requests, bytes, delay, and what happens after an outage.

    python benchmarks/fleet.py                                          # 200 to 2,000; writes results/fleet.json
    python benchmarks/fleet.py --followers 20 --direct 20 --versions 4

A follower is a thread that looks for versions and fetches their objects as a replica does (bucket/watch.py,
bucket/fetch.py), without weights to apply them to; a few processes share them. They read over HTTP through one nginx
with the configuration of deploy/nginx, or from the bucket itself. The bucket is SeaweedFS. Requests of followers are
what the bucket would get without nginx; what it gets with nginx is what that passed on.

The last two versions of the largest fleet behind nginx come in an outage: nginx is not there for a while, and then
answers 503 for a while.

The same machine does all of it, so delays are those of a busy machine.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from ctypes import c_double
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from _report import about, print_about, write_json
from deltawire.bucket.fetch import fetch
from deltawire.bucket.run import Run
from deltawire.bucket.watch import Watcher
from deltawire.errors import DeltawireError
from deltawire.store import ObjectStore, Retrying, Store, open_store
from deltawire.trainer import Publisher
from deltawire_wordle.counting import CountingStore
from deltawire_wordle.seaweed import SeaweedFS
from soak.nginx import WRONG, Answer, Nginx, let_read

RESULTS = Path(__file__).parent / "results" / "fleet.json"
PLACE = "deltawire/chat"
WEIGHTS, CHANGED = 4_000_000, 0.01
LEARNING = 2
"""Versions that are not counted: followers learn the rhythm from them."""
BIN_S = 0.5


# ── followers ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Times:
    """When each follower saw and had each version, by the monotonic clock; 0 where it did not. Shared by processes."""

    def __init__(self, followers: int, versions: int, shared: Any = None) -> None:
        self.followers, self.versions = followers, versions
        self.shared = shared or multiprocessing.get_context("spawn").RawArray(c_double, 2 * followers * versions)

    @property
    def seen(self) -> Any:
        """By follower and version."""
        return self._table()[0]

    @property
    def had(self) -> Any:
        return self._table()[1]

    def _table(self) -> Any:
        return np.frombuffer(self.shared).reshape(2, self.followers, self.versions)


def follow(store: Store, seen: Any, had: Any, poll: float, stop: threading.Event) -> None:
    """Follow until `stop` is set, as `Replica.follow` does but for the weights."""
    run, newest = None, None
    with Watcher(store, poll=poll, stop=stop) as watcher:
        while not stop.is_set():
            try:
                run = run or Run.open(store)
                found = watcher.look(run, newest)
                if found is not None and found != newest:
                    seen[found] = seen[found] or time.monotonic()
                    for blob in run.manifest(found).links[0].objects:
                        fetch(store, blob, shared=False).close()
                    had[found] = time.monotonic()
                newest = found
            except DeltawireError as error:
                watcher.failed(error)
            watcher.wait()


def follow_many(
    url: str, environ: dict[str, str], share: Sequence[int], times: Times, poll: float, start_s: float, ended: Any,
    counted: Any,
) -> None:  # fmt: skip
    """A process: the followers in `share`, until `ended` is set. `counted` gets the requests and bytes of s3://."""
    os.environ.update(environ)
    logging.disable(logging.WARNING)
    threading.stack_size(512 << 10)
    stop, bucket = threading.Event(), None
    if url.startswith("s3:"):
        # one client for all of a process: its connections are shared, its answers are not kept
        bucket = CountingStore(ObjectStore.from_url(url))
    seen, had = times.seen, times.had
    threads = []
    for number in share:
        store = open_store(url) if bucket is None else Retrying(bucket)
        threads.append(threading.Thread(target=follow, args=(store, seen[number], had[number], poll, stop)))

    def begin() -> None:
        for thread in threads:
            time.sleep(random.expovariate(len(threads) / start_s))
            thread.start()

    threading.Thread(target=begin, daemon=True).start()
    while not ended.wait(0.2):
        if bucket is not None:
            counted[0], counted[1] = sum(bucket.requests.values()), bucket.bytes_in
    stop.set()
    os._exit(0)


class Fleet:
    """Followers in a few processes."""

    def __init__(
        self, url: str, environ: dict[str, str], count: int, versions: int, options: argparse.Namespace
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.times, self._ended = Times(count, versions), spawn.Event()
        self._counted = [spawn.RawArray(c_double, 2) for _ in range(options.processes)]
        shares = [range(number, count, options.processes) for number in range(options.processes)]
        self.processes = [
            spawn.Process(
                target=follow_many,
                args=(url, environ, share, self.times, options.poll, max(1.0, count / 200), self._ended, counted),
            )
            for share, counted in zip(shares, self._counted, strict=True)
        ]

    @property
    def counted(self) -> tuple[float, float]:
        """Requests and bytes of s3:// so far."""
        return sum(c[0] for c in self._counted), sum(c[1] for c in self._counted)

    def wait(self, version: int, patience_s: float = 120.0) -> None:
        """Wait until all have a version. Raises TimeoutError if it takes too long."""
        deadline = time.monotonic() + patience_s
        while missing := int((self.times.had[:, version] == 0).sum()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{missing} followers do not have version {version}")
            time.sleep(0.05)

    def __enter__(self) -> Fleet:
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for process in self.processes:
            process.join(20)
            process.kill()


# ── the measurement ──────────────────────────────────────────────────────────────────────────────────────────────────


class Meter:
    """What a fleet has cost so far."""

    def __init__(self, fleet: Fleet, seaweed: SeaweedFS, proxy: Nginx | None) -> None:
        self._fleet, self._seaweed, self._proxy = fleet, seaweed, proxy

    def read(self) -> Counter[str]:
        found: Counter[str] = Counter()
        if self._proxy is None:
            requests, fetched = self._fleet.counted
            found.update({"requests": requests, "bytes": fetched, "at origin": requests, "bytes of origin": fetched})
        else:
            for answer in self._proxy.answers:
                found.update({"requests": 1, "bytes": answer.bytes})
                if answer.is_of_origin:
                    kind = answer.path.rpartition("/")[0].rpartition("/")[2]
                    kind = kind if kind in ("versions", "deltas", "anchors") else answer.path.rpartition("/")[2]
                    sent = answer.bytes if answer.origin != "304" else 0
                    found.update({"at origin": 1, f"at origin: {kind}": 1, "bytes of origin": sent})
            found["nginx cpu"] = cpu_of(*workers(self._proxy.pid))
        found["bucket cpu"] = cpu_of(self._seaweed.pid or 0)
        found["followers cpu"] = cpu_of(*(process.pid or 0 for process in self._fleet.processes))
        return found


def cpu_of(*processes: int) -> float:
    """Seconds of CPU that processes have taken."""
    ticks = 0
    for process in processes:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def workers(master: int) -> list[int]:
    found = Path(f"/proc/{master}/task/{master}/children").read_text().split()
    return [master, *map(int, found)]


def measure(folder: Path, count: int, proxied: bool, outages: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Versions for `count` followers; with `outages`, two more of them."""
    rng, weights = np.random.default_rng(0), {"w": np.zeros(WEIGHTS, np.uint16)}

    def publish() -> float:
        """Publish another version, and return when it was committed."""
        changed = rng.choice(WEIGHTS, int(WEIGHTS * CHANGED), replace=False)
        weights["w"][changed] ^= 1
        sizes.append(trainer.publish(weights).result(60).bytes)
        return time.monotonic()

    sizes: list[int] = []
    with SeaweedFS(folder / "seaweed") as seaweed:
        let_read(seaweed, "deltawire")
        proxy = Nginx(folder / "nginx", seaweed.ports["s3.port"]) if proxied else None
        url = f"{proxy.url}/{PLACE}" if proxy else f"s3://{PLACE}"
        versions = options.versions + 1
        try:
            with Publisher(seaweed.store(PLACE), anchor_ratio=1e9) as trainer:
                publish()
                with Fleet(url, {**seaweed.environment}, count, versions + 2, options) as fleet:
                    fleet.wait(0)
                    committed, before, meter = {0: time.monotonic()}, Counter[str](), Meter(fleet, seaweed, proxy)
                    began = time.monotonic()
                    for version in range(1, versions):
                        time.sleep(max(0.0, began + version * options.every - time.monotonic()))
                        if version == 1 + LEARNING:
                            before = meter.read()
                        committed[version] = publish()
                        fleet.wait(version)
                    time.sleep(max(0.0, began + versions * options.every - time.monotonic()))
                    cost = meter.read()
                    cost.subtract(before)
                    found = row(fleet, committed, cost, versions - 1 - LEARNING, options)
                    found["bytes_of_a_version"] = statistics.mean(sizes[1 + LEARNING :])
                    if outages and proxy is not None:
                        found["outages"] = [
                            outage("is not there", fleet, proxy, versions, publish, proxy.close, proxy.start, options),
                            outage(
                                "answers 503 with Retry-After: 2", fleet, proxy, versions + 1, publish,
                                lambda: proxy.configure(WRONG["unavailable"]), lambda: proxy.configure({}), options,
                            ),
                        ]  # fmt: skip
                    return found
        finally:
            if proxy is not None:
                proxy.close()


def row(
    fleet: Fleet, committed: dict[int, float], cost: Counter[str], counted: int, options: argparse.Namespace
) -> dict[str, Any]:
    times = fleet.times
    late = {v: times.had[:, v] - at for v, at in committed.items() if v > LEARNING}
    notices = np.concatenate([times.seen[:, v] - at for v, at in committed.items() if v > LEARNING])
    everybody = np.concatenate([*late.values()])
    cpu = {name: value / counted / options.every for name, value in sorted(cost.items()) if "cpu" in name}
    return {
        "followers": times.followers,
        "versions": counted,
        "per_version": {name: round(value / counted, 1) for name, value in sorted(cost.items()) if "cpu" not in name},
        "cpu_share": {name.removesuffix(" cpu"): round(share, 3) for name, share in cpu.items()},
        "had_s": {f"p{share}": round(float(np.percentile(everybody, share)), 2) for share in (50, 99, 100)},
        "last_had_it_s": round(statistics.median(float(each.max()) for each in late.values()), 2),
        # by 21 quantiles, from which the model draws
        "notice_s": [round(max(0.0, float(np.quantile(notices, q / 20))), 3) for q in range(21)],
    }


def outage(
    what: str, fleet: Fleet, proxy: Nginx, version: int, publish: Callable[[], float], begin: Callable[[], None],
    end: Callable[[], None], options: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """A version that is published in an outage, and when followers have it after that."""
    wall = time.time() - time.monotonic()
    time.sleep(2 * BIN_S)
    steady_since = time.monotonic() - options.every
    began = time.monotonic()
    begin()
    time.sleep(options.outage / 2)
    publish()
    time.sleep(max(0.0, began + options.outage - time.monotonic()))
    end()
    ended = time.monotonic()
    fleet.wait(version)
    time.sleep(2.0)
    after = fleet.times.had[:, version] - ended
    answers = proxy.answers
    return {
        "nginx": what,
        "seconds": options.outage,
        "bin_s": BIN_S,
        # followers that had the version so many bins after the end
        "had": np.histogram(after, bins=np.arange(0.0, after.max() + BIN_S, BIN_S))[0].tolist(),
        "last_s": round(float(after.max()), 2),
        "requests_per_second": {
            "before": round(_rate(answers, wall + steady_since, wall + began), 1),
            "meanwhile": round(_rate(answers, wall + began + 2, wall + ended), 1),
            "busiest after": max(
                round(_rate(answers, wall + ended + second, wall + ended + second + 1), 1)
                for second in range(1 + int(after.max()))
            ),
        },
    }


def _rate(answers: list[Answer], since: float, until: float) -> float:
    return sum(since <= answer.at < until for answer in answers) / (until - since)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--followers", type=int, nargs="*", default=[200, 1000, 2000], help="behind an nginx")
    parser.add_argument("--direct", type=int, nargs="*", default=[200, 1000], help="without one")
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two versions")
    parser.add_argument("--poll", type=float, default=1.0)
    parser.add_argument("--outage", type=float, default=20.0, help="seconds of each of the two outages")
    parser.add_argument("--processes", type=int, default=4, help="that share the followers")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    facts = about()
    print_about(facts)
    rows = []
    for way, counts in (("nginx", options.followers), ("direct", options.direct)):
        for count in counts:
            outages = way == "nginx" and count == max(counts)
            with tempfile.TemporaryDirectory(prefix="deltawire-fleet-") as folder:
                found = {"way": way, **measure(Path(folder), count, way == "nginx", outages, options)}
            rows.append(found)
            print(line(found), *map(after, found.get("outages", [])), sep="\n")
    write_json(options.out, {"about": facts, "every_s": options.every, "poll_s": options.poll, "rows": rows})


def line(found: dict[str, Any]) -> str:
    """A line of the table in docs/https.md."""
    per, had = found["per_version"], found["had_s"]
    cpu = found["cpu_share"].get("nginx")
    return (
        f"| {found['followers']:,} {'through nginx' if found['way'] == 'nginx' else 'directly'} | "
        f"{per['requests']:,.0f} | {per['at origin']:,.1f} | {per['bytes'] / 1e6:,.1f} MB | "
        f"{per['bytes of origin'] / 1e6:,.2f} MB | {had['p50']} s, {had['p99']} s, {had['p100']} s | "
        f"{'–' if cpu is None else f'{cpu:.0%}'} |"
    )


def after(found: dict[str, Any]) -> str:
    """A line of the table of outages in docs/https.md."""
    rates, shares = found["requests_per_second"], np.cumsum(found["had"]) / sum(found["had"])
    half, most = (BIN_S * (1 + int(np.searchsorted(shares, share))) for share in (0.5, 0.99))
    return (
        f"| {found['nginx']} | {rates['before']:,.0f} | {rates['meanwhile']:,.0f} | {rates['busiest after']:,.0f} | "
        f"{half:g} s, {most:g} s, {found['last_s']} s |"
    )


def histogram(found: dict[str, Any]) -> list[str]:
    """Lines of the histogram of an outage in docs/https.md."""
    most, bins = max(found["had"]), enumerate(found["had"])
    return [f"{at * BIN_S:4.1f} s {'█' * round(40 * count / most):40} {count}" for at, count in bins]


if __name__ == "__main__":
    main()
