"""What travels per step when an adapter is trained: the adapter alone, or the base weights with it merged.

    python benchmarks/lora.py                # a few minutes on one core

The same small Qwen3 (random weights) learns to repeat a sequence, once as a whole and once by LoRA adapters of rank 16
on all of its linear layers, and is published after every step. Figures are means over the steps after a warm-up.
"""

from __future__ import annotations

import argparse
import statistics
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from _report import about, print_about, write_json
from deltawire import Publisher
from deltawire.bucket.run import Run
from deltawire.store import ObjectStore
from deltawire.trainer import adapter, merged

VOCABULARY = 2048
RANK = 16


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    lr: float
    elements: int
    # that a version has
    changed_percent: float
    delta_kb: float
    # where a delta would be larger than the weights an anchor goes out instead, and is counted
    full_kb: float
    held_ms: float


def base() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def with_adapter() -> Any:
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(base(), config)


def measure(
    what: str, model: Any, lr: float, weights: Callable[[Any], Any], steps: int, wire_dtype: str | None = "bf16"
) -> Row:
    store = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    published = []
    with Publisher(store, wire_dtype=wire_dtype, encoding="context", anchor_ratio=1e9) as publisher:
        for _ in range(2 * steps):
            ids = torch.randint(0, VOCABULARY, (4, 16))
            ids = torch.cat([ids, ids], 1)
            model(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            published.append(publisher.publish(weights(model)).result())
    schema = Run.open(store).schema
    kept = published[steps:]
    mean = statistics.fmean
    row = Row(
        what,
        lr,
        schema.elements,
        mean(p.metrics["changed_percent"] for p in kept),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=16, help="steps that are measured, after as many to warm up")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the JSON")
    options = parser.parse_args()
    facts = about()
    print_about(facts)
    rows = [measure("all weights", base(), lr, lambda m: m, options.steps) for lr in (1e-6, 1e-5)]
    for lr in (1e-5, 1e-4):
        rows.append(measure("LoRA, merged", with_adapter(), lr, merged, options.steps))
        rows.append(measure("LoRA, the adapter", with_adapter(), lr, adapter, options.steps))
        rows.append(measure("LoRA, the adapter in fp32", with_adapter(), lr, adapter, options.steps, None))
    write_json(options.out / "lora.json", {"about": facts, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
