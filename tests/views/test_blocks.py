"""What views convert, and what config.json says of them."""

from __future__ import annotations

import json

import pytest

from deltawire.core.errors import Misconfigured, SchemaMismatch
from deltawire.core.schema import Schema, TensorSpec
from deltawire.views import FP8_BLOCK, FP8_BLOCK_UE8M0, check_view
from deltawire.views.blocks import Blocks, converts, with_config
from view_models import EXPERTS, SCHEMA


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), True),
        ("model.layers.0.mlp.gate_proj.weight", (64, 64), True),
        ("model.layers.0.mlp.gate_up_proj.weight", (64, 64), True),
        ("model.layers.0.mlp.experts.3.down_proj.weight", (64, 64), True),
        ("model.layers.0.block_sparse_moe.experts.3.w1.weight", (64, 64), True),
        ("model.layers.0.mlp.experts.down_proj", (4, 64, 64), True),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 64), False),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", (64, 64), True),
        ("transformer.h.0.attn.c_attn.weight", (64, 64), True),
        ("model.embed_tokens.weight", (64, 64), False),
        ("lm_head.weight", (64, 64), False),
        ("transformer.wte.weight", (64, 64), False),
        ("model.layers.0.mlp.gate.weight", (8, 64), False),
        ("model.layers.0.mlp.router.weight", (8, 64), False),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 64), False),
        ("model.layers.0.input_layernorm.weight", (64,), False),
        ("model.layers.0.self_attn.q_norm.weight", (2, 64), False),
        ("model.layers.0.self_attn.q_proj.bias", (64,), False),
        ("model.layers.0.linear_attn.conv1d.weight", (64, 1, 4), False),
        ("model.visual.blocks.0.mlp.fc1.weight", (64, 64), False),
    ],
)
def test_which_tensors_are_converted(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert converts(TensorSpec(name, "BF16", shape)) is expected


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "F64"])
def test_what_is_not_a_weight_of_sixteen_or_thirty_two_bits_stays(dtype: str) -> None:
    assert not converts(TensorSpec("q_proj.weight", dtype, (64, 64)))


def test_the_layout_of_block_fp8_checkpoints() -> None:
    made = Blocks(SCHEMA, FP8_BLOCK).schema.by_name()
    assert (made["layers.0.q_proj.weight"].dtype, made["layers.0.q_proj.weight"].shape) == ("F8_E4M3", (300, 257))
    scale = made["layers.0.q_proj.weight_scale_inv"]
    assert (scale.dtype, scale.shape) == ("F32", (3, 3))
    assert made[EXPERTS + "_scale_inv"].shape == (3, 2, 2)


def test_a_model_with_nothing_to_convert_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match="fp8-block converts no tensor"):
        Blocks(Schema.build([TensorSpec("embed_tokens.weight", "BF16", (8, 8))]), FP8_BLOCK)


def test_an_unknown_view_is_refused() -> None:
    with pytest.raises(Misconfigured, match="known: fp8-block-ue8m0, fp8-block"):
        check_view("fp4")


def test_config_json_keeps_what_it_says_and_tells_of_the_blocks() -> None:
    before = {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 1e6, "dtype": "bfloat16"}
    schema = Blocks(SCHEMA, FP8_BLOCK).schema
    config = json.loads(with_config(json.dumps(before).encode(), schema, FP8_BLOCK))
    powers = json.loads(with_config(json.dumps(before).encode(), schema, FP8_BLOCK_UE8M0))
    assert powers.pop("quantization_config") == {**config["quantization_config"], "scale_fmt": "ue8m0"}
    found = config.pop("quantization_config")
    assert config == before
    assert found == {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["embed_tokens", "layers.0.mlp.gate", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
