"""One rank of a trainer that uses vLLM's own trainer API. Run by live_trainer.py:

trainer_rank.py RANK RANKS FOLDER SERVER SCENARIO…

Each scenario has a run and a report in FOLDER, except that `served` publishes to the run of the server.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
import vllm
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

import deltawire as dw
from deltawire.frameworks.vllm_trainer import DeltawireInit
from deltawire.models import ModelView

STEPS = 3
NEWER = hasattr(ModuleSource, "iter_full")
"""vLLM 0.33 or newer."""


class Halves(ModuleSource):
    """Each rank has every other tensor, as pipeline stages have whole layers."""

    def _mine(self, number: int, rank: int) -> bool:
        return number % dist.get_world_size() == rank

    if NEWER:
        from functools import cached_property

        @cached_property
        def metadata(self) -> list[Any]:
            named = enumerate(self._module.named_parameters())
            owners = [(i % dist.get_world_size(),) for i, _ in enumerate(self._module.parameters())]
            return [ParamMeta(name, p.dtype, tuple(p.shape), owners=owners[i]) for i, (name, p) in named]

        def implements_iter_local(self) -> bool:
            return False

        def iter_full(self) -> Iterator[tuple[str, Any]]:
            for i, (name, parameter) in enumerate(self._module.named_parameters()):
                full = parameter.full_tensor()
                if self._mine(i, dist.get_rank()):
                    yield name, full
    else:

        def held_names(self) -> list[str]:
            named = enumerate(self._module.named_parameters())
            return [name for i, (name, _) in named if self._mine(i, dist.get_rank())]

        def __iter__(self) -> Iterator[tuple[str, Any]]:
            for i, (name, tensor) in enumerate(super().__iter__()):
                yield name, tensor if self._mine(i, dist.get_rank()) else None


class Full(ModuleSource):
    """Full tensors that every rank gathers, also where vLLM has parts."""

    def implements_iter_local(self) -> bool:
        return False

    if NEWER:
        from functools import cached_property

        @cached_property
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, p.dtype, tuple(p.shape)) for name, p in self._module.named_parameters()]


class Trainer:
    def __init__(self, rank: int, folder: Path, source: Callable[[Any], Any], **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.engine = WeightTransferTrainerFactory.trainer_init(
            DeltawireInit(rank=rank, options={"files": folder / "model"}, **settings),
            client=HTTPVLLMWeightSyncClient(sys.argv[4]),
            source=source(self.model),
        )

    def train(self) -> None:
        self._optimizer.zero_grad()
        tokens = torch.randint(0, 300, (2, 16))
        self.model(input_ids=tokens, use_cache=False).logits.float().logsumexp(-1).mean().backward()
        self._optimizer.step()

    def digest(self) -> str:
        """Of what all ranks hold, gathered by nothing of deltawire."""
        full = {name: tensor.full_tensor().bfloat16() for name, tensor in self.model.state_dict().items()}
        return str(dw.digest_of(ModelView(full)))


def scenario(name: str, rank: int, folder: Path) -> dict[str, Any]:
    run = str(folder / ("served" if name.startswith("served") else name))
    source = {"halves": Halves, "full": Full}.get(name.partition("-")[0], ModuleSource)
    waits = {"wait": "servers", "timeout": 300} if name.startswith("served") else {"wait": "bucket"}
    trainer = Trainer(rank, folder, source, run=run, **waits)
    trained, served = [], []
    for _ in range(STEPS):
        trainer.train()
        trainer.engine.send_weights()
        trained.append(trainer.digest())
        if rank == 0 and waits["wait"] == "servers":
            served.append(httpx.get(f"{sys.argv[4]}/deltawire/digest", timeout=60).raise_for_status().json()["digest"])
    trainer.engine.shutdown()
    return {"trained": trained, "served": served, "vllm": vllm.__version__}


def main(rank: int, ranks: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=ranks)
    for name in names:
        began = time.monotonic()
        report = scenario(name, rank, folder)
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[5:])
