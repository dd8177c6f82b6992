"""Two regions: a trainer, a bucket and a keeper in one, a mirror and replicas in the other, and a minute in which the
mirror is cut off.

    python benchmarks/mirrors.py                    # a cut of 60 s; writes results/mirrors.json
    python benchmarks/mirrors.py --cut 5 --versions 12

Both buckets are S3 servers (SeaweedFS). `deltawire keep --mirror` copies the run. Replicas read `s3://eu/…,s3://us/…`:
the bucket of their region, or the other one while theirs is cut off. The cut is a proxy before the mirror that resets
every connection, for the keeper too. A version is published every second all the time.

Checked: every state of every replica is what was published, by a hash of its bytes; no replica fetches full weights
after its first sync; afterwards both buckets verify, and hold the same objects. Counted: bytes from each bucket, the
longest time without a new version, and how long the mirror takes to catch up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from _report import about, print_about, write_json
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core import keys
from deltawire.replica import Replica
from deltawire.store import MirroredStore, ObjectStore, Retrying
from deltawire.trainer import Publisher
from deltawire_wordle.counting import CountingStore
from deltawire_wordle.seaweed import SeaweedFS
from soak.ledger import Weights, hash_of
from soak.proxy import Proxy

HOME, MIRROR = "deltawire/us/chat", "deltawire/eu/chat"
FOLDERS = (keys.ANCHORS, keys.DELTAS, keys.FILES, keys.VERSIONS)
RESULTS = Path(__file__).parent / "results" / "mirrors.json"


class Bucket(CountingStore):
    """Counts what was read, and how much of it was full weights."""

    def __init__(self, inner: Any) -> None:
        self.anchor_bytes = 0
        super().__init__(inner)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = super().get_range(key, start, length)
        self.anchor_bytes += len(data) * key.startswith(keys.ANCHORS)
        return data


class Follower:
    """A replica in the far region, and every state it had."""

    def __init__(self, number: int, near: Any, far: Any, shape: Weights, stop: threading.Event) -> None:
        self.buckets = Bucket(near), Bucket(far)
        retried = [Retrying(bucket, attempts=3, total_s=5.0) for bucket in self.buckets]
        self.store = MirroredStore(retried, back_s=5.0)
        self.weights = {name: np.zeros_like(array) for name, array in shape.items()}
        self.states: list[tuple[float, int, str, str]] = []
        """Seconds, version, hash of the weights, bucket in use."""
        self.first_anchor = 0
        self._replica, self._stop = Replica(self.store, id=f"eu-{number}"), stop
        self.thread = threading.Thread(target=self._follow)
        self.thread.start()

    def _follow(self) -> None:
        for version in self._replica.follow(self.weights, poll=0.5, stop=self._stop):
            self.states.append((time.monotonic(), version, hash_of(self.weights), self.store.current.url))
            if len(self.states) == 1:
                self.first_anchor = self.anchors

    @property
    def anchors(self) -> int:
        return sum(bucket.anchor_bytes for bucket in self.buckets)


def run(cut_s: float, versions: int, replicas: int) -> dict[str, Any]:
    published: dict[int, str] = {}
    weights: Weights = {f"layers.{n}.weight": np.zeros((256, 512), np.uint16) for n in range(4)}
    dice, stop = np.random.default_rng(0), threading.Event()
    with tempfile.TemporaryDirectory() as folder, SeaweedFS() as us, SeaweedFS() as eu:
        proxy = Proxy([eu.ports["s3.port"]], Path(folder) / "proxy.log")
        abroad = {**eu.environment, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.ports[0]}"}
        home = us.store(HOME)

        def mirror() -> ObjectStore:
            return ObjectStore.from_url(f"s3://{MIRROR}", retries=0, environ=abroad)

        publisher = Publisher(home, anchor_ratio=1e9)

        def publish() -> None:
            for array in weights.values():
                flat = array.reshape(-1)
                flat[dice.integers(0, flat.size, flat.size // 100)] += np.uint16(1)
            version = publisher.publish(weights).result(60).version
            published[version] = hash_of(weights)

        publish()
        # two servers of S3: the second one's settings are in its address
        where = f"s3://{MIRROR}?endpoint={abroad['AWS_ENDPOINT_URL']}"
        command = [sys.executable, "-m", "deltawire.cli", "keep", f"s3://{HOME}", "--mirror", where]
        with open(Path(folder) / "keeper.log", "wb") as log:
            keeper = subprocess.Popen(command, env={**os.environ, **us.environment}, stdout=log, stderr=log)
        followers: list[Follower] = []
        try:
            while not _has(eu.store(MIRROR), 0):
                assert keeper.poll() is None, (Path(folder) / "keeper.log").read_text()[-2000:]
                time.sleep(0.2)
            followers += [Follower(n, mirror(), us.store(HOME), weights, stop) for n in range(replicas)]

            def train(seconds: float) -> None:
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    began = time.monotonic()
                    publish()
                    time.sleep(max(1 - (time.monotonic() - began), 0))

            train(versions)
            proxy.set([0], "cut")
            began = time.monotonic()
            train(cut_s)
            proxy.set([0], "pass")
            restored, missed = time.monotonic(), max(published)
            caught_up: list[float] = []

            def watch() -> None:
                while not _has(eu.store(MIRROR), missed):
                    time.sleep(0.2)
                caught_up.append(time.monotonic() - restored)

            watcher = threading.Thread(target=watch)
            watcher.start()
            train(versions)
            watcher.join()
            newest = max(published)
            while not _has(eu.store(MIRROR), newest):
                time.sleep(0.2)
            while any(follower.states[-1][1] < newest for follower in followers):
                time.sleep(0.2)
            # the mirror copies the last links too
            time.sleep(5)
        finally:
            stop.set()
            for follower in followers:
                follower.thread.join()
            keeper.terminate()
            keeper.wait()
            publisher.close()
            proxy.close()
        return judge(published, followers, Run.open(home), Run.open(eu.store(MIRROR)), began, restored) | {
            "cut_s": round(restored - began, 1),
            "mirror_caught_up_s": round(caught_up[0], 1),
            "anchor_bytes": sum(array.nbytes for array in weights.values()),
        }


def _has(store: Any, version: int) -> bool:
    try:
        return Run.open(store).exists(version)
    except Exception:
        return False


def judge(
    published: dict[int, str], followers: list[Follower], home: Run, mirror: Run, began: float, restored: float
) -> dict[str, Any]:
    wrong = [
        (version, url) for f in followers for _, version, state, url in f.states if state != published.get(version)
    ]
    gaps = [b[0] - a[0] for f in followers for a, b in zip(f.states, f.states[1:], strict=False)]
    used = [
        [{url for at, _, _, url in f.states if first <= at < last} for f in followers]
        for first, last in ((0.0, began), (began + 10, restored), (restored + 15, float("inf")))
    ]
    objects = [
        {item.key: item.size for item in run.store.list() if item.key.startswith(FOLDERS)} for run in (home, mirror)
    ]
    return {
        "replicas": len(followers),
        "versions": len(published),
        "states_checked": sum(len(follower.states) for follower in followers),
        "wrong_states": wrong,
        "full_bytes_after_the_first_sync": sum(follower.anchors - follower.first_anchor for follower in followers),
        "bytes_from_the_mirror": sum(follower.buckets[0].bytes_in for follower in followers),
        "bytes_from_home": sum(follower.buckets[1].bytes_in for follower in followers),
        "longest_without_a_version_s": round(max(gaps), 1),
        "buckets_used_before_during_after": [[sorted(urls) for urls in part] for part in used],
        "home_verifies": verify(home).failure is None,
        "mirror_verifies": verify(mirror).failure is None,
        "same_objects": objects[0] == objects[1],
        "objects": len(objects[0]),
    }


def problems(found: dict[str, Any]) -> list[str]:
    """What must not be."""
    said = [f"wrong states: {found['wrong_states']}"] if found["wrong_states"] else []
    if found["full_bytes_after_the_first_sync"]:
        said.append(f"{found['full_bytes_after_the_first_sync']:,} bytes of full weights were fetched again")
    said += [f"{name} is not so" for name in ("home_verifies", "mirror_verifies", "same_objects") if not found[name]]
    if not found["bytes_from_home"] or not found["bytes_from_the_mirror"]:
        said.append("one of the buckets was never used")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cut", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--versions", type=int, default=30, help="before and after the cut, one a second (%(default)s)")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    facts = about()
    print_about(facts)
    found = run(given.cut, given.versions, given.replicas)
    print(json.dumps(found, indent=2))
    write_json(given.out, {"about": facts, **found})
    if said := problems(found):
        raise SystemExit("; ".join(said))


if __name__ == "__main__":
    main()
