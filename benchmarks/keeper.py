"""A trainer on a slow link, with and without a keeper: what it uploads, what versions wait for, how far replicas lag.

    sudo python benchmarks/keeper.py                     # two runs of two and a half minutes

    trainer ── 20 Mbit/s ── bucket (SeaweedFS) ── keeper, replica-0 … replica-3 (as fast as the machine)

Each is a process in a network namespace of its own. The model has 8 M random bf16 weights (16 MB). A step takes one
second and moves 3 % of them by an ulp, others each time: after 70 steps deltas take as many bytes as an anchor, so
half of what a trainer alone uploads is anchors. Both cases begin when all replicas have version 0. The lag of the first
five versions is not counted: kernels are compiled then.
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
from collections import deque
from pathlib import Path
from statistics import fmean, median
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from _namespaces import Namespaces
from _report import about, print_about, write_json

RESULTS = Path(__file__).parent / "results" / "keeper.json"
REPLICAS = [f"replica-{n}" for n in range(4)]
LINKS = [("trainer", "bucket"), ("keeper", "bucket"), *((name, "bucket") for name in REPLICAS)]
RUN = "s3://deltawire/run"
KEY, SECRET = "benchmark", "benchmark-secret"
SHARE = 0.03


def say(**value: Any) -> None:
    print(json.dumps(value), flush=True)


def be_bucket(given: argparse.Namespace) -> None:
    from deltawire_wordle.seaweed import SeaweedFS

    with SeaweedFS(given.folder, host="0.0.0.0", access_key=KEY, secret_key=SECRET) as server:
        say(port=urlsplit(server.endpoint).port)
        sys.stdin.read()


def blank(given: argparse.Namespace) -> dict[str, np.ndarray]:
    return {f"layers.{n}": np.zeros((1024, given.weights // 4096), np.uint16) for n in range(4)}


def be_trainer(given: argparse.Namespace) -> None:
    """Train for a while: a step a second, of which most is waiting, as for a GPU."""
    import deltawire as dw

    rng = np.random.default_rng(0)
    model = blank(given)
    for bits in model.values():
        values = rng.standard_normal(bits.size, np.float32) * 0.02
        bits.reshape(-1)[:] = values.view(np.uint32) >> 16
    waiting: deque[float] = deque()

    def committed(published: dw.Published) -> None:
        now = time.time()
        delays = [now - waiting.popleft() for _ in range(published.publishes)]
        say(version=published.version, at=now, delays=delays, kinds=published.kinds, bytes=published.bytes)

    publisher = dw.Publisher(RUN, encoding="packed", on_version=committed)
    waiting.append(time.time())
    publisher.publish(model).result()
    sys.stdin.readline()
    end, steps = time.monotonic() + given.seconds, 0
    following = time.monotonic()
    while time.monotonic() < end:
        steps += 1
        following += 1.0
        for bits in model.values():
            where = rng.integers(0, bits.size, int(SHARE * bits.size))
            bits.reshape(-1)[where] += np.uint16(1)
        waiting.append(time.time())
        publisher.publish(model, step=steps)
        time.sleep(max(0.0, following - time.monotonic()))
    say(steps=steps)
    publisher.close()
    say(done=publisher.version)


def be_replica(given: argparse.Namespace) -> None:
    import deltawire as dw

    model = blank(given)
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    replica = dw.Replica(RUN, id=given.name)
    for version in replica.follow(model, poll=0.2, stop=stop):
        say(version=version, at=time.time())


class Machine:
    """A process in a namespace, and all that it has said so far."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        self.said: list[dict[str, Any]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(json.loads(line))

    def wait_for(self, name: str, least: int = 0, seconds: float = 600.0) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for one in list(self.said):
                if name in one and one[name] >= least:
                    return one
            if self.process.poll() is not None:
                time.sleep(0.5)
                if not any(name in one for one in self.said):
                    raise SystemExit(f"{self.process.args} ended early; see above")
            time.sleep(0.05)
        raise SystemExit(f"no {name} ≥ {least} after {seconds:.0f} s")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def measure(given: argparse.Namespace, with_keeper: bool) -> dict[str, Any]:
    machines: list[Machine] = []
    with Namespaces(LINKS) as spaces, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = {"NO_PROXY": "*", "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
                       "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true", "DELTAWIRE_THREADS": "1"}  # fmt: skip

        def start(where: str, role: str) -> Machine:
            command = [*spaces.command(where), sys.executable, __file__, "--role", role, "--name", where]
            command += ["--folder", folder, "--seconds", str(given.seconds), "--weights", str(given.weights)]
            machines.append(Machine(command, environment))
            return machines[-1]

        try:
            port = start("bucket", "bucket").wait_for("port")["port"]
            environment["AWS_ENDPOINT_URL"] = f"http://{spaces.address('bucket')}:{port}"
            spaces.shape(given.mbit, ("trainer", "bucket"))
            trainer = start("trainer", "trainer")
            trainer.wait_for("version")
            replicas = [start(name, "replica") for name in REPLICAS]
            if with_keeper:
                command = [
                    sys.executable,
                    "-m",
                    "deltawire.cli",
                    "keep",
                    RUN,
                    "--poll",
                    "0.2",
                    "--json",
                    "--since",
                    "0",
                ]
                machines.append(Machine([*spaces.command("keeper"), *command], environment))
            for replica in replicas:
                replica.wait_for("version")
            time.sleep(8.0)  # all of them are compiled and at rest
            before = spaces.sent("trainer", "bucket")
            assert trainer.process.stdin is not None
            trainer.process.stdin.write("go\n")
            trainer.process.stdin.flush()
            newest = trainer.wait_for("done", seconds=given.seconds + 300)["done"]
            sent = spaces.sent("trainer", "bucket") - before
            for replica in replicas:
                replica.wait_for("version", newest)
            verified = subprocess.run(
                [*spaces.command("bucket"), sys.executable, "-m", "deltawire.cli", "verify", RUN, "--json"],
                env={**os.environ, **environment}, capture_output=True, text=True,
            )  # fmt: skip
            kept = machines[-1].said if with_keeper else []
        finally:
            for machine in reversed(machines):
                machine.close()
    versions = [one for one in trainer.said if one.get("version")]
    delays = sorted(delay for one in versions for delay in one["delays"])
    commits = {one["version"]: one["at"] for one in versions}
    # from the trainer's call for the newest step in a version until a replica has proven it
    calls = {one["version"]: one["at"] - one["delays"][-1] for one in versions}
    lags = sorted(
        min(one["at"] for one in replica.said if one["version"] >= version) - calls[version]
        for replica in replicas
        for version in commits
        if version > 5
    )
    anchors = [one for one in versions if "anchor" in one["kinds"]]
    return {
        "keeper": with_keeper,
        "steps": (steps := trainer.wait_for("steps")["steps"]),
        "steps_per_minute": round(60 * steps / given.seconds, 1),
        "versions": len(versions),
        "versions_per_minute": round(60 * len(versions) / given.seconds, 1),
        "trainer_sent_bytes": sent,
        "trainer_object_bytes": sum(one["bytes"] for one in versions),
        "trainer_anchors": len(anchors),
        "keeper_anchors": sum(x["kind"] == "anchor" for one in kept for x in one.get("added", ())),
        "keeper_skips": sum(x["kind"] == "delta" for one in kept for x in one.get("added", ())),
        "commit_s": {"median": round(median(delays), 3), "longest": round(delays[-1], 3)},
        "longest_delay_by_an_anchor_s": round(max((d for x in anchors for d in x["delays"]), default=0.0), 3),
        "lag_s": {
            "mean": round(fmean(lags), 3),
            "median": round(median(lags), 3),
            "p99": round(lags[int(0.99 * len(lags))], 3),
            "longest": round(lags[-1], 3),
        },
        "verified": verified.returncode == 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--mbit", type=float, default=20.0)
    parser.add_argument("--weights", type=int, default=1 << 23)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--role", choices=("bucket", "trainer", "replica"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        {"bucket": be_bucket, "trainer": be_trainer, "replica": be_replica}[given.role](given)
        return
    facts = about()
    print_about(facts)
    rows = []
    for with_keeper in (False, True):
        rows.append(measure(given, with_keeper))
        print(json.dumps(rows[-1]), flush=True)
    full = 2 * given.weights
    write_json(
        given.out, {"about": facts, "mbit": given.mbit, "weights": given.weights, "full_bytes": full, "runs": rows}
    )


if __name__ == "__main__":
    main()
