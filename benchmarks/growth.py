"""What publishing and syncing cost as the model, the change and the number of ranks grow, and whether that is linear.

    python benchmarks/growth.py                                  # all cells: half an hour, 9 GB of memory, 15 of disk
    python benchmarks/growth.py --weights 100M --ranks 1,8       # some of them; what the JSON has of others stays
    python benchmarks/growth.py --weights 3.5B --generated
    python benchmarks/growth.py --fit                            # fit and plot what the JSON has

A cell is a model of bf16 weights (matrices of 4096 × 4096) that 1 to 8 gloo ranks of this machine hold by rows, a
list of `Shard` each. They publish full weights, then three versions for each share of changed weights: random places,
an ulp up, down and up again. Then the ranks end, and a replica in host memory takes all versions, so trainer and
replica never share the machine. Each figure is the smallest of three. `generated` weights are computed as they are
compared: the trainer's own copy is elsewhere, as on a GPU.

held      `publish` blocks the training: compare with the copy, of the slowest rank
encode    what changed, as `packed`
put       into a folder: hash, write, fsync
fetch     read and hash
stage     decode, gather the old bits, predict the digest
swap      write the new bits
prove     recompute the digest of all weights
memory    what the processes need beyond the weights that they are handed, at most, all ranks together

Seconds are those of the clock, and those of all cores and ranks together (`cpu`), which other work on the machine
disturbs less: `write` is encode and put. Memory and the latter are fitted: a + b · weights + c · changed +
d · (ranks − 1), by least squares on relative errors. `bend` is the slope in log-log from the smallest to the largest
model of one rank: 1 is proportional.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import re
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from _charts import chart
from _report import about, print_about, write_json
from deltawire import Publisher, Replica, Shard
from deltawire.cli.quantities import count
from deltawire.core.change import Region
from deltawire.core.digest import StateDigest
from deltawire.core.schema import Schema, TensorSpec
from deltawire.replica.model import ModelTarget, StagedModel
from deltawire.replica.target import Update

RESULTS = Path(__file__).parent / "results" / "growth.json"
SIDE = 4096
SHARES = (0.003, 0.01, 0.03, 0.1)
REPEATS = 3
CELLS = [
    *((weights, ranks) for weights in (1e8, 3e8, 1e9) for ranks in (1, 2, 4, 8)),
    (2e9, 1),
]
GENERATED = 3.5e9
"""The most that leaves a machine of 24 GB to others, with one copy."""
PUBLISH = ("held", "encode", "put")
SYNC = ("fetch", "stage", "swap", "prove")
FITTED = ("held", "write", *SYNC)
BYTES = ("trainer", "replica")


class Model:
    """Layers of which each has the same weights, rolled; and positions that change in all of them."""

    def __init__(self, weights: float) -> None:
        self.layers = max(round(weights / SIDE**2), 1)
        rng = np.random.default_rng(0)
        normal = rng.standard_normal(SIDE * SIDE, np.float32) * np.float32(0.02)
        self.layer = (normal.view(np.uint32) >> 16).astype(np.uint16)
        drawn = rng.random(SIDE * SIDE, np.float32)
        self.places = {share: np.flatnonzero(drawn < share).astype(np.int32) for share in SHARES}
        self.names = [f"layer.{number}.weight" for number in range(self.layers)]

    @property
    def weights(self) -> int:
        return self.layers * SIDE**2

    def bits(self, layer: int, first: int, end: int) -> np.ndarray:
        """The rows of a layer, as units."""
        return np.roll(self.layer, 977 * layer)[first * SIDE : end * SIDE]

    def move(self, bits: np.ndarray, share: float, first: int, up: bool) -> None:
        """Change some of the rows that begin with `first`: an ulp up, or down again."""
        places = self.places[share]
        start, end = np.searchsorted(places, (first * SIDE, first * SIDE + bits.size))
        bits[places[start:end] - first * SIDE] += np.uint16(1 if up else 0xFFFF)


class Generated:
    """Weights that nobody holds: computed a region at a time, as they are read."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.schema = Schema.build([TensorSpec(name, "BF16", (SIDE, SIDE)) for name in model.names])
        self._layer = {name: number for number, name in enumerate(model.names)}
        self.moved: list[tuple[float, bool]] = []

    def region(self, region: Region) -> np.ndarray:
        assert (region.column, region.columns) == (0, SIDE)
        bits = self._model.bits(self._layer[region.tensor.name], region.row, region.row + region.rows).copy()
        for share, up in self.moved:
            self._model.move(bits, share, region.row, up)
        return bits


# ── the trainer's ranks ──────────────────────────────────────────────────────────────────────────────────────────────


def steps() -> Iterator[tuple[float, bool]]:
    return ((share, number % 2 == 0) for share in SHARES for number in range(REPEATS))


def train(model: Model, rank: int, size: int, folder: Path, generated: bool) -> None:
    """One rank, in a process of its own."""
    torch.set_num_threads(1)
    weights: Any
    if generated:
        weights, group = Generated(model), None
        change: Callable[[float, bool], None] = lambda share, up: weights.moved.append((share, up))  # noqa: E731
    else:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
        first, end = (SIDE * number // size for number in (rank, rank + 1))
        parts = [model.bits(layer, first, end).copy() for layer in range(model.layers)]
        weights, group = (
            [
                Shard(
                    name,
                    torch.from_numpy(part.reshape(-1, SIDE)).view(torch.bfloat16),
                    (SIDE, SIDE),
                    (slice(first, end),),
                )
                for name, part in zip(model.names, parts, strict=True)
            ],
            "auto",
        )

        def change(share: float, up: bool) -> None:
            for part in parts:
                model.move(part, share, first, up)

    publisher = Publisher(str(folder / "run"), anchor_ratio=1e9, group=group)  # type: ignore[arg-type]
    gc.collect()
    # of its own weights, before anything was published
    before, rows = resident(), []
    publisher.publish(weights, step=0).result()
    for number, (share, up) in enumerate(steps(), 1):
        change(share, up)
        if not generated:
            dist.barrier()
        peak_from_here()
        used = time.process_time()
        handle = publisher.publish(weights, step=number)
        held = time.process_time() - used
        published = handle.result()
        rows.append(
            {
                "share": share,
                "changed": published.changed,
                "bytes": published.bytes,
                "timings": published.timings,
                "cpu": {"held": held, "write": time.process_time() - used - held},
                "memory": peak() - before,
            }
        )
    publisher.close()
    (folder / f"rank-{rank}.json").write_text(json.dumps(rows))
    if not generated:
        dist.barrier()


class Measured(ModelTarget):
    """Weights in host memory, and CPU seconds of what is done with them."""

    def __init__(self, model: dict[str, np.ndarray]) -> None:
        super().__init__(model)
        self.cpu: Counter[str] = Counter()

    def stage(self, update: Update) -> StagedModel:
        with self._clock("stage"):
            return super().stage(update)

    def swap(self, staged: StagedModel) -> None:
        with self._clock("swap"):
            super().swap(staged)
        self.cpu["swap"] -= self.cpu["prove"]  # type: ignore[assignment]

    def digest(self) -> StateDigest:
        with self._clock("prove"):
            return super().digest()

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.cpu[name] += time.process_time() - began  # type: ignore[assignment]


def follow(model: Model, folder: Path) -> None:
    """A replica in host memory, in a process of its own, until it has the last version."""
    live = {name: np.zeros((SIDE, SIDE), np.uint16) for name in model.names}
    for array in live.values():
        array.fill(0)
    replica, target = Replica((folder / "run").as_uri(), heartbeat=0), Measured(live)
    gc.collect()
    before, rows = resident(), []
    replica.sync(target, 0)
    for version in range(1, 1 + len(SHARES) * REPEATS):
        peak_from_here()
        target.cpu.clear()
        used, began = time.process_time(), time.perf_counter()
        replica.sync(target, version)
        used = time.process_time() - used
        rows.append(
            {
                "seconds": time.perf_counter() - began,
                "timings": dict(replica.timings),
                "cpu": {**target.cpu, "fetch": used - sum(target.cpu.values())},
                "memory": peak() - before,
            }
        )
    for number in (0, model.layers - 1):
        expected = model.bits(number, 0, SIDE).copy()
        for share, up in steps():
            model.move(expected, share, 0, up)
        if not np.array_equal(live[model.names[number]].reshape(-1), expected):
            raise SystemExit("the replica has other weights than the trainer")
    (folder / "replica.json").write_text(json.dumps(rows))


def resident() -> int:
    return memory("VmRSS")


def peak() -> int:
    return memory("VmHWM")


def peak_from_here() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def memory(which: str) -> int:
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def forked(works: list[Callable[[], None]]) -> None:
    """Do each in a process of its own, at once. Raises where one fails."""
    children = []
    for work in works:
        if not (child := os.fork()):
            try:
                work()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    if any([os.waitpid(child, 0)[1] for child in children]):
        raise SystemExit("a process failed")


def measure(weights: float, ranks: int, generated: bool) -> list[dict[str, Any]]:
    model = Model(weights)
    with tempfile.TemporaryDirectory(prefix="deltawire-growth-") as name:
        folder = Path(name)
        began = time.perf_counter()
        forked([lambda rank=rank: train(model, rank, ranks, folder, generated) for rank in range(ranks)])  # type: ignore[misc]
        trained = time.perf_counter() - began
        full = sum(path.stat().st_size for path in (folder / "run" / "anchors").iterdir())
        forked([lambda: follow(model, folder)])
        took = time.perf_counter() - began
        by_rank = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
        synced = json.loads((folder / "replica.json").read_text())
    rows = []
    for number, share in enumerate(SHARES):
        which = range(number * REPEATS, (number + 1) * REPEATS)
        published = [[rank[n] for rank in by_rank] for n in which]
        phases = {
            "held": min(max(each["timings"]["held"] for each in ranks_) for ranks_ in published),
            "encode": min(ranks_[0]["timings"]["encode"] for ranks_ in published),
            "put": min(ranks_[0]["timings"]["put"] for ranks_ in published),
        }
        for name, parts in {"fetch": ("fetch", "verify"), "stage": ("decode", "stage"), "swap": ("apply",)}.items():
            phases[name] = min(sum(synced[n]["timings"].get(part, 0.0) for part in parts) for n in which)
        phases["prove"] = min(synced[n]["timings"]["prove"] for n in which)
        rows.append(
            {
                "weights": model.weights,
                "ranks": ranks,
                "generated": generated,
                "share": share,
                "changed": published[0][0]["changed"],
                "bytes": published[0][0]["bytes"],
                "full_bytes": full,
                "seconds": {name: round(value, 5) for name, value in phases.items()},
                "cpu": {
                    **{
                        name: round(min(sum(each["cpu"][name] for each in ranks_) for ranks_ in published), 5)
                        for name in ("held", "write")
                    },
                    **{name: round(max(min(synced[n]["cpu"][name] for n in which), 0.0), 5) for name in SYNC},
                },
                "memory": {
                    "trainer": max(sum(each["memory"] for each in ranks_) for ranks_ in published),
                    "replica": max(synced[n]["memory"] for n in which),
                },
            }
        )
        print_row(rows[-1])
    print(f"  {trained:.0f} s to publish, {took - trained:.0f} s to follow", flush=True)
    return rows


def print_row(row: dict[str, Any]) -> None:
    seconds = "  ".join(f"{name} {1e3 * value:7.1f}" for name, value in row["seconds"].items())
    print(
        f"{row['weights'] / 1e9:5.2f} B{'*' if row['generated'] else ' '} {row['ranks']} ranks {row['share']:6.1%}: "
        f"{seconds} ms   memory: {row['memory']['trainer'] / 1e6:6.0f} and {row['memory']['replica'] / 1e6:6.0f} MB",
        flush=True,
    )


# ── what the figures say ─────────────────────────────────────────────────────────────────────────────────────────────


def value_of(row: dict[str, Any], name: str) -> float:
    """CPU seconds, or bytes of memory."""
    return float(row["memory" if name in BYTES else "cpu"][name])


def fit(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Least squares on relative errors."""
    held = [row for row in rows if not row["generated"]]
    terms = np.array([[1.0, row["weights"], row["changed"], row["ranks"] - 1.0] for row in held])
    found = {}
    for name in (*FITTED, *BYTES):
        values = np.array([max(value_of(row, name), 1e-6) for row in held])
        # no work takes less than nothing
        use = [0, 1, 2, 3]
        while True:
            solved = np.linalg.lstsq(terms[:, use] / values[:, None], np.ones(len(held)), rcond=None)[0]
            if (solved >= 0).all():
                break
            del use[int(np.argmin(solved))]
        a, b, c, d = (float(dict(zip(use, solved, strict=True)).get(term, 0.0)) for term in range(4))
        errors = terms @ np.array([a, b, c, d]) / values - 1
        found[name] = {
            "constant": a,
            "per_weight": b,
            "per_change": c,
            "per_rank": d,
            "typical_error": round(float(np.median(np.abs(errors))), 3),
            "worst_error": round(float(np.abs(errors).max()), 3),
            **{f"bend_{share:g}": bend(held, name, share) for share in (SHARES[0], SHARES[-1])},
        }
    return found


def bend(rows: list[dict[str, Any]], name: str, share: float) -> float:
    alone = sorted((row["weights"], value_of(row, name)) for row in rows if (row["ranks"], row["share"]) == (1, share))
    (few, small), (many, large) = alone[0], alone[-1]
    return round(float(np.log(max(large, 1e-6) / max(small, 1e-6)) / np.log(many / few)), 2) if many > few else 0.0


def table(found: dict[str, dict[str, float]]) -> list[str]:
    """The fit as lines of Markdown."""
    lines = ["| | constant | per weight | per changed weight | per further rank | error | worst | bend |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for name, terms in found.items():
        of_bytes = name in BYTES
        unit, each, scale = ("MB", 1.0, 1e-6) if of_bytes else ("ms", 1e9, 1e3)
        per = "B" if of_bytes else "ns"
        lines.append(
            f"| {name} | {scale * terms['constant']:.3g} {unit} | {each * terms['per_weight']:.3g} {per} | "
            f"{each * terms['per_change']:.3g} {per} | {scale * terms['per_rank']:.3g} {unit} | "
            f"{terms['typical_error']:.0%} | {terms['worst_error']:.0%} | "
            f"{terms[f'bend_{SHARES[0]:g}']:g} to {terms[f'bend_{SHARES[-1]:g}']:g} |"
        )
    return lines


def seconds(rows: list[dict[str, Any]], share: float) -> list[str]:
    """Seconds by the clock and memory at one share of changed weights, as lines of Markdown."""
    lines = [f"| weights | ranks | {' | '.join((*PUBLISH, *SYNC))} | trainer's memory | replica's memory |"]
    lines.append("|---" * (4 + len(PUBLISH) + len(SYNC)) + "|")
    for row in (row for row in rows if row["share"] == share):
        phases = " | ".join(f"{1e3 * row['seconds'][name]:,.0f} ms" for name in (*PUBLISH, *SYNC))
        memory = " | ".join(f"{row['memory'][name] / 1e9:.2f} GB" for name in BYTES)
        generated = ", generated" if row["generated"] else ""
        lines.append(f"| {row['weights'] / 1e9:.2f} B{generated} | {row['ranks']} | {phases} | {memory} |")
    return lines


def plot(rows: list[dict[str, Any]], out: Path) -> None:
    """Publish and sync by model size, a line for each share, in one SVG."""
    alone = [row for row in rows if row["ranks"] == 1 and not row["generated"]]

    def lines(names: tuple[str, ...]) -> dict[str, list[tuple[float, float]]]:
        return {
            f"{share:.1%}": [
                (row["weights"] / 1e9, sum(value_of(row, name) for name in names))
                for row in sorted(alone, key=lambda row: row["weights"])
                if row["share"] == share
            ]
            for share in SHARES
        }

    panels = [
        chart("publish, CPU seconds", lines(("held", "write")), "10⁹ weights"),
        chart("sync, CPU seconds", lines(SYNC), "10⁹ weights"),
        chart("trainer's memory, GB", scaled(lines(("trainer",))), "10⁹ weights"),
        chart("replica's memory, GB", scaled(lines(("replica",))), "10⁹ weights"),
    ]
    height, width = 190, 580
    placed = "".join(
        panel.replace("<svg ", f'<svg x="{(at % 2) * width}" y="{at // 2 * height}" ', 1)
        for at, panel in enumerate(panels)
    )
    out.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * width} {2 * height}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>{placed}</svg>\n'
    )
    print(f"wrote {out}")


def scaled(lines: dict[str, list[tuple[float, float]]]) -> dict[str, list[tuple[float, float]]]:
    return {name: [(x, y / 1e9) for x, y in points] for name, points in lines.items()}


def warm() -> None:
    """Compile or load every kernel once, before processes are forked."""
    with tempfile.TemporaryDirectory() as folder:
        weights = {"w": torch.zeros((64, SIDE), dtype=torch.bfloat16)}
        live = {"w": np.zeros((64, SIDE), np.uint16)}
        with Publisher(f"{folder}/run", group=None, anchor_ratio=1e9) as publisher:
            for _ in range(3):
                publisher.publish(weights).result()
                weights["w"].view(-1)[::100] += 1
        Replica((Path(folder) / "run").as_uri(), heartbeat=0).sync(live)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="sizes, by comma; by default all cells")
    parser.add_argument("--ranks", default="1", help="with --weights: numbers of ranks, by comma")
    parser.add_argument("--generated", action="store_true", help="with --weights: nobody holds the trainer's weights")
    parser.add_argument("--fit", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    # as in the tests: the name of this host need not have an address
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    logging.getLogger("deltawire").setLevel(logging.ERROR)
    facts = about()
    facts["load"] = os.getloadavg()[0]
    cells: list[tuple[float, int, bool]] = [(*cell, False) for cell in CELLS] + [(GENERATED, 1, True)]
    rows: list[dict[str, Any]] = []
    if given.weights or given.fit:
        rows = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
        sizes = [] if given.fit else [count(size) for size in given.weights.split(",")]
        cells = [(size, ranks, given.generated) for size in sizes for ranks in map(int, given.ranks.split(","))]
    print_about(facts)
    if cells:
        warm()
    for weights, ranks, generated in cells:
        new = measure(weights, ranks, generated)
        same = (new[0]["weights"], ranks, generated)
        rows = [row for row in rows if (row["weights"], row["ranks"], row["generated"]) != same] + new
        rows.sort(key=lambda row: (row["generated"], row["ranks"], row["weights"], row["share"]))
        write_json(given.out, {"about": facts, "rows": rows})
    if given.fit:
        facts = json.loads(given.out.read_text())["about"]
    found = fit(rows)
    print("\n".join([*table(found), "", *seconds(rows, 0.01)]))
    write_json(given.out, {"about": facts, "rows": rows, "fit": found})
    plot(rows, given.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
