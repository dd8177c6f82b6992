"""Against a real ms-swift on a CPU: `make test-trainers FRAMEWORK=swift`. The everyday run has no ms-swift."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import swift.callbacks
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import deltawire as dw
from deltawire.errors import Misconfigured
from deltawire.frameworks import swift as adapter
from deltawire.models import ModelView
from tests.engines.live.live_server import make_model

ROOT = Path(__file__).parents[3]
LIMIT = 400
HERE = ["--model_type", "qwen3", "--template", "qwen3", "--use_hf", "true", "--use_cpu", "true", "--report_to", "none"]
"""What a tiny model, which ms-swift does not know, needs on a CPU."""
COMMANDS = re.findall(r"```bash\n(swift (?:sft|rlhf) .*?)```", (ROOT / "docs" / "ms-swift.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swift")
    make_model(folder / "model", "qwen3")
    asked = [{"role": "user", "content": f"t{number} t6 t7"} for number in range(5, 9)]
    answered = [{"role": "assistant", "content": f"t{number} t9 t11"} for number in range(18, 22)]
    rows = [{"messages": list(messages)} for messages in zip(asked, answered, strict=True)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "grpo.jsonl").write_text("".join(json.dumps({"messages": [m]}) + "\n" for m in asked))
    return folder


def train(
    folder: Path, name: str, number: int, *, plugin: str = "", environment: dict[str, str] | None = None, **changes: str
) -> Path:
    """Run a command of the page, with the data, model and run of this test. Returns ms-swift's last checkpoint."""
    data = folder / ("grpo.jsonl" if "rlhf" in COMMANDS[number] else "sft.jsonl")
    command = COMMANDS[number].replace("\\\n", " ")
    for printed, here in {"/models/policy": folder / "model", "/data/train.jsonl": data, **changes}.items():
        assert printed in command
        command = command.replace(printed, str(here))
    place = folder / name
    place.mkdir()
    (place / "publish.py").write_text(
        plugin or f"from deltawire.frameworks.swift import publish_to\n\npublish_to({str(place / 'run')!r})\n"
    )
    program, *arguments = shlex.split(command)
    said = subprocess.run(
        [sys.executable, str(Path(sys.executable).with_name(program)), *arguments, *HERE], cwd=place, text=True,
        env={
            **os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1", **(environment or {}),
        },
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT,
    )  # fmt: skip
    (place / "log").write_text(said.stdout)
    assert said.returncode == 0, said.stdout[-6000:]
    (saved,) = place.glob("out/*/checkpoint-3")
    return saved


def proven(run: Path, saved: Path, folder: Path) -> None:
    """The newest version has the bits of a checkpoint, and a fresh model gets them."""
    opened = dw.Run.open(str(run))
    manifests = [opened.manifest(version) for version in opened.listed()]
    assert manifests[0].step == 0
    assert manifests[-1].step == 3
    assert len({manifest.digest for manifest in manifests}) == len(manifests) > 1
    assert {manifest.links[0].kind for manifest in manifests[1:]} == {"delta"}
    assert str(dw.digest_of(ModelView(load_file(saved / "model.safetensors")))) == manifests[-1].digest
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"), dtype=torch.bfloat16)
    assert dw.Replica(str(run), heartbeat=0).sync(model) == manifests[-1].version
    assert str(dw.digest_of(ModelView(model))) == manifests[-1].digest


def test_a_full_training_is_followed(folder: Path) -> None:
    saved = train(folder, "full", 0)
    proven(folder / "full" / "run", saved, folder)
    manifest = dw.Run.open(str(folder / "full" / "run")).manifest(0)
    assert {"config.json", "tokenizer.json"} <= {file.name for file in manifest.files}
    logged = [json.loads(line) for line in (saved.parent / "logging.jsonl").read_text().splitlines()]
    assert any("deltawire/version" in line for line in logged)


def test_two_processes_publish_together(folder: Path) -> None:
    saved = train(folder, "two", 0, environment={"NPROC_PER_NODE": "2"})
    proven(folder / "two" / "run", saved, folder)


def test_an_adapter_is_published_alone(folder: Path, tmp_path: Path) -> None:
    saved = train(folder, "lora", 1)
    run = dw.Run.open(str(folder / "lora" / "run"))
    assert run.manifest(run.newest()).step == 3
    expected = load_file(saved / "adapter_model.safetensors")
    weights = {tensor.name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for tensor in run.schema.tensors}
    dw.Replica(str(folder / "lora" / "run"), heartbeat=0).sync(weights)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name].bfloat16()) for name in expected)


def test_grpo_is_followed(folder: Path) -> None:
    """With a reward of this test, which a random model gets."""
    run = folder / "grpo" / "run"
    plugin = f"""
from swift.rewards import ORM, orms

from deltawire.frameworks.swift import publish_to

class Even(ORM):
    def __call__(self, completions, **more):
        return [float(sum(map(ord, completion)) % 2) for completion in completions]

orms["even"] = Even
publish_to({str(run)!r})
"""
    saved = train(folder, "grpo", 2, plugin=plugin, **{"--reward_funcs format": "--reward_funcs even"})
    proven(run, saved, folder)


def test_a_swift_with_another_hook_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swift.callbacks.TrainerCallback, "__init__", lambda self, trainer: None)
    with pytest.raises(Misconfigured, match=rf"ms-swift {adapter.__version__} makes .* than ms-swift 4\.6\.0"):
        adapter.publish_to("memory://swift")


def test_wrong_settings_are_named(folder: Path) -> None:
    with pytest.raises(Misconfigured, match="needs the address of the run"):
        adapter.publish_to("")
    with pytest.raises(AssertionError, match=r"BadURL"):
        train(folder, "wrong", 0, plugin="import deltawire.frameworks.swift as s\ns.publish_to('ftp://nowhere')\n")


def test_the_callback_comes_before_the_reporters() -> None:
    handler = SimpleNamespace(callbacks=["reporter"])
    trainer: Any = SimpleNamespace(
        callback_handler=handler, remove_callback=lambda each: handler.callbacks.remove(each)
    )
    adapter.publish_to("memory://swift")
    made = swift.callbacks.callbacks_map["deltawire"](None, trainer)
    handler.callbacks.append(made)
    made.on_init_end()
    assert handler.callbacks == [made, "reporter"]
