"""Publisher(view="fp8-block"): an ordinary run whose weights are the view of the trainer's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file

import deltawire as dw
from deltawire.bucket.checkpoint_folder import fill
from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core import full
from deltawire.core.errors import Misconfigured
from deltawire.models import ModelView
from deltawire.trainer import DeltaAdamW, FusedDetector, Publisher, SnapshotDetector
from deltawire.views import FP8_BLOCK
from deltawire.views.blocks import Blocks
from deltawire.views.host import BlockView


class Small(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(40, 160)
        self.up = torch.nn.Linear(160, 300)
        self.down = torch.nn.Linear(300, 160, bias=False)
        self.norm = torch.nn.LayerNorm(160)
        self.lm_head = torch.nn.Linear(160, 40, bias=False)
        self.lm_head.weight = self.embed.weight
        self.to(dtype)


def seeded(dtype: torch.dtype = torch.float32) -> Small:
    torch.manual_seed(0)
    return Small(dtype)


def step(model: torch.nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def expected(model: torch.nn.Module) -> str:
    """Digest of the view of a model's weights as bf16."""
    source = ModelView(model, "auto")
    return str(full.digest_of(BlockView(source, Blocks(source.schema, FP8_BLOCK))))


@pytest.mark.parametrize("detector", [None, SnapshotDetector])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_run_has_the_view_of_each_step(tmp_path: Path, dtype: torch.dtype, detector: Any) -> None:
    """Compared in host memory, or as on a GPU."""
    model, digests = seeded(dtype), []
    with Publisher(str(tmp_path), view="fp8-block", detector=detector() if detector else None) as publisher:
        for number in range(4):
            step(model, number)
            digests.append(expected(model))
            publisher.publish(model).result(60)
    run = Run.open(str(tmp_path))
    assert [run.manifest(v).digest for v in run.listed()] == digests
    assert verify(run).ok
    by_name = run.schema.by_name()
    assert {name: by_name[name].dtype for name in ("up.weight", "up.weight_scale_inv", "up.bias", "embed.weight")} == {
        "up.weight": "F8_E4M3", "up.weight_scale_inv": "F32", "up.bias": "BF16", "embed.weight": "BF16",
    }  # fmt: skip
    assert run.schema.ties == {"lm_head.weight": "embed.weight"}
    assert run.manifest(1).origin is None


def test_a_mapping_and_a_folder_are_published_as_the_same_view(tmp_path: Path) -> None:
    model = seeded(torch.bfloat16)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    full.write_checkpoint(_folder(tmp_path / "folder"), ModelView(state))
    (tmp_path / "folder" / "config.json").write_text("{}")
    found = []
    for number, source in enumerate((state, full.Checkpoint(tmp_path / "folder"))):
        place = str(tmp_path / f"run-{number}")
        with Publisher(place, view="fp8-block", files=tmp_path / "folder") as publisher:
            publisher.publish(source, wait=True)
        run = Run.open(place)
        found.append(run.manifest(0).digest)
        config = json.loads(run.store.get(run.manifest(0).files[0].key).data)
        assert config["quantization_config"]["weight_block_size"] == [128, 128]
    source = ModelView(state)
    assert found == [str(full.digest_of(BlockView(source, Blocks(source.schema, FP8_BLOCK))))] * 2


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_a_restarted_trainer_continues_the_run(tmp_path: Path) -> None:
    model = seeded()
    for number in range(3):
        step(model, number)
        with Publisher(str(tmp_path), view="fp8-block") as publisher:
            publisher.publish(model)
    run = Run.open(str(tmp_path))
    assert [run.manifest(v).links[0].kind for v in run.listed()] == ["anchor", "delta", "delta"]
    assert run.manifest(2).digest == expected(model)


def test_a_replica_follows_it_into_tensors(tmp_path: Path) -> None:
    model = seeded()
    with Publisher(str(tmp_path), view="fp8-block") as publisher:
        publisher.publish(model, wait=True)
        source = ModelView(model, "auto")
        view = BlockView(source, Blocks(source.schema, FP8_BLOCK))
        live = {t.name: np.zeros(t.shape, _NUMPY[t.dtype]) for t in view.schema.tensors}
        # numpy has no e4m3: torch's
        live = {name: _as_torch(view.schema.by_name()[name], array) for name, array in live.items()}
        replica = dw.Replica(str(tmp_path), heartbeat=0)
        replica.sync(live)
        step(model, 1)
        publisher.publish(model, wait=True)
        replica.sync(live)
    weight = live["down.weight"].float()
    scales = live["down.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)[:160, :300]
    exact = model.down.weight.detach().bfloat16().float()
    assert (weight * scales - exact).abs().max() <= exact.abs().max() / 16


_NUMPY = {"F8_E4M3": np.uint8, "F32": np.float32, "BF16": np.uint16}


def _as_torch(spec: Any, array: np.ndarray) -> torch.Tensor:
    kinds = {"F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32, "BF16": torch.bfloat16}
    return torch.zeros(spec.shape, dtype=kinds[spec.dtype])


def test_experts_are_converted_one_by_one_under_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=48, intermediate_size=64, moe_intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    with Publisher(str(tmp_path), view="fp8-block") as publisher:
        publisher.publish(model, wait=True)
    run = Run.open(str(tmp_path))
    by_name = run.schema.by_name()
    assert by_name["model.layers.1.mlp.experts.3.down_proj.weight"].dtype == "F8_E4M3"
    assert by_name["model.layers.1.mlp.experts.3.down_proj.weight_scale_inv"].shape == (1, 1)
    assert by_name["model.layers.1.mlp.gate.weight"].dtype == "BF16"
    assert run.manifest(0).digest == expected(model)
    [config_file] = [file for file in run.manifest(0).files if file.name == "config.json"]
    said = json.loads(run.store.get(config_file.key).data)["quantization_config"]["modules_to_not_convert"]
    assert {"lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"} <= set(said)
    assert not any("experts" in name for name in said)
    checkout(run, 0)


def test_transformers_loads_a_checkout(tmp_path: Path) -> None:
    """Without a GPU it multiplies weights and scales, which shows that it reads both as they are meant."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with Publisher(str(tmp_path / "run"), view="fp8-block") as publisher:
        publisher.publish(model, wait=True)
    run = Run.open(str(tmp_path / "run"))
    fill(_folder(tmp_path / "checkout"), run, run.manifest(0), checkout(run, 0))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkout", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "checkout" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    scales = stored[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    weight = loaded.model.layers[0].mlp.down_proj.weight.float()
    if not torch.cuda.is_available():
        assert torch.equal(weight, (stored[name].float() * scales).bfloat16().float())
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight.bfloat16())


def test_detectors_that_do_not_compare_what_is_published_are_refused(tmp_path: Path) -> None:
    model = seeded(torch.bfloat16)
    optimizer = DeltaAdamW(model.parameters(), lr=1e-5)
    for detector in (optimizer, FusedDetector(model)):
        with pytest.raises(Misconfigured, match="leave out detector="):
            Publisher(str(tmp_path), view="fp8-block", detector=detector)
    with pytest.raises(Misconfigured, match="there is no view"):
        Publisher(str(tmp_path), view="fp4")
