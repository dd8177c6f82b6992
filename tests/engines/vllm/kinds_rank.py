"""One rank of trainers of several kinds, one after the other, that publish a model to the run of a server.

kinds_rank.py RANK RANKS FOLDER SERVER KIND…       run by live_kinds.py, with the model in FOLDER/model

After each version they ask the server for the digest of its live weights; FOLDER/KIND-RANK.json has it beside that of
the trained ones.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import deltawire as dw
from deltawire.frameworks.servers import wait_for
from deltawire.models import ModelView

VERSIONS = 2


def full_of(model: Any) -> dict[str, torch.Tensor]:
    """All weights, gathered by nothing of deltawire."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
            return dict(model.state_dict())
    if hasattr(model, "zero_gather_16bit_weights_on_model_save"):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.module.parameters())):
            return {name: p.detach().clone() for name, p in model.module.named_parameters()}
    found = getattr(model, "module", model).state_dict()
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in found.items()}


def shards_of(model: Any) -> list[dw.Shard]:
    """Of every weight the rows of this rank, and a flat range of those without rows."""
    found, rank, size = [], dist.get_rank(), dist.get_world_size()
    for name, weight in model.state_dict().items():
        if weight.ndim == 1:
            mine = range(len(weight) * rank // size, len(weight) * (rank + 1) // size)
            found.append(dw.Shard(name, weight[mine.start : mine.stop], weight.shape, mine))
        else:
            rows = slice(len(weight) * rank // size, len(weight) * (rank + 1) // size)
            found.append(dw.Shard(name, weight[rows], weight.shape, (rows,)))
    return found


def made(kind: str, folder: Path) -> tuple[Any, Any]:
    """A model as this kind of training has it, and what steps it."""
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    match kind:
        case "fsdp2":
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        case "fsdp1":
            model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        case "ddp":
            model = DistributedDataParallel(model)
        case zero if zero.startswith("zero"):
            import deepspeed

            sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": int(zero[-1]), "stage3_param_persistence_threshold": 40},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
                "zero_force_ds_cpu_optimizer": False,
            }
            engine = deepspeed.initialize(model=model, config=config)[0]
            return engine, engine
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def step(model: Any, optimizer: Any) -> None:
    loss = model(input_ids=torch.randint(0, 300, (1, 16)), use_cache=False).logits.float().logsumexp(-1).mean()
    if hasattr(model, "backward"):
        model.backward(loss)
        model.step()
    else:
        loss.backward()
        if not hasattr(model, "no_sync"):  # nothing reduces the gradients of these
            for parameter in model.parameters():
                if not hasattr(parameter, "to_local"):
                    dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def main(rank: int, ranks: int, folder: Path, server: str, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=ranks)
    for kind in kinds:
        model, optimizer = made(kind, folder / "model")
        options = {"files": folder / "model", "wire_dtype": "bf16", "continues": True}
        report: list[list[str]] = []
        with dw.Publisher(str(folder / "served"), **options) as publisher:
            for _ in range(VERSIONS):
                step(model, optimizer)
                match kind:
                    case "generator":
                        weights: Any = iter(model.state_dict().items())
                    case "shards":
                        weights = shards_of(model)
                    case _:
                        weights = model
                version = publisher.publish(weights).result().version
                trained = str(dw.digest_of(ModelView({n: w.bfloat16() for n, w in full_of(model).items()})))
                wait_for([server], version, 300)
                with urllib.request.urlopen(f"{server}/deltawire/digest", timeout=60) as answer:
                    report.append([trained, json.load(answer)["digest"]])
                dist.barrier()
        (folder / f"{kind}-{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5:])
