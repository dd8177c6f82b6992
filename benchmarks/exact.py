"""Does each detector find exactly what training changed? A real Qwen3, trained for real, a publish after every step.

    python benchmarks/exact.py                      # Qwen3-0.6B's shape on a GPU, a small one on a CPU; 200 steps
    python benchmarks/exact.py --parallel 4         # detectors side by side

After every publish a replica takes the version and must hold the trainer's weights, cast to bf16, bit for bit: so
nothing that changed was left out (recall 1). And as many weights must have been sent as have other bits than after the
publish before, counted apart from the detector: so nothing was sent in vain (precision 1). Weights are fp32, batches
random words followed by the same words again, AdamW with decay and a warm-up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from _report import about, print_about, write_json
from _shapes import QWEN3_06B, Shape
from deltawire import Publisher, Replica
from deltawire.store import ObjectStore
from deltawire.trainer import DeltaAdamW, FusedDetector, HostDetector, SnapshotDetector

KINDS = ("snapshot", "streamed", "fused", "adamw", "host")
TINY = Shape(layers=4, hidden=256, inner=768, heads=4, kv_heads=2, head=64, vocabulary=4096)
BATCH, LENGTH, WORDS = 4, 128, 400
WARM_UP = 20


def make_model(shape: Shape, device: torch.device) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head, tie_word_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(device)


def follow(kind: str, shape: Shape, device: torch.device, steps: int, rate: float) -> dict[str, Any]:
    torch.set_num_threads(1 if device.type == "cpu" else 4)
    model = make_model(shape, device)
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    optimizer = (DeltaAdamW if kind == "adamw" else torch.optim.AdamW)(
        model.parameters(), lr=rate, weight_decay=0.1, fused=True
    )
    copies = {name: t.bfloat16() for name, t in tensors.items()} if kind == "fused" else {}
    fused = FusedDetector(copies)
    detector: Any = {
        "snapshot": SnapshotDetector, "streamed": lambda: SnapshotDetector(memory="host"), "fused": lambda: fused,
        "adamw": lambda: optimizer, "host": HostDetector,
    }[kind]()  # fmt: skip
    store = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
    replica = Replica(store, heartbeat=0)
    live = {name: torch.zeros_like(t, dtype=torch.bfloat16) for name, t in tensors.items()}
    last: dict[str, Tensor] = {}
    losses, shares = [], []
    changed = sent = missed = 0
    began = time.perf_counter()
    with Publisher(store, detector=detector, wire_dtype="bf16", encoding="packed") as publisher:
        for step in range(steps + 1):
            if step:
                for group in optimizer.param_groups:
                    group["lr"] = rate * min(1.0, step / WARM_UP)
                losses.append(train(model, optimizer, device, step))
                if kind == "fused":
                    fused.cast(tensors)
            published = publisher.publish(tensors if kind == "fused" else model, step=step).result()
            assert replica.sync(live) == published.version == step
            now = {name: t.bfloat16().view(torch.int16) for name, t in tensors.items()}
            missed += differing(now, {name: t.view(torch.int16) for name, t in live.items()})
            if last:
                changed += differing(now, last)
                sent += published.changed
                shares.append(100 * published.density)
            last = now
    return {
        "detector": kind,
        "publishes": steps + 1,
        "weights": sum(t.numel() for t in tensors.values()),
        "changed": changed,
        "sent": sent,
        "missed": missed,
        "recall": 1 - missed / changed,
        "precision": (changed - missed) / sent,
        "changed_percent": [min(shares), sum(shares) / len(shares), max(shares)],
        "loss": [losses[0], losses[-1]],
        "seconds": time.perf_counter() - began,
    }


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> int:
    return sum(int((bits != b[name]).sum()) for name, bits in a.items())


def train(model: Any, optimizer: torch.optim.Optimizer, device: torch.device, step: int) -> float:
    words = torch.randint(0, WORDS, (BATCH, LENGTH // 2), generator=torch.Generator().manual_seed(step)).to(device)
    # something to learn: the second half repeats the first
    ids = torch.cat([words, words], 1)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=3e-6, help="learning rate after the warm-up")
    parser.add_argument("--only", default=",".join(KINDS if not cuda else KINDS[:4]), help="detectors, by comma")
    parser.add_argument("--parallel", type=int, default=1, help="detectors at the same time")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the JSON")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device("cuda" if cuda else "cpu")
    if options.one:
        print(json.dumps(follow(options.only, QWEN3_06B if cuda else TINY, device, options.steps, options.rate)))
        return
    facts = about()
    if cuda:
        facts["machine"] = f"{torch.cuda.get_device_name()}; {facts['machine']}"
    print_about(facts)
    rows = [json.loads(line) for line in _each(options)]
    for row in rows:
        low, mean, high = row["changed_percent"]
        print(
            f"{row['detector']:9} {row['weights'] / 1e6:.0f} M weights, {row['publishes']} publishes:"
            f" {row['changed']} changes, {row['sent']} sent, {row['missed']} missed;"
            f" recall {row['recall']:g}, precision {row['precision']:g};"
            f" {low:.2f} to {high:.2f} % a step (mean {mean:.2f});"
            f" loss {row['loss'][0]:.2f} to {row['loss'][1]:.2f}; {row['seconds']:.0f} s"
        )
    write_json(options.out / f"exact-{device.type}.json", {"about": facts, "rows": rows})
    if any(row["missed"] or row["sent"] != row["changed"] for row in rows):
        raise SystemExit("a detector is not exact")


def _each(options: argparse.Namespace) -> list[str]:
    """A process per detector: none has compiled, cached or allocated for another."""
    waiting, running, said = options.only.split(","), [], []
    while waiting or running:
        while waiting and len(running) < options.parallel:
            command = [sys.executable, __file__, "--one", "--only", waiting.pop(0)]
            command += ["--steps", str(options.steps), "--rate", str(options.rate)]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        job = running.pop(0)
        out, _ = job.communicate()
        if job.returncode:
            for other in running:
                other.kill()
            raise SystemExit(job.returncode)
        said.append(out.splitlines()[-1])
    return said


if __name__ == "__main__":
    main()
