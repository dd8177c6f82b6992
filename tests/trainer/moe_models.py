"""Tiny mixture-of-experts models with the layouts of the families that people train."""

from __future__ import annotations

from typing import Any

import torch
import transformers

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
_DEEPSEEK = {
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {"moe_intermediate_size": 8, "num_experts": 4, "head_dim": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_DEEPSEEK,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
        },
    ),
    "glm4_moe": ("Glm4Moe", {**_DEEPSEEK, "head_dim": 8}),
}


def make(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **others: Any) -> Any:
    name, sizes = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**_SIZES | sizes | others)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # not all ones
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.to(dtype)


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """One step of language modelling on random tokens."""
    tokens = torch.randint(0, model.config.vocab_size, (2, 12))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
