"""What travels per step when an adapter is trained: the adapter alone, or the base weights with it merged.

    python benchmarks/lora.py                # a few minutes on one core

The same small Qwen3 (random weights) learns to repeat a sequence, once as a whole and once by LoRA adapters on all of
its linear layers, and is published after every step. Then the versions of adapters of several ranks are published
again as deltas and as full weights, and followed: bytes, and the CPU time of both sides. Full weights arrive sooner
where the link is faster than `break_even_mbit`. Means, and medians of times, over the steps after a warm-up.
"""

from __future__ import annotations

import argparse
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from _full_weights import full_weights
from _report import about, print_about, write_json
from deltawire import Publisher, Replica
from deltawire.bucket.run import Run
from deltawire.store import ObjectStore, Store
from deltawire.trainer import Published, adapter, merged_weights

VOCABULARY = 2048
RANK = 16
RANKS = (4, 16, 64)
RATES = (1e-5, 1e-4, 1e-3)
WIRES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {"delta": nullcontext, "full": full_weights}


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    lr: float
    elements: int
    """Number of weights that a version has."""
    changed_percent: float
    delta_kb: float
    """Where a delta would be larger than the weights, an anchor goes out instead, and is counted."""
    full_kb: float
    held_ms: float


@dataclass(frozen=True, slots=True)
class AdapterRow:
    rank: int
    lr: float
    wire: str
    elements: int
    changed_percent: float
    kb: dict[str, float]
    """Bytes of a version, by the way it is published."""
    cpu_ms: dict[str, float]
    """CPU time to compare, publish and follow it, by the way it is published."""
    break_even_mbit: float | None
    """Speed of the link above which full weights arrive sooner than the delta; None if they never do."""


def base() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def with_adapter(rank: int = RANK) -> Any:
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(base(), config)


def train(model: Any, lr: float, steps: int, after_step: Callable[[], None]) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        ids = torch.randint(0, VOCABULARY, (4, 16))
        ids = torch.cat([ids, ids], 1)
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        after_step()


def memory() -> Store:
    return ObjectStore.from_url(f"memory://{uuid.uuid4()}")


def measure(
    what: str, model: Any, lr: float, weights: Callable[[Any], Any], steps: int, wire_dtype: str | None = "bf16"
) -> Row:
    store, published = memory(), list[Published]()
    with Publisher(store, wire_dtype=wire_dtype, encoding="context", anchor_ratio=1e9) as publisher:
        train(model, lr, 2 * steps, lambda: published.append(publisher.publish(weights(model)).result()))
    schema, kept, mean = Run.open(store).schema, published[steps:], statistics.fmean
    row = Row(
        what,
        lr,
        schema.elements,
        mean(100 * p.density for p in kept),
        mean(p.bytes for p in kept) / 1e3,
        schema.nbytes / 1e3,
        1e3 * statistics.median(p.timings["held"] for p in kept),
    )
    print(
        f"  {row.what:34} lr {row.lr:<7g} {row.elements / 1e6:6.2f} M weights  {row.changed_percent:6.2f} % changed"
        f"  {row.delta_kb:8.1f} KB of {row.full_kb:8.1f}  held {row.held_ms:6.1f} ms",
        flush=True,
    )
    return row


def measure_adapters(rank: int, lr: float, steps: int) -> list[AdapterRow]:
    model, states = with_adapter(rank), list[dict[str, Any]]()
    train(model, lr, 2 * steps, lambda: states.append({n: t.clone() for n, t in adapter(model).state_dict().items()}))
    rows = []
    for wire, dtype in WIRES.items():
        versions = [{name: tensor.to(dtype) for name, tensor in state.items()} for state in states]
        found = {way: _followed(versions, way)[steps:] for way in WAYS}
        kb = {way: statistics.fmean(p.bytes for p, _ in kept) / 1e3 for way, kept in found.items()}
        cpu = {way: 1e3 * statistics.median(s for _, s in kept) for way, kept in found.items()}
        elements = sum(tensor.numel() for tensor in versions[0].values())
        changed = statistics.fmean(100 * p.changed / elements for p, _ in found["delta"])
        row = AdapterRow(rank, lr, wire, elements, changed, kb, cpu, _break_even(kb, cpu))
        above = "never" if row.break_even_mbit is None else f"above {row.break_even_mbit:.0f} Mbit/s"
        print(
            f"  rank {rank:<3} lr {lr:<7g} {wire} {changed:6.2f} % changed  "
            + "  ".join(f"{way} {kb[way]:7.1f} KB {cpu[way]:5.1f} ms" for way in WAYS)
            + f"  full sooner {above}",
            flush=True,
        )
        rows.append(row)
    return rows


def _followed(versions: Sequence[dict[str, Any]], way: str) -> list[tuple[Published, float]]:
    """Publish versions one after the other and follow them: each with the CPU seconds of both sides."""
    store, found = memory(), []
    live = {name: torch.zeros_like(tensor) for name, tensor in versions[0].items()}
    with WAYS[way](), Publisher(store, wire_dtype=None, anchor_ratio=1e9) as publisher:
        replica = Replica(store, heartbeat=0)
        for version in versions:
            began = time.process_time()
            published = publisher.publish(version).result()
            replica.sync(live)
            found.append((published, time.process_time() - began))
    return found


def _break_even(kb: dict[str, float], cpu_ms: dict[str, float]) -> float | None:
    """Megabits per second at which delta and full weights arrive at the same time; bytes travel twice."""
    saved, longer = kb["full"] - kb["delta"], cpu_ms["delta"] - cpu_ms["full"]
    if saved <= 0:
        return 0.0
    # kilobits per millisecond
    return 2 * 8 * saved / longer if longer > 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=16, help="steps that are measured, after as many to warm up")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the JSON")
    options = parser.parse_args()
    facts = about()
    print_about(facts)
    rows = [measure("all weights", base(), lr, lambda m: m, options.steps) for lr in (1e-6, 1e-5)]
    for lr in (1e-5, 1e-4):
        rows.append(measure("LoRA, merged", with_adapter(), lr, merged_weights, options.steps))
        rows.append(measure("LoRA, the adapter", with_adapter(), lr, adapter, options.steps))
        rows.append(measure("LoRA, the adapter in fp32", with_adapter(), lr, adapter, options.steps, None))
    adapters = [row for rank in RANKS for lr in RATES for row in measure_adapters(rank, lr, options.steps)]
    write_json(
        options.out / "lora.json",
        {"about": facts, "rows": [asdict(row) for row in rows], "adapters": [asdict(row) for row in adapters]},
    )


if __name__ == "__main__":
    main()
