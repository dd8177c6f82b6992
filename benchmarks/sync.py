"""Publish to applied, through a real bucket: how long a version takes from the trainer's call to proven weights.

    sudo python benchmarks/sync.py                       # S3 (SeaweedFS) and Hub, three link speeds, 596 M weights
    python benchmarks/sync.py --links 0 --here           # no root: this machine's loopback, unlimited

Trainer, bucket and replica run in network namespaces of their own, joined by veth pairs whose speed is set by a token
bucket (see _namespaces.py); control goes over pipes, so that only deltawire's traffic is on the link. Weights are
random in the shape of Qwen3-0.6B; every version moves about 1 % of them by an ulp, the small ones first and others each
time, as rounding does to fp32 masters that take a step of size lr. `full` is the same pipeline, an anchor a version.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numba import njit, prange

from _namespaces import Namespaces
from _report import about, print_about, write_json
from _shapes import QWEN3_06B, SMALL, Shape

FIXED = ("raw", "packed", "context")
PHASES = ("detect", "encode", "put", "notice", "fetch", "verify", "decode", "apply", "prove")
RESULTS = Path(__file__).parent / "results" / "sync.json"
KEY, SECRET = "benchmark", "benchmark-secret"
LINKS = [("trainer", "bucket"), ("replica", "bucket")]

Model = dict[str, np.ndarray]


# ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    q, kv = shape.heads * shape.head, shape.kv_heads * shape.head
    per_layer = {
        "self_attn.q_proj.weight": (q, shape.hidden),
        "self_attn.k_proj.weight": (kv, shape.hidden),
        "self_attn.v_proj.weight": (kv, shape.hidden),
        "self_attn.o_proj.weight": (shape.hidden, q),
        "mlp.gate_proj.weight": (shape.inner, shape.hidden),
        "mlp.up_proj.weight": (shape.inner, shape.hidden),
        "mlp.down_proj.weight": (shape.hidden, shape.inner),
        "input_layernorm.weight": (shape.hidden,),
        "post_attention_layernorm.weight": (shape.hidden,),
    }
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    for layer in range(shape.layers):
        result |= {f"model.layers.{layer}.{name}": size for name, size in per_layer.items()}
    return result | {"model.norm.weight": (shape.hidden,)}


def bf16(values: np.ndarray) -> np.ndarray:
    """The bits of float32 values rounded to the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def random_model(shape: Shape) -> Model:
    model = {}
    for number, (name, size) in enumerate(sizes(shape).items()):
        values = np.random.default_rng(number).standard_normal(int(np.prod(size)), np.float32)
        values *= 0.02
        if len(size) == 1:
            values += 1.0
        model[name] = bf16(values).reshape(size)
    return model


def odds(lr: float) -> np.ndarray:
    """How likely a weight is to move by an ulp in a step, by its exponent, in parts of 2³²."""
    ulp = 2.0 ** (np.maximum(np.arange(256), 1) - 127 - 7)
    return (np.minimum(lr / ulp, 0.5) * 2**32).astype(np.uint64)


@njit(parallel=True, cache=True)
def step(bits: np.ndarray, seed: int, odds: np.ndarray) -> int:
    """What a step does to bf16 weights whose fp32 masters lie anywhere between their neighbours: new every time."""
    changed = 0
    for i in prange(bits.size):
        x = np.uint64(i) + np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
        if (x & np.uint64(0xFFFFFFFF)) < odds[(bits[i] >> 7) & 0xFF]:
            up = (x >> np.uint64(40)) & np.uint64(1) or not bits[i] & 0x7FFF
            bits[i] = bits[i] + 1 if up else bits[i] - 1
            changed += 1
    return changed


# ── the three machines ───────────────────────────────────────────────────────────────────────────────────────────────


def say(**value: Any) -> None:
    print(json.dumps(value), flush=True)


def orders() -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in sys.stdin)


def be_bucket(store: str, folder: str) -> None:
    """Serve until standard input ends."""
    if store == "s3":
        from deltawire_wordle.seaweed import SeaweedFS

        server: Any = SeaweedFS(folder, host="0.0.0.0", access_key=KEY, secret_key=SECRET)
    else:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.hub_stand_in import HubStandIn

        server = HubStandIn(Path(folder), host="0.0.0.0", token=SECRET)
    with server:
        say(port=urlsplit(server.endpoint).port)
        sys.stdin.read()


def be_trainer(shape: Shape, lr: float) -> None:
    import deltawire as dw

    model, chances, steps = random_model(shape), odds(lr), 0

    def train() -> int:
        nonlocal steps
        steps += 1
        return sum(step(bits.reshape(-1), steps * 1000 + n, chances) for n, bits in enumerate(model.values()))

    say(ready=True, weights=sum(bits.size for bits in model.values()), changed=train())
    publisher: dw.Publisher | None = None
    for order in orders():
        if "open" in order:
            if publisher is not None:
                publisher.close()
            publisher = dw.Publisher(order["open"], encoding=order["encoding"], anchor_ratio=1e9)
            say(version=publisher.publish(model).result().version)
            continue
        if order["publish"] == "first":
            publisher = dw.Publisher(order["run"], encoding="packed")
        train()
        assert publisher is not None
        began = time.time()
        done = publisher.publish(model).result()
        say(began=began, version=done.version, bytes=done.bytes, timings=done.timings)


def be_replica(shape: Shape) -> None:
    import deltawire as dw

    model = {name: np.zeros(size, np.uint16) for name, size in sizes(shape).items()}
    stop = threading.Event()
    thread: threading.Thread | None = None

    def follow(run: str, stop: threading.Event) -> None:
        replica = dw.Replica(run, heartbeat=0)
        for version in replica.follow(model, stop=stop):
            say(applied=time.time(), version=version, timings=replica.timings)

    say(ready=True)
    for order in orders():
        stop.set()
        if thread is not None:
            thread.join()
        for array in model.values():
            array.fill(0)
        stop = threading.Event()
        thread = threading.Thread(target=follow, args=(order["follow"], stop), daemon=True)
        thread.start()


# ── the experiment ───────────────────────────────────────────────────────────────────────────────────────────────────


class Machine:
    """One of the three, as a process that takes orders."""

    def __init__(self, before: list[str], *arguments: str, environment: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [*before, sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})},
        )  # fmt: skip
        self.first = self.hear()

    def tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended early; see above")
        return json.loads(line)

    def ask(self, **order: Any) -> dict[str, Any]:
        self.tell(**order)
        return self.hear()

    def wait_for(self, version: int) -> dict[str, Any]:
        while (heard := self.hear())["version"] != version:
            pass
        return heard

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class World:
    """A bucket and the ways to reach it; namespaces, or this machine's loopback."""

    def __init__(self, store: str, folder: Path, spaces: Namespaces | None) -> None:
        self.store, self._spaces, self._folder = store, spaces, folder
        self._bucket = Machine(self._on("bucket"), "--role", "bucket", "--store", store, "--folder", str(folder))
        self._port = self._bucket.first["port"]
        self._runs = 0

    def start(self, side: str, *arguments: str, **environment: str) -> Machine:
        address = self._spaces.address("bucket") if self._spaces else "127.0.0.1"
        endpoint = f"http://{address}:{self._port}"
        if self.store == "s3":
            environment |= {
                "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
                "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
            }  # fmt: skip
        else:
            environment |= {"HF_ENDPOINT": endpoint, "HF_TOKEN": SECRET, "HF_HOME": str(self._folder / f"home-{side}")}
        return Machine(self._on(side), "--role", side, *arguments, environment=environment)

    def new_run(self) -> str:
        self._runs += 1
        place = "s3://deltawire" if self.store == "s3" else "hf://buckets/me/benchmark"
        return f"{place}/run-{self._runs}"

    def close(self) -> None:
        self._bucket.close()

    def _on(self, side: str) -> list[str]:
        return self._spaces.command(side) if self._spaces else []


def versions(trainer: Machine, replica: Machine, repeats: int) -> list[dict[str, Any]]:
    """Publish, wait until it is applied, and say where the time went."""
    found = []
    for _ in range(repeats):
        sent = trainer.ask(publish="next")
        found.append(_account(sent, replica.wait_for(sent["version"])))
    return found


def _account(sent: dict[str, Any], applied: dict[str, Any]) -> dict[str, Any]:
    total = applied["applied"] - sent["began"]
    phases = {name: sent["timings"].get(name, 0.0) for name in ("encode", "put")}
    held, upload = sent["timings"]["held"], sum(phases.values())
    # a version that is streamed is encoded and uploaded before the call returns, any other after it
    phases["detect"] = held - upload if held > upload else held
    phases |= {name: seconds for name, seconds in applied["timings"].items() if name in PHASES}
    # the manifest's own way: created, seen by the replica's next look, read
    phases["notice"] = total - sum(phases.values())
    return {"seconds": total, "bytes": sent["bytes"], "phases": {name: phases.get(name, 0.0) for name in PHASES}}


def measure(
    store: str, links: list[float | None], shape: str, lr: float, repeats: int, spaces: Namespaces | None
) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="deltawire-sync-", ignore_cleanup_errors=True) as folder:
        world = World(store, Path(folder), spaces)
        trainer = world.start("trainer", "--shape", shape, "--lr", str(lr))
        replica = world.start("replica", "--shape", shape)
        weights, changed = trainer.first["weights"], trainer.first["changed"]
        print(f"{store}: {weights / 1e6:.0f} M weights, {100 * changed / weights:.2f} % change in every version")
        try:
            run = world.new_run()
            trainer.ask(open=run, encoding="packed")
            replica.tell(follow=run)
            replica.wait_for(0)
            # once, not counted: compiled kernels, open connections
            for encoding in FIXED:
                trainer.ask(open=run, encoding=encoding)
                versions(trainer, replica, 1)
            for mbit in links:
                if spaces:
                    spaces.shape(mbit)
                for encoding in (*FIXED, "auto"):
                    trainer.ask(open=run, encoding=encoding)
                    found = versions(trainer, replica, repeats + (encoding == "auto"))
                    rows.append(_row(store, mbit, encoding, found[-repeats:]))
                whole = world.new_run()
                replica.tell(follow=whole)
                sent = trainer.ask(publish="first", run=whole)
                rows.append(_row(store, mbit, "full", [_account(sent, replica.wait_for(0))]))
                # and back to the run with deltas, at full speed
                if spaces:
                    spaces.shape(None)
                replica.tell(follow=run)
                replica.wait_for(trainer.ask(open=run, encoding="packed")["version"])
        finally:
            for machine in (trainer, replica, world):
                machine.close()
    return rows


def _row(store: str, mbit: float | None, encoding: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    middle = sorted(found, key=lambda one: one["seconds"])[(len(found) - 1) // 2]
    row = {"store": store, "mbit": mbit, "encoding": encoding, "all": [one["seconds"] for one in found], **middle}
    split = "  ".join(f"{name} {row['phases'][name]:.2f}" for name in PHASES)
    print(f"{store:4}{_speed(mbit):>12}  {encoding:8}{row['seconds']:8.2f} s {row['bytes'] / 1e6:8.1f} MB   {split}")
    return row


def _speed(mbit: float | None) -> str:
    return "unlimited" if mbit is None else f"{mbit:g} Mbit/s"


def share(counts: list[int], lr: float, spaces: Namespaces) -> list[dict[str, Any]]:
    """Replicas on one host with a shared cache: what the host fetches for one version, as its link counts it."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="deltawire-sync-", ignore_cleanup_errors=True) as folder:
        world = World("s3", Path(folder), spaces)
        trainer = world.start("trainer", "--shape", "small", "--lr", str(lr))
        try:
            for count in counts:
                run = world.new_run()
                trainer.ask(open=run, encoding="packed")
                cache = str(Path(folder) / f"cache-{count}")
                fleet = [world.start("replica", "--shape", "small", DELTAWIRE_CACHE=cache) for _ in range(count)]
                try:
                    for replica in fleet:
                        replica.tell(follow=run)
                    for replica in fleet:
                        replica.wait_for(0)
                    fetched = []
                    for _ in range(3):
                        before = spaces.sent("bucket", to="replica")
                        sent = trainer.ask(publish="next")
                        late = [replica.wait_for(sent["version"])["applied"] - sent["began"] for replica in fleet]
                        fetched.append((spaces.sent("bucket", to="replica") - before, sent["bytes"], max(late)))
                finally:
                    for replica in fleet:
                        replica.close()
                host, size, slowest = sorted(fetched)[1]
                rows.append({"replicas": count, "host_bytes": host, "version_bytes": size, "slowest": slowest})
                print(
                    f"{count:3} replicas: the host fetched {host / 1e6:.2f} MB for a version of {size / 1e6:.2f} MB; "
                    f"the last one had it after {slowest:.2f} s"
                )
        finally:
            trainer.close()
            world.close()
    return rows


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ratios that were aimed for, from rows of one store and link each."""
    verdicts = []
    for store, mbit in dict.fromkeys((row["store"], row["mbit"]) for row in rows):
        times = {row["encoding"]: row["seconds"] for row in rows if (row["store"], row["mbit"]) == (store, mbit)}
        best = min(FIXED, key=lambda name: times[name])
        verdict = {
            "store": store,
            "mbit": mbit,
            "full_over_auto": times["full"] / times["auto"],
            "raw_over_auto": times["raw"] / times["auto"],
            "auto_over_best": times["auto"] / times[best],
            "best": best,
        }
        verdicts.append(verdict)
        print(
            f"{store:4}{_speed(mbit):>12}: auto is {verdict['full_over_auto']:.1f}× faster than full, "
            f"{verdict['raw_over_auto']:.2f}× than raw; {verdict['auto_over_best']:.2f}× the time of the best ({best})"
        )
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stores", nargs="+", default=["s3", "hub"], choices=["s3", "hub"])
    parser.add_argument("--links", nargs="+", type=float, default=[0, 1000, 100], help="Mbit/s; 0 is unlimited")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=["small", "qwen3-0.6b"])
    parser.add_argument("--lr", type=float, default=2.2e-7, help="size of a step; 2.2e-7 changes about 1 %%")
    parser.add_argument("--repeats", type=int, default=3, help="versions per row; the middle one is shown")
    parser.add_argument("--replicas", nargs="*", type=int, default=[1, 4, 16], help="fleets on one host (30 M weights)")
    parser.add_argument("--here", action="store_true", help="on loopback, without namespaces: unlimited links only")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--role", choices=["bucket", "trainer", "replica"], help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    shape = SMALL if chosen.shape == "small" else QWEN3_06B
    roles: dict[str, Callable[[], None]] = {
        "bucket": lambda: be_bucket(chosen.store, chosen.folder),
        "trainer": lambda: be_trainer(shape, chosen.lr),
        "replica": lambda: be_replica(shape),
    }
    if chosen.role:
        roles[chosen.role]()
        return
    links = [mbit or None for mbit in chosen.links]
    if chosen.here and any(links):
        parser.error("--here has no links to shape; use --links 0")
    facts = about()
    print_about(facts)
    with contextlib.nullcontext() if chosen.here else Namespaces(LINKS) as spaces:
        rows = []
        for store in chosen.stores:
            rows += measure(store, links, chosen.shape, chosen.lr, chosen.repeats, spaces)
        print()
        verdicts = judge(rows)
        fleets = share(chosen.replicas, chosen.lr, spaces) if spaces and chosen.replicas else []
    write_json(chosen.out, {"about": facts, "rows": rows, "verdicts": verdicts, "fleets": fleets})


if __name__ == "__main__":
    main()
