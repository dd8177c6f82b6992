"""One rank of a trainer of verl. Run by live.py: verl_rank.py RANK RANKS FOLDER SCENARIO…

It has verl's FSDP engine, and publishes by verl's own worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine_workers import ActorRolloutRefWorker

import deltawire as dw
from deltawire.models import ModelView

STEPS = 4


class Rank:
    """What verl's worker has of an actor: its engine, and a checkpoint engine."""

    def __init__(self, rank: int, folder: Path, name: str, model: str, shards: bool = False, **options: Any) -> None:
        self.rank, self.run, self.mode = rank, folder / name, "delta_sharded" if shards else "deltawire"
        self.engine = EngineRegistry.new(
            "language_model",
            "fsdp2",
            model_config=HFModelConfig(
                path=str(folder / model),
                load_tokenizer=False,
                use_remove_padding=False,
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": "sdpa"},
            ),
            engine_config=FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False),
            optimizer_config=FSDPOptimizerConfig(lr=1e-6, total_training_steps=STEPS),
            checkpoint_config=CheckpointConfig(),
        )
        self.engine.initialize()
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            "deltawire",
            is_master=rank == 0,
            bucket_size=1 << 20,
            run=str(self.run),
            shards=shards,
            files=str(folder / model),
            **options,
        )
        self.config = SimpleNamespace(rollout=SimpleNamespace(checkpoint_engine=SimpleNamespace(backend="deltawire")))
        self.actor = SimpleNamespace(engine=self.engine)

    def train(self) -> None:
        with self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            tokens = torch.randint(0, 500, (2, 16))
            self.engine.module(input_ids=tokens, use_cache=False).logits.float().logsumexp(-1).mean().backward()
            self.engine.optimizer_step()

    def update(self, step: int) -> dict[str, float]:
        return asyncio.run(ActorRolloutRefWorker.update_weights(self, global_steps=step, mode=self.mode))

    def weights(self) -> dict[str, torch.Tensor]:
        """What rank and engine have, gathered by nothing of deltawire."""
        found = self.engine.module.state_dict()
        return {name: tensor.full_tensor().bfloat16() for name, tensor in found.items()}


def published(rank: Rank) -> dict[str, Any]:
    """Train some steps. Returns the digest after each of them, and what verl was told."""
    tied = rank.engine.model_config.hf_config.tie_word_embeddings
    digests, told = [], []
    for step in range(STEPS):
        if step:
            rank.train()
        told.append(rank.update(step))
        weights = rank.weights()
        if tied:
            assert torch.equal(weights.pop("lm_head.weight"), weights["model.embed_tokens.weight"])
        digests.append(str(dw.digest_of(ModelView(weights))))
    rank.checkpoint_engine._publisher.close()
    return {"digests": digests, "told": told}


def scenario(name: str, rank: int, folder: Path) -> Any:
    match name.split("-"):
        case ["full" | "shards" as form, model]:
            return published(Rank(rank, folder, name, model, form == "shards", wait="bucket"))
        case ["nothing"]:
            return published(Rank(rank, folder, name, "untied", wait="nothing"))
        case ["refused"]:
            return refused(Rank(rank, folder, name, "untied", wait="bucket"))
        case ["killed"]:
            return killed(Rank(rank, folder, name, "untied", wait="bucket"))
    raise AssertionError(name)


def refused(rank: Rank) -> dict[str, list[str]]:
    """Names and shapes that are not the checkpoint's, then the checkpoint's."""
    rank.update(0)
    said = {}

    def changed(**kinds: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in rank.engine.get_per_tensor_param()[0]:
            change = kinds.get(name.rpartition(".")[0].rpartition(".")[2])
            yield change(name, tensor) if change else (name, tensor)

    for what, change in {
        "name": lambda name, tensor: (f"actor.{name}", tensor),
        "shape": lambda name, tensor: (name, tensor[:-1]),
    }.items():
        try:
            asyncio.run(rank.checkpoint_engine.send_weights(changed(q_proj=change), global_steps=1))
        except dw.DeltawireError as error:
            said[what] = [type(error).__name__, str(error)]
    rank.train()
    rank.update(1)
    rank.checkpoint_engine._publisher.close()
    return said


def killed(rank: Rank) -> list[str]:
    """Rank 1 dies between two tensors."""
    rank.update(0)

    def dying() -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(rank.engine.get_per_tensor_param()[0]):
            yield pair
            if number == 3 and rank.rank == 1:
                os._exit(9)

    try:
        asyncio.run(rank.checkpoint_engine.send_weights(dying(), global_steps=1))
    except dw.DeltawireError as error:
        return [type(error).__name__, str(error)]
    return []


def main(rank: int, ranks: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=ranks)
    for name in names:
        began = time.monotonic()
        report = scenario(name, rank, folder)
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(report))
    if "killed" not in names:
        dist.destroy_process_group()
    # the connections of a group that lost a rank are not closed in order
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
