"""How much of a training step `publish` takes, with each detector, and what each costs in memory.

    python benchmarks/held.py                     # Qwen3-0.6B's shape on a GPU, a small one on a CPU (four minutes)
    python benchmarks/held.py --shape small --only snapshot,adamw

A step is a real AdamW step over constant gradients (about 1 % of the bf16 weights change) and then time in
which training would do the rest: `--step` seconds in all. After each step comes a publish. `held` is how long the call
keeps the trainer's thread when nothing else is queued; `stream` is how long it keeps the trainer's stream, by CUDA
events, when training has queued work ahead as it does in practice (every second publish is measured so). Then the same
with a bucket made 100 times slower: held must stay, versions merge, memory stay bounded. Last, a replica takes the
run's last versions one by one and must have the trainer's bits.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import resource
import statistics
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from _report import about, print_about, write_json
from deltawire import Publisher, Replica
from deltawire.kernels import apply, detect
from deltawire.store import ObjectStore
from deltawire.store.base import Chunks
from deltawire.trainer import DeltaAdamW, FusedDetector, HostDetector, SnapshotDetector
from kernels import SHAPES, Shape

KINDS = ("snapshot", "fused", "adamw", "streamed", "host")
QUEUED_CYCLES = 20_000_000
"""Of the device's clock, about 10 ms: work that training queued before it published."""
LEARNING_RATE = 2.5e-7
"""Constant gradients make every step a whole one: this much of it changes about 1 % of the weights."""
TIMED_SYNCS = 4
TARGET_SHARE = 0.01
TARGET_STREAM_MS = 4.0
TARGET_PAUSE_MS = 2.0
TARGET_RATIO = 1.15


@dataclass(slots=True)
class Held:
    detector: str
    bucket: str
    share: float
    # of a step
    held_ms: float
    # median over publishes, the first (which takes the weights over) left out
    worst_ms: float
    stream_ms: float | None
    encode_ms: float
    put_ms: float
    publishes: int
    versions: int
    extra_device_mb: float
    # the most that was allocated beyond weights, gradients and moments
    extra_host_mb: float
    # the most that the process grew by: the bucket itself lies in its memory
    changed_percent: float
    weights_m: float
    fits_m: float
    # millions of weights that would be held for 1 % of a step, if time goes with size


class Bucket(ObjectStore):
    """In memory, where a delta takes as long as it is made to."""

    delta_seconds = 0.0

    def put(self, key: str, data: bytes | Chunks) -> None:
        super().put(key, data)
        if key.startswith("deltas/"):
            time.sleep(self.delta_seconds)


class Training:
    """Weights, gradients and an optimizer; fp32 masters."""

    def __init__(self, shape: Shape, kind: str, device: torch.device) -> None:
        random = torch.Generator(device).manual_seed(1)
        self.device, self.kind = device, kind
        self.params = {
            name: torch.nn.Parameter(torch.randn(size, generator=random, device=device) * 0.02)
            for name, size in shape.tensors()
        }
        for p in self.params.values():
            p.grad = torch.randn(p.shape, generator=random, device=device) * 1e-3
        self.copies = {n: p.detach().bfloat16() for n, p in self.params.items()} if kind == "fused" else {}
        make: Callable[..., Any] = DeltaAdamW if kind == "adamw" else torch.optim.AdamW
        self.optimizer = make(self.params.values(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        self.optimizer.step()

    def detector(self) -> Any:
        return {
            "snapshot": SnapshotDetector,
            "fused": lambda: FusedDetector(self.copies),
            "adamw": lambda: self.optimizer,
            "streamed": lambda: SnapshotDetector(memory="host"),
            "host": HostDetector,
        }[self.kind]()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def bits(self) -> dict[str, Tensor]:
        return {name: p.detach().bfloat16().view(torch.int16) for name, p in self.params.items()}


def held(training: Training, bucket: Bucket, label: str, publishes: int, step: float, encoding: str = "packed") -> Held:
    cuda = training.device.type == "cuda"
    training.wait()
    gc.collect()
    before = torch.cuda.memory_allocated() if cuda else 0
    resident = most = resident_mb()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    handles, walls, streams = [], [], []
    publisher = Publisher(bucket, encoding=encoding, detector=training.detector(), wire_dtype="bf16", anchor_ratio=1e9)
    publisher.publish(training.params).result()
    for number in range(2 * publishes if cuda else publishes + 1):
        clock = time.perf_counter()
        training.optimizer.step()
        training.wait()
        queued = cuda and number % 2 == 0
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if queued else []
        if queued:
            torch.cuda._sleep(QUEUED_CYCLES)
            events[0].record()
        began = time.perf_counter()
        handles.append(publisher.publish(training.params))
        wall = time.perf_counter() - began
        most = max(most, resident_mb())
        if queued:
            events[1].record()
        training.wait()
        # the first has kernels to compile and memory to find
        if number and queued:
            streams.append(events[0].elapsed_time(events[1]))
        elif number:
            walls.append(wall)
        time.sleep(max(0.0, step - (time.perf_counter() - clock)))
    publisher.flush()
    done = [handle.result() for handle in handles]
    extra = (torch.cuda.max_memory_allocated() - before) / 1e6 if cuda else 0.0
    publisher.close()
    weights = sum(p.numel() for p in training.params.values()) / 1e6
    share = statistics.median(walls) / step
    versions = {p.version: p for p in done}
    return Held(
        training.kind,
        label,
        share,
        1e3 * statistics.median(walls),
        1e3 * max(walls),
        statistics.median(streams) if cuda else None,
        statistics.median(1e3 * p.timings["encode"] for p in versions.values()),
        statistics.median(1e3 * p.timings["put"] for p in versions.values()),
        len(handles),
        len(versions),
        extra,
        most - resident,
        statistics.median(100 * p.density / p.publishes for p in versions.values()),
        weights,
        weights * TARGET_SHARE / share,
    )


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def check(training: Training, bucket: Bucket, newest: int) -> dict[str, float]:
    """A replica on the same device takes the last versions one by one and must have the trainer's bits at the end.

    Medians of its phases in ms, and the longest pause: from the first write to the proof.
    """
    live = {n: torch.zeros(p.shape, dtype=torch.bfloat16, device=training.device) for n, p in training.params.items()}
    replica = Replica(bucket, heartbeat=0)
    seen: list[dict[str, float]] = []
    for version in range(max(0, newest - TIMED_SYNCS - 1), newest + 1):
        replica.sync(live, version)
        seen.append(dict(replica.timings))
    for name, bits in training.bits().items():
        if not torch.equal(live[name].view(torch.int16), bits):
            raise SystemExit(f"{training.kind}: a replica of version {newest} differs from the trainer in {name}")
    # the first was an anchor, the next had kernels to compile and memory to find
    timed = seen[2:] or seen[-1:]
    result = {phase: statistics.median(t.get(phase, 0.0) for t in timed) for phase in timed[-1]}
    result["pause, worst"] = max(t.get("apply", 0.0) + t.get("prove", 0.0) for t in timed)
    return {phase: round(1e3 * seconds, 3) for phase, seconds in result.items()}


def time_steps(shape: Shape, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """The optimizers side by side: torch's fused step, ours, and torch's followed by a snapshot and compare."""
    rows = []

    def measure(what: str, work: Callable[[], object], after: Callable[[], object] = lambda: None) -> None:
        times, walls = [], []
        for number in range(repeats + 3):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
            if events:
                torch.cuda.synchronize()
                events[0].record()
            clock = time.perf_counter()
            work()
            if events:
                events[1].record()
                torch.cuda.synchronize()
            wall = 1e3 * (time.perf_counter() - clock)
            if number >= 3:
                walls.append(wall)
                times.append(events[0].elapsed_time(events[1]) if events else wall)
            after()
        rows.append({"what": what, "ms": statistics.median(times), "wall_ms": statistics.median(walls)})
        ratio = rows[-1]["ms"] / rows[0]["ms"]
        print(f"  {what:44} {rows[-1]['ms']:8.3f} ms  {ratio:5.2f} x  wall {rows[-1]['wall_ms']:.3f} ms", flush=True)

    def references() -> None:
        training = Training(shape, "snapshot", device)
        measure("torch.optim.AdamW(fused=True)", training.optimizer.step)
        old = [p.detach().bfloat16() for p in training.params.values()]
        masters = [p.detach() for p in training.params.values()]

        def compared() -> None:
            training.optimizer.step()
            apply(old, detect(old, masters))

        measure("the same, snapshot and compare", compared)

    references()
    gc.collect()
    ours = Training(shape, "adamw", device)
    measure("DeltaAdamW, nobody follows", ours.optimizer.step)
    ours.optimizer._follow()
    measure("DeltaAdamW, noting what changes", ours.optimizer.step, after=ours.optimizer._follow)
    print(f"  its log: {ours.optimizer._log.nbytes / 1e6:.0f} MB")
    rows[-1]["log_mb"] = ours.optimizer._log.nbytes / 1e6
    return rows


def compare_updates(device: torch.device, steps: int = 200) -> dict[str, float]:
    """DeltaAdamW beside torch's over many steps with decay, groups and a changing rate; each step from the same state.

    The largest difference, in ulps of the larger of the parameter and its step.
    """
    random = torch.Generator(device).manual_seed(2)
    sizes = [(512, 512), (4096,), (300, 70)]
    start = [torch.randn(s, generator=random, device=device) * 0.02 for s in sizes]
    lists = [[torch.nn.Parameter(t.clone()) for t in start] for _ in range(2)]
    groups = [
        [{"params": ps[:2], "weight_decay": 0.1}, {"params": ps[2:], "weight_decay": 0.0, "betas": (0.8, 0.95)}]
        for ps in lists
    ]
    ours, theirs = DeltaAdamW(groups[0], lr=1e-4), torch.optim.AdamW(groups[1], lr=1e-4, fused=True)
    worst = 0.0
    for step in range(steps):
        before = [p.detach().clone() for p in lists[1]]
        for a, b in zip(*lists, strict=True):
            a.grad = torch.randn(a.shape, generator=random, device=device) * 0.01
            b.grad = a.grad.clone()
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = 1e-4 * (1 + step % 7)
            optimizer.step()
        for a, b, was in zip(*lists, before, strict=True):
            size = torch.maximum(b.detach().abs(), (b.detach() - was).abs()).clamp(min=1e-30)
            ulp = torch.exp2(torch.floor(torch.log2(size)) - 23)
            worst = max(worst, float(((a - b).detach().abs() / ulp).max()))
        with torch.no_grad():
            for a, b in zip(*lists, strict=True):
                a.copy_(b)
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    return {"steps": steps, "largest_ulps": worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b" if cuda else "small")
    parser.add_argument("--step", type=float, default=1.0, help="seconds a training step takes")
    parser.add_argument("--publishes", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=20 if cuda else 5, help="optimizer steps that are timed")
    parser.add_argument("--only", default=",".join(KINDS), help="detectors, by comma")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the JSON")
    options = parser.parse_args()
    device = torch.device("cuda" if cuda else "cpu")
    facts = about()
    # what else the machine is doing, and who goes first: on a CPU that is most of the spread
    facts["load"], facts["nice"] = os.getloadavg()[0], os.nice(0)
    if cuda:
        facts["machine"] = f"{torch.cuda.get_device_name()}; {facts['machine']}"
    print_about(facts)
    shape = SHAPES[options.shape]

    for kind in options.only.split(","):
        # compile what compiles at its first use
        held(Training(SHAPES["small"], kind, device), Bucket.from_url(f"memory://{uuid.uuid4()}"), "", 2, 0.01)
    print("optimizer steps")
    steps = time_steps(shape, device, options.repeats)
    updates = compare_updates(device)
    print(f"  largest difference from torch in any of {updates['steps']} steps: {updates['largest_ulps']:.2f} ulps")

    rows: list[Held] = []
    replicas: dict[str, dict[str, float]] = {}
    print(f"\npublishing after every step of {options.step:g} s")
    for kind in options.only.split(","):
        gc.collect()
        training = Training(shape, kind, device)
        bucket = Bucket.from_url(f"memory://{uuid.uuid4()}")
        row = held(training, bucket, "fast", options.publishes, options.step)
        rows.append(row)
        _print(row)
        replicas[kind] = check(training, bucket, row.versions)
        print(f"    replica, ms: {replicas[kind]}", flush=True)
        if kind in ("snapshot" if cuda else "host", "adamw"):
            slow = Bucket.from_url(f"memory://{uuid.uuid4()}")
            # a hundred times what an upload takes, or enough for versions to merge
            slow.delta_seconds = max(  # type: ignore[attr-defined]
                100 * row.put_ms / 1e3, 3 * options.step
            )
            rows.append(held(training, slow, "slow", 2 * options.publishes, options.step))
            _print(rows[-1])
            check(training, slow, rows[-1].versions)
        if kind == "snapshot" and cuda:
            coded = Bucket.from_url(f"memory://{uuid.uuid4()}")
            rows.append(held(training, coded, "context", options.publishes, 2 * options.step, "context"))
            _print(rows[-1])
            replicas["snapshot, context"] = check(training, coded, rows[-1].versions)
            print(f"    replica, ms: {replicas['snapshot, context']}", flush=True)
        del training, bucket
    ratio = steps[3]["ms"] / steps[0]["ms"]
    met = {row.detector: row.share < TARGET_SHARE for row in rows}
    print(f"\nDeltaAdamW takes {ratio:.2f} x the fused step (target {TARGET_RATIO}); share under 1 %: {met}")
    if cuda:
        quick = {row.detector: (row.stream_ms or 0.0) <= TARGET_STREAM_MS for row in rows}
        short = {kind: phases["pause, worst"] <= TARGET_PAUSE_MS for kind, phases in replicas.items()}
        print(f"stream held at most {TARGET_STREAM_MS:g} ms: {quick}; pause at most {TARGET_PAUSE_MS:g} ms: {short}")
    write_json(
        options.out / f"held-{device.type}.json",
        {
            "about": facts,
            "shape": options.shape,
            "step_s": options.step,
            "steps": steps,
            "updates": updates,
            "held": [asdict(row) for row in rows],
            "replica_ms": replicas,
        },
    )


def _print(row: Held) -> None:
    device = "" if row.stream_ms is None else f"  stream {row.stream_ms:6.2f} ms"
    print(
        f"  {row.detector:9} {row.bucket:5} held {row.held_ms:7.2f} ms (worst {row.worst_ms:.2f})"
        f" = {100 * row.share:.2f} %{device}"
        f"  encode {row.encode_ms:.0f} ms  put {row.put_ms:.0f} ms"
        f"  {row.publishes} publishes → {row.versions} versions"
        f"  +{row.extra_device_mb:.0f} MB device, +{row.extra_host_mb:.0f} MB host  {row.changed_percent:.2f} %"
        f"  1 % at {row.fits_m:.0f} M weights",
        flush=True,
    )


if __name__ == "__main__":
    main()
