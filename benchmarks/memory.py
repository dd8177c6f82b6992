"""Peak memory of publishing, checking out and importing a checkpoint, against one copy of the model plus 256 MB; an
import may also hold a tensor per thread.

    python benchmarks/memory.py                  # 2 GB of bf16 weights; 12 GB of disk in TMPDIR, 5 minutes
    python benchmarks/memory.py --gb 0.5 --json memory.json
    python benchmarks/memory.py --check          # exit 1 if a command needs more

Each command of the command line runs in a process of its own. Its baseline is what that process holds after importing
everything and running the same command on a toy checkpoint, so that compiled kernels are loaded.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "foreign"))

from writers import write_delta

from _report import about, print_about, write_json
from deltawire.core.change import Region
from deltawire.core.dtypes import Bits
from deltawire.core.full import Checkpoint, write_checkpoint
from deltawire.core.parallel import default_threads
from deltawire.core.schema import Schema, TensorSpec

ALLOWED = 256 << 20
HIDDEN, FEED_FORWARD = 4096, 11008

CHILD = """
import json, os, resource, sys, tempfile
from deltawire.cli import app

# ru_maxrss does not count files in memory
del os.memfd_create

def run(arguments):
    try:
        app(arguments, standalone_mode=False)
    except SystemExit as end:
        if end.code:
            raise

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

warm, arguments = json.loads(sys.argv[1])
out, sys.stdout = sys.stdout, open(os.devnull, "w")
for line in warm:
    run(line)
baseline = resident()
run(arguments)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"baseline": baseline, "peak": peak}), file=out)
"""


def schema(nbytes: float) -> Schema:
    """Layers of a decoder, as many as fit, and an embedding of what is left."""
    layers, left = [], int(nbytes) // 2
    per_layer = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * FEED_FORWARD + 2 * HIDDEN
    while left > per_layer + 32_000 * HIDDEN:
        name = f"model.layers.{len(layers)}"
        layers.append(
            [
                *(TensorSpec(f"{name}.attn.{p}.weight", "BF16", (HIDDEN, HIDDEN)) for p in "qkvo"),
                TensorSpec(f"{name}.mlp.up.weight", "BF16", (FEED_FORWARD, HIDDEN)),
                TensorSpec(f"{name}.mlp.gate.weight", "BF16", (FEED_FORWARD, HIDDEN)),
                TensorSpec(f"{name}.mlp.down.weight", "BF16", (HIDDEN, FEED_FORWARD)),
                TensorSpec(f"{name}.norm.weight", "BF16", (HIDDEN,)),
                TensorSpec(f"{name}.norm2.weight", "BF16", (HIDDEN,)),
            ]
        )
        left -= per_layer
    embed = TensorSpec("model.embed.weight", "BF16", (max(left // HIDDEN, 8), HIDDEN))
    return Schema.build([embed, *(tensor for layer in layers for tensor in layer)])


class Random:
    """Random weights, a region at a time; the same for the same seed."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema

    def region(self, region: Region) -> Bits:
        rng = np.random.default_rng([hash_of(region.tensor.name), region.row, region.column])
        weights = rng.standard_normal(region.units, np.float32) * np.float32(0.02)
        return (weights.view(np.uint32) >> 16).astype(np.uint16)


class Stepped:
    """Another checkpoint with a share of its weights moved by one ulp."""

    def __init__(self, base: Checkpoint, share: float) -> None:
        self.schema, self._base, self._share = base.schema, base, share

    def region(self, region: Region) -> Bits:
        rng = np.random.default_rng([1, hash_of(region.tensor.name), region.row, region.column])
        bits = np.array(self._base.region(region))
        if self._share >= 1:
            bits += rng.choice(np.array([1, 0xFFFF], np.uint16), bits.size)
            return bits
        where = np.flatnonzero(rng.random(bits.size, np.float32) < self._share)
        bits[where] += rng.choice(np.array([1, 0xFFFF], np.uint16), where.size)
        return bits


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode()[-8:], "little")


def make(folder: Path, source: Any) -> Path:
    folder.mkdir()
    write_checkpoint(folder, source)
    (folder / "config.json").write_text('{"model_type": "bench"}')
    return folder


def make_delta(folder: Path, first: Path, second: Path, encoding: str = "xor") -> None:
    """What slime writes for a step, by a process of its own: those that are measured inherit the peak of this one."""

    def write() -> None:
        old, new = (
            {t.name: source.region(Region(t, 0, t.rows, 0, t.columns)).reshape(t.shape) for t in source.schema.tensors}
            for source in (Checkpoint(first), Checkpoint(second))
        )
        write_delta(folder, 1, old, new, encoding)

    writer = multiprocessing.get_context("fork").Process(target=write)
    writer.start()
    writer.join()


def measured(
    name: str, warm: list[list[str]], arguments: list[str], model: int, allowed: int = ALLOWED
) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps([warm, arguments])], stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    needed = found["peak"] - found["baseline"]
    return {"command": name, **found, "needed": needed, "beyond_model": needed - model, "ok": needed <= model + allowed}


def bench(place: Path, nbytes: float) -> list[dict[str, Any]]:
    first = make(place / "first", Random(schema(nbytes)))
    model = Checkpoint(first).schema.nbytes
    few = make(place / "few", Stepped(Checkpoint(first), 0.01))
    every = make(place / "every", Stepped(Checkpoint(few), 1.0))
    toys = [make(place / f"toy-{i}", Random(schema(1 << 17))) for i in range(2)]
    make_toy = Stepped(Checkpoint(toys[0]), 0.01)
    shutil.rmtree(toys[1])
    toys[1] = make(place / "toy-1", make_toy)
    make_delta(place / "toy-deltas", *toys)
    run = (place / "run").as_uri()
    rows = []

    def go(name: str, arguments: list[str], allowed: int = ALLOWED) -> None:
        toy = (place / f"toy-run-{len(rows)}").as_uri()
        warm = [["publish", str(folder), toy] for folder in toys]
        warm.append(["checkout", toy, "-o", str(place / f"toy-out-{len(rows)}")])
        warm.append(["import", str(place / "toy-deltas"), f"{toy}-imported", "--base", str(toys[0]), "--once"])
        rows.append(measured(name, warm, arguments, model, allowed))
        print_row(rows[-1], model)

    print(f"one copy of the model is {mb(model)}; allowed beyond it {mb(ALLOWED)}\n")
    print(f"{'':44}{'baseline':>10}{'peak':>10}{'needed':>10}{'beyond one copy':>18}")
    go("publish, the first version (anchor)", ["publish", str(first), run])
    go("publish, 1 % changed (delta)", ["publish", str(few), run])
    go("checkout of the first version", ["checkout", f"{run}@0", "-o", str(place / "out-0")])
    go("checkout of the second (anchor, delta)", ["checkout", f"{run}@1", "-o", str(place / "out-1")])
    for folder in ("out-0", "out-1"):
        shutil.rmtree(place / folder)
    go("publish, every weight moved by an ulp", ["publish", str(every), run])
    go("checkout of that", ["checkout", f"{run}@2", "-o", str(place / "out-2")])
    shutil.rmtree(place / "out-2")
    a_tensor_each = default_threads() * max(tensor.nbytes for tensor in Checkpoint(first).schema.tensors)
    for encoding in ("xor", "overwrite"):
        deltas, imported = place / encoding, (place / f"run-{encoding}").as_uri()
        make_delta(deltas, first, few, encoding)
        source = ["import", str(deltas), imported, "--base", str(first), "--once"]
        go(f"import, the base and 1 % changed ({encoding})", source, ALLOWED + a_tensor_each)
    return rows


def print_row(row: dict[str, Any], model: int) -> None:
    verdict = "" if row["ok"] else "  MORE THAN ALLOWED"
    print(
        f"{row['command']:44}{mb(row['baseline']):>10}{mb(row['peak']):>10}{mb(row['needed']):>10}"
        f"{mb(row['beyond_model']):>18}{verdict}"
    )


def mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the checkpoint (default: 2)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--check", action="store_true", help="exit 1 if a command needs more than allowed")
    options = parser.parse_args()
    facts = about()
    print_about(facts)
    with tempfile.TemporaryDirectory(prefix="deltawire-memory-") as place:
        rows = bench(Path(place), options.gb * 1e9)
    if options.json:
        write_json(options.json, {**facts, "gb": options.gb, "allowed": ALLOWED, "rows": rows})
    return 1 if options.check and not all(row["ok"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
