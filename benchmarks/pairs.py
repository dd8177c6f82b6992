"""Weights that come one by one against a model, and against gathering first: how long `publish` holds, and its memory.

    python benchmarks/pairs.py                    # Qwen3-0.6B's shape on a GPU, a small one on a CPU (a minute)
    python benchmarks/pairs.py --shape qwen3-0.6b --publishes 4

bf16 weights, of which 1 % change before each publish. `model` publishes the mapping that the trainer has. `pairs` and
`gathered` make a full copy of each tensor, as a framework that gathers does: `pairs` one after the other, `gathered`
all of them into a state dict that is published then. Each runs in a process of its own, with a bucket in a folder. Peak
is what the process holds at most, until the version is in the bucket, beyond what it held before the first publish, in
copies of the weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from _report import about, print_about, write_json
from deltawire import Publisher
from kernels import SHAPES

WAYS = ("model", "pairs", "gathered")
CHANGED = 0.01


def resident(what: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) << 10


def gathered(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor.clone()) for name, tensor in weights.items())


def step(weights: dict[str, Tensor], seed: int) -> None:
    generator = torch.Generator(next(iter(weights.values())).device).manual_seed(seed)
    for tensor in weights.values():
        flat = tensor.view(-1).view(torch.int16)
        where = torch.randint(
            flat.numel(), (max(1, int(flat.numel() * CHANGED)),), generator=generator, device=flat.device
        )
        flat[where] ^= 1


def one(way: str, shape: str, publishes: int) -> dict[str, Any]:
    """Publish in this process, first a toy so that kernels are compiled."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: dict[str, Any] = {"way": way}
    for toy in (True, False):
        sizes = [("w", (512, 64))] if toy else list(SHAPES[shape].tensors())
        weights = {name: (torch.randn(size, device=device) * 0.02).bfloat16() for name, size in sizes}
        copy = sum(tensor.nbytes for tensor in weights.values())
        with tempfile.TemporaryDirectory() as folder, Publisher(folder, anchor_ratio=1e9) as publisher:
            before, held, peaks = resident("VmRSS"), [], []
            for number in range(2 if toy else publishes):
                step(weights, number)
                # what is resident at most, from here on
                Path("/proc/self/clear_refs").write_text("5")
                began = time.perf_counter()
                source: Any = weights if way == "model" else gathered(weights)
                handle = publisher.publish(dict(source) if way == "gathered" else source)
                held.append(time.perf_counter() - began)
                del source
                published = handle.result()
                peaks.append((resident("VmHWM") - before) / copy)
        later = sorted(held[1:])[len(held[1:]) // 2]
        rows |= {"weights_mb": copy / 1e6, "held_first_ms": 1e3 * held[0], "held_ms": 1e3 * later}
        rows |= {
            "peak_first": peaks[0],
            "peak": max(peaks[1:]),
            "changed_percent": 100 * published.density,
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b" if cuda else "small")
    parser.add_argument("--publishes", type=int, default=6)
    parser.add_argument("--way", choices=WAYS, help="in this process, and print JSON")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the JSON")
    options = parser.parse_args()
    if options.way:
        print(json.dumps(one(options.way, options.shape, options.publishes)))
        return
    facts = about()
    print_about(facts)
    rows = []
    for way in WAYS:
        command = [sys.executable, __file__, "--way", way, "--shape", options.shape]
        command += ["--publishes", str(options.publishes)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        rows.append(row)
        print(
            f"  {way:9} held {row['held_ms']:8.1f} ms (first {row['held_first_ms']:.1f})  peak {row['peak']:.2f} "
            f"copies of {row['weights_mb']:.0f} MB (first {row['peak_first']:.2f})  "
            f"{row['changed_percent']:.2f} % changed",
            flush=True,
        )
    write_json(
        options.out / f"pairs-{'cuda' if cuda else 'cpu'}.json",
        {"about": facts, "shape": options.shape, "rows": rows},
    )


if __name__ == "__main__":
    main()
