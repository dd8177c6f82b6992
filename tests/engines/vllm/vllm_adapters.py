"""A vLLM server that follows adapters alone, and a trainer that publishes versions of one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from vllm_live import BIN, Server

from deltawire.bucket.checkpoint_folder import fill
from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.trainer import Publisher


class AdapterServer(Server):
    """`vllm serve` without a weight-transfer back end."""

    def program(self, model: Path) -> list[str]:
        return [str(BIN / "vllm"), "serve", str(model)]


def start(model: Path, log: Path, adapters: Mapping[str, Path], *flags: str, **options: Any) -> AdapterServer:
    """A server that follows these runs, by the names of adapters."""
    room = ["--enable-lora", "--max-loras", str(len(adapters) + 1), "--max-cpu-loras", str(2 * len(adapters) + 1)]
    named = ", ".join(f"{name}={run}" for name, run in adapters.items())
    return AdapterServer(model, log, flags=[*room, *flags], DELTAWIRE_ADAPTERS=named, **options)


class AdapterTrainer:
    """Versions of an adapter for a model of `make_model`, each far enough from the last to say something else."""

    def __init__(self, run: Path, base: Path, seed: int = 0, rank: int = 4) -> None:
        shape = json.loads((base / "config.json").read_text())
        width, heads = shape["hidden_size"], shape["head_dim"]
        modules = {"q_proj": shape["num_attention_heads"] * heads, "v_proj": shape["num_key_value_heads"] * heads}
        self.run, self._rng = run, np.random.default_rng(seed)
        self.shapes = {
            f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{half}.weight": size
            for layer in range(shape["num_hidden_layers"])
            for module, out in modules.items()
            for half, size in (("A", (rank, width)), ("B", (out, rank)))
        }
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "bias": "none",
            "r": rank, "lora_alpha": 2 * rank, "target_modules": [*modules], "inference_mode": True,
        }  # fmt: skip
        self.publisher = Publisher(run, files={"adapter_config.json": json.dumps(config).encode()})

    def publish(self) -> int:
        # the upper half of a float32 is a bfloat16
        weights = {
            name: (self._rng.normal(0, 0.5, shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            for name, shape in self.shapes.items()
        }
        return self.publisher.publish(weights).result(60).version

    def checkout(self, version: int, folder: Path) -> Path:
        run = Run.open(str(self.run))
        folder.mkdir()
        fill(folder, run, run.manifest(version), checkout(run, version))
        return folder


def adapter(server: Server, name: str, **expected: Any) -> dict[str, Any]:
    """Wait until the status of an adapter is as expected, and return it."""
    end = time.monotonic() + 120
    while True:
        [status] = [each for each in server.status()["adapters"] if each["name"] == name]
        if all(status[key] == value for key, value in expected.items()):
            return status
        assert time.monotonic() < end, f"wanted {expected}, found {status}\n{server.tail()}"
        time.sleep(0.01)
