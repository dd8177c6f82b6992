"""How fast the kernels are, next to what torch itself needs to copy, compare and scatter the same model.

    python benchmarks/kernels.py                       # Qwen3-0.6B's shape on a GPU, a small one on a CPU
    python benchmarks/kernels.py --density 0.03 --out /tmp/figures

Weights are random, but change as they do in training: every fp32 master takes a step of the same size, so the chance
that its bf16 copy moves is the step over the copy's ulp. Everything is checked against plain torch before it is timed.
Times are medians by CUDA events (a clock on a CPU), the waits for counts included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from _report import about, print_about, write_json
from deltawire import kernels
from deltawire.core.codecs.context.classes import Rule
from deltawire.core.codecs.context.tiles import grid_of, walked
from deltawire.kernels import Changed, ClassRules, Plan, grid, torch_ops

BF16 = (7, 255)
TOP, SPAN = 123, 12
"""Classes for weights around 0.02: exponents of 0.06 and more share one, those of 3e-5 and less another."""


@dataclass(frozen=True, slots=True)
class Shape:
    vocabulary: int
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int

    def tensors(self) -> Iterable[tuple[str, tuple[int, ...]]]:
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            yield layer + "self_attn.q_proj.weight", (self.heads * self.head, self.hidden)
            yield layer + "self_attn.k_proj.weight", (self.kv_heads * self.head, self.hidden)
            yield layer + "self_attn.v_proj.weight", (self.kv_heads * self.head, self.hidden)
            yield layer + "self_attn.o_proj.weight", (self.hidden, self.heads * self.head)
            yield layer + "self_attn.q_norm.weight", (self.head,)
            yield layer + "self_attn.k_norm.weight", (self.head,)
            yield layer + "mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield layer + "mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield layer + "mlp.down_proj.weight", (self.hidden, self.intermediate)
            yield layer + "input_layernorm.weight", (self.hidden,)
            yield layer + "post_attention_layernorm.weight", (self.hidden,)
        yield "model.norm.weight", (self.hidden,)


SHAPES = {
    "qwen3-0.6b": Shape(151936, 1024, 28, 3072, 16, 8, 128),
    "small": Shape(8192, 256, 4, 768, 4, 2, 64),
}


@dataclass(slots=True)
class Row:
    what: str
    ms: float
    # median
    spread: float
    # of the middle half of the runs, ms
    extra_mb: float
    # device memory beyond what was there, results included
    target: float | None = None
    reference: bool = False


class Model:
    """Masters after a step, bf16 copies from before and after it, and what changed."""

    def __init__(self, shape: Shape, density: float, device: torch.device) -> None:
        random = torch.Generator(device).manual_seed(1)
        self.names, shapes = zip(*shape.tensors(), strict=True)
        before = [torch.randn(s, generator=random, device=device) * 0.02 for s in shapes]
        self.old = [m.to(torch.bfloat16) for m in before]
        step = 1e-6
        for _ in range(5):
            self.masters = [m + step for m in before]
            self.new = [m.to(torch.bfloat16) for m in self.masters]
            changed = sum(int((a != b).sum()) for a, b in zip(self.old, self.new, strict=True))
            self.parameters = sum(t.numel() for t in self.old)
            self.density = changed / self.parameters
            step *= density / self.density
        self.device = device
        self.flat = kernels.flat_plan(self.old)
        self.tiled = Plan(self.old, [_segment(i, t) for i, t in enumerate(self.old)])
        count = len(self.old)
        self.rules: ClassRules = kernels.rules(self.tiled, [Rule(TOP, SPAN, False, *BF16).table(SPAN + 1)] * count)
        chance = np.random.default_rng(2)
        # the cost of levels does not depend on what they are
        levels = [
            (chance.integers(1, 6, s.rows, np.uint8), chance.integers(0, 5, s.columns, np.uint8))
            for s in self.tiled.segments
        ]
        table = Rule(TOP, SPAN, True, *BF16).table(SPAN + 10)
        self.leveled: ClassRules = kernels.rules(self.tiled, [table] * count, levels)


def _segment(number: int, tensor: Tensor) -> kernels.Segment:
    shape = walked(*(tensor.shape if tensor.dim() == 2 else (1, tensor.numel())))
    return grid(number, 0, shape[1], shape, grid_of(*shape))


def check(model: Model) -> None:
    """Everything against plain torch, at full size."""
    found = kernels.detect(model.old, model.new)
    _same("detect", found, torch_ops.detect(model.flat, model.old, model.new))
    copies = [t.clone() for t in model.old]
    _same("detect, masters rounded", kernels.detect(copies, model.masters), found)
    live = [t.clone() for t in model.old]
    kernels.apply(live, found)
    _same_model("apply", live, model.new)
    digest = kernels.digest(model.names, live)
    plan = kernels.flat_plan(live, unit=2)
    if digest != kernels.state(torch_ops.digest(plan, live, kernels.tile_keys(plan, model.names))):
        raise SystemExit("digest differs from plain torch")
    kernels.apply(live, found.swapped())
    _same_model("undo", live, model.old)
    if kernels.digest(model.names, live) + kernels.digest_change(model.names, live, found) != digest:
        raise SystemExit("digest_change does not lead from the old digest to the new")
    tiled = kernels.detect(model.old, model.new, plan=model.tiled)
    for rules in (model.rules, model.leveled):
        ranks = kernels.class_ranks(model.old, model.tiled, rules, tiled)
        twin = torch_ops.class_ranks(model.tiled, model.old, rules, tiled)
        _same("class_ranks", ranks, twin)
        if not torch.equal(kernels.class_counts(model.old, model.tiled, rules), ranks.sizes):
            raise SystemExit("class_counts differs from class_ranks")
        placed = kernels.place(model.old, model.tiled, rules, ranks.counts, ranks.ranks, ranks.steps)
        kernels.apply(live, placed, plan=model.tiled)
        _same_model("place", live, model.new)
        kernels.apply(live, placed.swapped(), plan=model.tiled)


def _same(what: str, a: object, b: object) -> None:
    for field in a.__dataclass_fields__:  # type: ignore[attr-defined]
        if not torch.equal(getattr(a, field).view(torch.uint8), getattr(b, field).view(torch.uint8)):
            raise SystemExit(f"{what} differs from plain torch in {field}")


def _same_model(what: str, a: list[Tensor], b: list[Tensor]) -> None:
    if not all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in zip(a, b, strict=True)):
        raise SystemExit(f"{what} left other bits than it should")


class Bench:
    def __init__(self, device: torch.device, repeats: int, targets: bool) -> None:
        self.device, self.repeats, self.targets = device, repeats, targets
        self.rows: list[Row] = []

    def time(
        self, what: str, run: Callable[[], object], *, target: float | None = None, reference: bool = False
    ) -> None:
        cuda = self.device.type == "cuda"
        for _ in range(3):
            run()
        extra = 0.0
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            extra = (torch.cuda.max_memory_allocated() - before) / 1e6
        times = [self._once(run) if cuda else _clocked(run) for _ in range(self.repeats)]
        low, middle, high = np.quantile(times, (0.25, 0.5, 0.75)).tolist()
        self.rows.append(Row(what, middle, high - low, extra, target if self.targets else None, reference))
        print(f"  {what:42} {middle:9.3f} ms", flush=True)

    def _once(self, run: Callable[[], object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)


def _clocked(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def references(bench: Bench, model: Model) -> None:
    """What torch needs for the same bytes in one piece: the ceilings."""
    old, new = (torch.cat([t.view(torch.int16).reshape(-1) for t in ts]) for ts in (model.old, model.new))
    scratch = torch.empty_like(old)
    bench.time("copy of the model", lambda: scratch.copy_(old), reference=True)
    scratch.copy_(old)
    bench.time("compare (torch.equal)", lambda: torch.equal(old, scratch), reference=True)

    def gathered() -> tuple[Tensor, ...]:
        where = torch.nonzero(old != new).view(-1)
        return where, old[where], new[where]

    bench.time("compare + nonzero + gathers", gathered, reference=True)
    where, _, values = gathered()
    bench.time("index_copy_ of the changed", lambda: scratch.index_copy_(0, where, values), reference=True)
    bench.time("cast of the masters, torch", lambda: [m.to(torch.bfloat16) for m in model.masters], reference=True)


def ours(bench: Bench, model: Model) -> Changed:
    bench.time("detect", lambda: kernels.detect(model.old, model.new, plan=model.flat), target=4.0)
    bench.time("detect by tiles of a grid", lambda: kernels.detect(model.old, model.new, plan=model.tiled), target=4.0)
    rounded = "detect, masters rounded"
    bench.time(rounded, lambda: kernels.detect(model.old, model.masters, plan=model.flat), target=4.0)
    copies = [t.clone() for t in model.old]
    changed = kernels.detect(model.old, model.new)
    undo = changed.swapped()

    def fused() -> None:
        kernels.apply(copies, kernels.detect(copies, model.masters, plan=model.flat), plan=model.flat)
        kernels.apply(copies, undo, plan=model.flat)

    bench.time("detect, masters rounded + apply + undo", fused)
    bench.time("apply", lambda: kernels.apply(copies, changed, plan=model.flat), target=0.5)
    bench.time("digest", lambda: kernels.digest(model.names, model.old), target=1.5)
    bench.time("digest_change", lambda: kernels.digest_change(model.names, model.old, changed, plan=model.flat))
    tiled = kernels.detect(model.old, model.new, plan=model.tiled)
    for label, rules in (("", model.rules), (", levels", model.leveled)):
        ranks = kernels.class_ranks(model.old, model.tiled, rules, tiled)
        arguments = (model.old, model.tiled, rules)
        bench.time("class_counts" + label, lambda a=arguments: kernels.class_counts(*a))  # type: ignore[misc]
        bench.time(
            "class_ranks" + label,
            lambda a=arguments: kernels.class_ranks(*a, tiled),  # type: ignore[misc, call-arg]
            target=8.0,
        )
        bench.time(
            "place" + label,
            lambda a=arguments, r=ranks: kernels.place(*a, r.counts, r.ranks, r.steps),  # type: ignore[misc, call-arg]
            target=8.0,
        )
    placed = kernels.place(model.old, model.tiled, rules, ranks.counts, ranks.ranks, ranks.steps)
    bench.time("apply of what place gave", lambda: kernels.apply(copies, placed, plan=model.tiled), target=0.5)
    if model.device.type == "cuda":
        pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (changed.positions, changed.new)]
        bench.time(
            "positions and new bits to the host",
            lambda: [pinned[0].copy_(changed.positions, True), pinned[1].copy_(changed.new, True)],
        )
    return changed


def chart(rows: list[Row], title: str, path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no chart: matplotlib is not installed")
        return
    figure, axes = pyplot.subplots(figsize=(9, 0.32 * len(rows) + 1.2))
    places = range(len(rows))
    axes.barh(places, [r.ms for r in rows], color=["#b8b8b8" if r.reference else "#2b6cb0" for r in rows])
    for place, row in zip(places, rows, strict=True):
        axes.text(row.ms, place, f" {row.ms:.2f}", va="center", fontsize=8)
        if row.target:
            axes.plot([row.target] * 2, [place - 0.4, place + 0.4], color="#c53030", linewidth=2)
    axes.set_yticks(places, [r.what for r in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms, median; grey: torch, red: target")
    axes.set_title(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b" if cuda else "small")
    parser.add_argument("--density", type=float, default=0.01, help="share of weights that change")
    parser.add_argument("--repeats", type=int, default=30 if cuda else 5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for JSON and chart")
    options = parser.parse_args()
    device = torch.device("cuda" if cuda else "cpu")
    facts = about()
    if cuda:
        facts["machine"] = f"{torch.cuda.get_device_name()}; {facts['machine']}"
    facts["kernels"] = kernels.operations(device).__name__.rpartition(".")[2]
    print_about(facts)
    model = Model(SHAPES[options.shape], options.density, device)
    weights, percent = model.parameters / 1e6, 100 * model.density
    print(f"{facts['kernels']}, {options.shape}: {weights:.0f} M weights, {percent:.2f} % changed")
    check(model)
    print("checked against plain torch")
    # the targets are for 0.6 B weights on an H200, one in a hundred of them changed
    bench = Bench(device, options.repeats, cuda and options.density <= 0.01)
    references(bench, model)
    changed = ours(bench, model)

    print(f"\n{'':42} {'median':>9} {'spread':>8} {'target':>8} {'memory':>9}")
    for row in bench.rows:
        target = "" if row.target is None else f"{row.target:.1f} ms"
        verdict = "" if row.target is None else (" ok" if row.ms <= row.target else " MISSED")
        print(f"{row.what:42} {row.ms:6.3f} ms {row.spread:5.3f} ms {target:>8} {row.extra_mb:6.1f} MB{verdict}")
    print(f"payload of detect: {changed.nbytes / 1e6:.1f} MB for {changed.count} changes")
    what = {"shape": options.shape, "weights": model.parameters, "density": model.density, "changed": changed.count}
    write_json(options.out / "kernels.json", {**facts, "model": what, "rows": [asdict(row) for row in bench.rows]})
    title = f"{facts['machine'].split(';')[0]}, {options.shape}, {percent:.2f} % changed"
    chart(bench.rows, title, options.out / "kernels.svg")


if __name__ == "__main__":
    main()
