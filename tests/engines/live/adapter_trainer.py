"""A trainer that publishes versions of an adapter, and how a server that follows it is asked about them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from deltawire.bucket.checkpoint_folder import fill
from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.engines.names import VERSION_HEADER
from deltawire.trainer import Publisher

from .live_server import Server, make_model


class AdapterTrainer:
    """Versions of an adapter for a model of `make_model`, each far enough from the last to say something else; with
    `small_steps`, as far as training moves it. Of queries and values, or of `every_layer` that is linear; in bfloat16
    or in `float32`. `config` is for more of its adapter_config.json."""

    def __init__(
        self,
        run: Path,
        base: Path,
        seed: int = 0,
        rank: int = 4,
        *,
        every_layer: bool = False,
        small_steps: bool = False,
        float32: bool = False,
        **config: Any,
    ) -> None:
        shape = json.loads((base / "config.json").read_text())
        width, inner = shape["hidden_size"], shape["intermediate_size"]
        queries, keys = (shape[f"num_{name}_heads"] * shape["head_dim"] for name in ("attention", "key_value"))
        # inputs and outputs
        modules = {"self_attn.q_proj": (width, queries), "self_attn.v_proj": (width, keys)}
        if every_layer:
            modules |= {"self_attn.k_proj": (width, keys), "self_attn.o_proj": (queries, width)}
            modules |= {"mlp.gate_proj": (width, inner), "mlp.up_proj": (width, inner), "mlp.down_proj": (inner, width)}
        self.run, self._rng, self._small_steps = run, np.random.default_rng(seed), small_steps
        self._float32 = float32
        self.shapes = {
            f"base_model.model.model.layers.{layer}.{module}.lora_{half}.weight": size
            for layer in range(shape["num_hidden_layers"])
            for module, (inputs, outputs) in modules.items()
            for half, size in (("A", (rank, inputs)), ("B", (outputs, rank)))
        }
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "bias": "none",
            "r": rank, "lora_alpha": 2 * rank, "target_modules": [name.partition(".")[2] for name in modules],
            "inference_mode": True, **config,
        }  # fmt: skip
        self.publisher = Publisher(run, files={"adapter_config.json": json.dumps(config).encode()})
        self.sizes: list[int] = []
        """Bytes of each version in the bucket."""
        self.weights = {
            name: self._rng.normal(0, 0.02, shape).astype(np.float32) if small_steps else np.zeros(shape, np.float32)
            for name, shape in self.shapes.items()
        }

    def step(self) -> None:
        """Move the weights."""
        for weights in self.weights.values():
            moved = self._rng.standard_normal(weights.shape, np.float32)
            if self._small_steps:
                weights += 1e-4 * moved
            else:
                weights[:] = 0.5 * moved

    def publish(self, *, moved: bool = True) -> int:
        """A version of the weights as they are; without small steps, of new ones unless told otherwise."""
        if moved and not self._small_steps:
            self.step()
        # the upper half of a float32 is a bfloat16
        halves = {name: (w.view(np.uint32) >> 16).astype(np.uint16) for name, w in self.weights.items()}
        result = self.publisher.publish(self.weights if self._float32 else halves).result(60)
        self.sizes.append(result.bytes)
        return result.version

    def checkout(self, version: int, folder: Path) -> Path:
        run = Run.open(str(self.run))
        folder.mkdir()
        fill(folder, run, run.manifest(version), checkout(run, version))
        return folder


def adapter(server: Server, name: str, *, every: float = 0.01, **expected: Any) -> dict[str, Any]:
    """Wait until the status of an adapter is as expected, and return it."""
    end = time.monotonic() + 120
    while True:
        [status] = [each for each in server.status()["adapters"] if each["name"] == name]
        if all(status[key] == value for key, value in expected.items()):
            return status
        assert time.monotonic() < end, f"wanted {expected}, found {status}\n{server.tail()}"
        time.sleep(every)


def switch_all_ranks_or_none(
    folder: Path, start: Callable[..., Server], greedy: Callable[[Any, str], Any], ranks: int, too_large: str
) -> None:
    """One rank fails: no rank switches. Adapters of another base model and of a higher rank, for which the engine says
    `too_large`, are refused by name, beside what can be served."""
    model, other = make_model(folder / "model", "qwen3"), make_model(folder / "other", "qwen3-tied")
    faults = folder / "faults"
    faults.mkdir()
    trainers = {
        "policy": AdapterTrainer(folder / "policy", model, 0),
        "stranger": AdapterTrainer(folder / "stranger", other, 1),
        "big": AdapterTrainer(folder / "big", model, 2, rank=32),
    }
    for trainer in trainers.values():
        trainer.publish()
    runs = {name: trainer.run for name, trainer in trainers.items()}
    server = start(model, folder / "log", runs, tp=ranks, LIVE_TEST_FAULTS=str(faults), DELTAWIRE_POLL="1")
    try:
        server.wait("/v1/models")
        adapter(server, "policy", state="healthy", version=0)
        assert "are for another base model" in adapter(server, "stranger", state="failed")["reason"]
        while too_large not in adapter(server, "big", state="starting")["reason"]:
            time.sleep(0.1)
        assert server.http.get("/health").status_code == 503
        before = greedy(server, "policy")
        (faults / f"adapter-{ranks - 1}").touch()
        trainers["policy"].publish()
        assert f"rank {ranks - 1}: " in adapter(server, "policy", state="degraded", version=0)["reason"]
        assert greedy(server, "policy") == before
        assert server.complete([5], model="policy").headers[VERSION_HEADER] == "0"
        (faults / f"adapter-{ranks - 1}").unlink()
        # at once, not a minute later
        server.http.post("/deltawire/sync", json={"adapter": "policy"}).raise_for_status()
        adapter(server, "policy", state="healthy", version=1)
        assert greedy(server, "policy") != before
        assert greedy(server, "policy@0") == before
        adapter(server, "policy", state="healthy", version=trainers["policy"].publish())
    finally:
        server.stop()
