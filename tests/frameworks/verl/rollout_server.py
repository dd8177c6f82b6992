"""verl's own vLLM server in a Ray actor, which follows a run. Run by live_server.py: rollout_server.py FOLDER.

The folder has a model; its run, and what was found in report.json, go there too.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout import ServerAdapter
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

import deltawire as dw
from deltawire.frameworks.verl import DeltawireManager
from deltawire.models import ModelView

STEPS = 3
PROMPT = [5, 9, 11]
TOKENS = 8


class Trainer:
    """A worker group of one process, which brings its model as verl's generator does."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model = model
        self.engine = CheckpointEngineRegistry.new("deltawire", bucket_size=1, **options)

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        weights = iter(self.model.state_dict().items())
        with ThreadPoolExecutor(1) as actor:
            figures = actor.submit(lambda: asyncio.run(self.engine.send_weights(weights, global_steps=global_steps)))
        return [ray.put(figures.result())]

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                some = torch.rand(parameter.shape) < 0.02
                parameter += 0.1 * torch.randn(parameter.shape) * some

    def generate(self) -> list[int]:
        with torch.no_grad():
            prompt = torch.tensor([PROMPT])
            made = self.model.generate(prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
        return made[0, len(PROMPT) :].tolist()


def start(folder: Path) -> Any:
    """With the settings of docs/verl.md."""
    config = RolloutConfig(
        name="vllm",
        tensor_model_parallel_size=1,
        load_format="auto",
        free_cache_engine=False,
        enable_sleep_mode=False,
        enforce_eager=True,
        max_model_len=256,
        max_num_batched_tokens=256,
        max_num_seqs=4,
        prompt_length=64,
        response_length=64,
        engine_kwargs={"vllm": {"weight_transfer_config": {"backend": "deltawire"}}},
    )
    model = HFModelConfig(path=str(folder / "model"), override_config={"attn_implementation": "sdpa"})
    actor = ray.remote(vLLMHttpServer).options(num_cpus=1, max_concurrency=50)
    server = actor.remote(
        config=config,
        model_config=model,
        rollout_mode=RolloutMode.STANDALONE,
        workers=[],
        replica_rank=0,
        node_rank=0,
        gpus_per_node=1,
        nnodes=1,
        cuda_visible_devices="",
    )
    ray.get(server.launch_server.remote())
    return server


def main(folder: Path) -> None:
    torch.manual_seed(1)
    run = os.environ["DELTAWIRE_RUN"]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    trainer = Trainer(model, run=run, files=str(folder / "model"))
    # a server waits for the first version
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, _node_ip_address="127.0.0.1")
    DeltawireManager(config_of(run), trainer, []).update_weights(0)
    server = start(folder)
    host, port = ray.get(server.get_server_address.remote())
    replica = SimpleNamespace(server_address=f"{host}:{port}", servers=[server])
    manager = DeltawireManager(config_of(run), trainer, [replica])

    def ask(path: str) -> Any:
        request = Request(f"http://{host}:{port}{path}", headers={"Authorization": "Bearer of-a-test"})
        with build_opener(ProxyHandler({})).open(request, timeout=60) as answer:
            return json.load(answer)

    report = []
    for step in range(1, STEPS + 1):
        trainer.step()
        manager.update_weights(10 * step)
        sampling = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
        sample = ray.get(server.generate.remote(PROMPT, sampling, f"{time.monotonic()}"))
        report.append(
            {
                "status": ask("/deltawire/status"),
                "live": ask("/deltawire/digest")["digest"],
                "trained": str(dw.digest_of(ModelView(model))),
                "sampled": list(sample.token_ids),
                "expected": trainer.generate(),
                "step": sample.extra_fields["global_steps"],
            }
        )
    # what verl's own manager has a rollout worker do: its server takes the step, and keeps its weights and caches
    worker = SimpleNamespace(use_shm=False, server_handle=server, _ensure_server_handle=lambda: True)
    update = ServerAdapter.update_weights(
        SimpleNamespace(_update_delta_weights=partial(ServerAdapter._update_delta_weights, worker)),
        trainer.engine.receive_weights(),
        global_steps=77,
        wire_format=trainer.engine.wire_format,
    )
    asyncio.run(update)
    sample = ray.get(server.generate.remote(PROMPT, {"max_tokens": 1}, "last"))
    report.append({"step": sample.extra_fields["global_steps"], "status": ask("/deltawire/status")})
    (folder / "report.json").write_text(json.dumps(report))
    trainer.engine._publisher.close()
    ray.kill(server)
    ray.shutdown()


def config_of(run: str) -> CheckpointEngineConfig:
    return CheckpointEngineConfig(backend="deltawire", engine_kwargs={"deltawire": {"run": run}})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
