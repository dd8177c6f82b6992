"""What blocks find there when they run: names for Python, folders and runs for both."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import Any

from stage import Scene, Stage

import deltawire as dw

SCENES: dict[str, Scene] = {}


def scene(make: Scene) -> Scene:
    SCENES[make.__name__] = make
    return make


@scene
def training(stage: Stage) -> Mapping[str, Any]:
    """A model in fp32 and its tokenizer, three batches, and a step that changes some of its weights."""
    from tests.engines.server.serving import nudge, tiny_model, tokenizer

    return {"dw": dw, "model": tiny_model(), "tokenizer": tokenizer(), "batches": range(3), "train_step": nudge}


@scene
def preempted(stage: Stage) -> Mapping[str, Any]:
    """As `training`, for longer than this job may run: SIGTERM comes in the second step."""
    names = training(stage)

    def step(model: Any, batch: int) -> None:
        assert batch < 2, "the last version was that of step 1"
        names["train_step"](model, batch)
        if batch == 1:
            signal.raise_signal(signal.SIGTERM)

    return {**names, "batches": range(10), "train_step": step}


@scene
def follower(stage: Stage) -> Mapping[str, Any]:
    """A model in fp32 with other weights, in a process that follows the run above; the trainer goes on meanwhile."""
    from tests.engines.server.serving import nudge, tiny_model

    learned = stage.names["model"]

    def train() -> None:
        while stage.names.get("replica") is None or stage.names["replica"].version is None:
            time.sleep(0.01)
        nudge(learned, 9)
        with dw.Publisher(stage.substituted("s3://runs/wordle")) as publisher:
            publisher.publish(learned)

    stage.meanwhile(train)
    return {"model": tiny_model(seed=1)}


@scene
def lora(stage: Stage) -> Mapping[str, Any]:
    """A model with a LoRA adapter, and a publisher for each of the two ways."""
    from peft import LoraConfig, get_peft_model

    from tests.engines.server.serving import tiny_model

    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    return {"model": model}


@scene
def checkpoint(stage: Stage) -> Mapping[str, Any]:
    """`my-model`, a checkpoint folder as `save_pretrained` writes it."""
    from tests.engines.server.serving import checkpoint, tiny_model

    checkpoint(stage.clone / "my-model", tiny_model().bfloat16())
    return {}


@scene
def story(stage: Stage) -> Mapping[str, Any]:
    """`my-model` in fp32, as examples/models/stories15m.py makes it."""
    from tests.engines.server.serving import checkpoint, tiny_model

    checkpoint(stage.clone / "my-model", tiny_model().float())
    return {}


@scene
def chat(stage: Stage) -> Mapping[str, Any]:
    """`my-model`, and three versions of it at s3://runs/chat."""
    from safetensors.torch import load_file

    checkpoint(stage)
    weights = load_file(stage.clone / "my-model" / "model.safetensors")
    with stage.s3(), dw.Publisher(stage.substituted("s3://runs/chat"), files=stage.clone / "my-model") as publisher:
        for _ in range(3):
            publisher.publish(weights, wait=True)
            next(iter(weights.values())).view(-1)[:9] += 1
    return {}


@scene
def dataset(stage: Stage) -> Mapping[str, Any]:
    """A model of transformers with its tokenizer, and eight sequences to train it on."""
    import torch

    from tests.engines.server.serving import tiny_model, tokenizer

    tokens = [torch.arange(3, 15) + i for i in range(8)]
    return {
        "model": tiny_model(),
        "tokenizer": tokenizer(),
        "dataset": [{"input_ids": one, "labels": one} for one in tokens],
    }
