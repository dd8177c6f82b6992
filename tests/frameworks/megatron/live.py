"""Against a real Megatron-core and Megatron-Bridge on a CPU: `make test-trainers FRAMEWORK=megatron`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stand_in  # noqa: F401
import torch
from megatron.bridge import AutoBridge
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import deltawire as dw
from deltawire.bucket.verify import verify
from deltawire.errors import Misconfigured
from deltawire.frameworks import megatron as adapter
from deltawire.models import ModelView

RANKS = 2
LIMIT = 600
PUBLISHED = [
    "untied-pairs-tp2",
    "untied-shards-tp2",
    "tied-pairs-pp2",
    "tied-shards-pp2",
    "tied-shards-tp2",
    "moe-pairs-ep2",
    "moe-shards-ep2",
    "moe-shards-tp2",
    "untied-shards-dp2",
    "padded-shards-tp2",
]
REFUSED = ["untied-computed-tp2", "untied-unequal-tp2", "untied-changed-tp2", "untied-restarted-tp2"]
PAGE = "untied-page-tp2"


def run_ranks(folder: Path, names: list[str]) -> list[int]:
    """Run scenarios on all ranks. Returns exit codes; what they printed is in FOLDER/log-RANK."""
    here = Path(__file__).parent
    settings = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    (folder / "ranks").unlink(missing_ok=True)
    logs = [(folder / f"log-{rank}").open("w") for rank in range(RANKS)]
    command = [sys.executable, str(here / "megatron_rank.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), str(folder), *names], env=settings, stdout=log, stderr=subprocess.STDOUT
        )
        for rank, log in enumerate(logs)
    ]
    try:
        return [rank.wait(LIMIT) for rank in ranks]
    finally:
        for rank, log in zip(ranks, logs, strict=True):
            rank.kill()
            log.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models: with a head of their own, with a tied one, with experts, and with a vocabulary that TP 2 pads."""
    folder = tmp_path_factory.mktemp("megatron")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
    }
    torch.manual_seed(3)
    for name, vocabulary in (("untied", 512), ("tied", 512), ("padded", 500)):
        config = Qwen3Config(**sizes, vocab_size=vocabulary, tie_word_embeddings=name == "tied")
        Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder / name)
    experts = Qwen3MoeConfig(
        **sizes,
        vocab_size=512,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(experts).bfloat16().save_pretrained(folder / "moe")
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    codes = run_ranks(folder, [*PUBLISHED, *REFUSED, PAGE])
    assert codes == [0] * RANKS, "\n".join((folder / f"log-{rank}").read_text()[-3000:] for rank in range(RANKS))
    return folder


def reports(folder: Path, name: str) -> list[Any]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_step_is_proven_on_a_replica(trained: Path, name: str) -> None:
    """Versions are what Bridge exports after each step, in small deltas; a fresh model becomes the newest one."""
    ours, theirs = reports(trained, name)
    run = dw.Run.open(str(trained / name))
    manifests = [run.manifest(version) for version in run.listed()]
    assert ours["digests"] == theirs["digests"]
    assert len({*ours["digests"]}) == len(manifests) == 4
    assert [manifest.digest for manifest in manifests] == ours["digests"]
    assert [manifest.step for manifest in manifests] == [0, 1, 2, 3]
    whole = manifests[0].links[0].bytes
    for manifest in manifests[1:]:
        (link,) = manifest.links
        assert link.kind == "delta"
        assert link.bytes < whole / 10
    assert ours["as loaded"]
    assert theirs["as loaded"]

    source = trained / name.split("-")[0]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    replica = dw.Replica(str(trained / name), heartbeat=0)
    assert replica.sync(model) == 3
    assert str(dw.digest_of(ModelView(model))) == ours["digests"][-1]


def test_names_and_shapes_are_those_of_the_checkpoint(trained: Path) -> None:
    for name in PUBLISHED:
        run = dw.Run.open(str(trained / name))
        expected = AutoModelForCausalLM.from_pretrained(trained / name.split("-")[0], dtype=torch.bfloat16)
        assert run.schema.tensors == ModelView(expected).schema.tensors, name


def test_a_mapping_that_computes_is_refused_by_name_on_all_ranks(trained: Path) -> None:
    for said in reports(trained, "untied-computed-tp2"):
        for how in ("plus one", "cast", "padded"):
            kind, message = said[how]
            assert kind == "UnsupportedTensor"
            assert re.match(r"Megatron-Bridge computes '[\w.]*norm.weight', by AutoMapping of 'decoder\.", message), (
                message
            )
            assert "export_hf_weights" in message
        assert "'decoder.layers.1.mlp.linear_fc2.weight' has an adapter" in said["adapter"][1]
        assert "'decoder.final_layernorm.weight' is not a plain tensor, but a Quantized" in said["quantized"][1]


def test_copies_with_other_bits_are_refused_by_name_on_all_ranks(trained: Path) -> None:
    run = dw.Run.open(str(trained / "unequal"))
    for said in reports(trained, "untied-unequal-tp2"):
        kind, message = said["refused"]
        assert kind == "SchemaMismatch"
        assert "ranks 0 and 1 hold the same part of 'model.layers.1.input_layernorm.weight'" in message
        assert run.manifest(0).digest == said["digest"]
    assert run.newest() == 0


def test_parameters_that_were_replaced_are_published_and_another_model_is_refused(trained: Path) -> None:
    run = dw.Run.open(str(trained / "changed"))
    for said in reports(trained, "untied-changed-tp2"):
        assert run.manifest(1).digest == said["digest"]
        kind, message = said["another"]
        assert kind == "SchemaMismatch"
        assert "'decoder.final_layernorm.weight' is not what it was" in message


def test_a_run_goes_on_in_another_parallel(trained: Path) -> None:
    run = dw.Run.open(str(trained / "restarted"))
    assert [run.manifest(version).step for version in run.listed()] == [0, 1, 2, 3]
    assert run.manifest(3).links[0].kind == "delta"
    for said in reports(trained, "untied-restarted-tp2"):
        assert run.manifest(3).digest == said["digest"]


def test_the_script_of_the_page_publishes_each_step(trained: Path) -> None:
    run = dw.Run.open(str(trained / "page"))
    digests = [run.manifest(version).digest for version in run.listed()]
    for said in reports(trained, PAGE):
        assert digests[-1] == said["digests"][-1]
        assert len({*said["digests"]}) == 3
        # a slow disk may merge two steps
        assert {*digests} <= {*said["digests"]}
    assert "config.json" in {file.name for file in run.manifest(run.newest()).files}


def test_a_rank_that_dies_ends_the_publish_of_the_other_one(folder: Path, trained: Path) -> None:
    assert run_ranks(folder, ["untied-killed-tp2"]) == [0, 9]
    kind, message = json.loads((folder / "untied-killed-tp2-0.json").read_text())
    assert kind == "RankLost", message
    run = dw.Run.open(str(folder / "killed"))
    assert run.newest() == 0
    assert verify(run).ok


# ── a Megatron with another hook ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("change", ["method", "argument", "task"])
def test_a_bridge_with_another_export_is_refused_with_both_versions(
    change: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge = AutoBridge.from_hf_pretrained(str(folder / "tied"))
    if change == "method":
        monkeypatch.delattr(AutoBridge, "get_conversion_tasks")
    elif change == "argument":
        monkeypatch.setattr(AutoBridge, "export_hf_weights", lambda self, model, tasks: iter(()))
    else:
        other = [SimpleNamespace(name="weight")]
        monkeypatch.setattr(AutoBridge, "get_conversion_tasks", lambda self, megatron_model: other)
    here = f"megatron-core {version('megatron-core')} and megatron-bridge {version('megatron-bridge')} export weights"
    with pytest.raises(Misconfigured, match=rf"{re.escape(here)} in another way than megatron-core 0"):
        adapter._tasks(bridge, [])
