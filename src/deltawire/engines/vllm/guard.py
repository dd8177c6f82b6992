"""Find reasons not to patch a model that vLLM runs."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..live.guard import derived_problem


def problems_of(model: nn.Module, config: Any) -> list[str]:
    """Reasons to refuse deltas that the placement map cannot show: weights that are not the ones computed with."""
    problems = []
    quantization = getattr(config.model_config, "quantization", None)
    if quantization and getattr(config.model_config.hf_config, "quantization_config", None) is None:
        problems.append(f"the server quantizes its weights ({quantization})")
    elif quantization and quantization != "fp8":
        # hooks of other schemes note things in objects that a copy of the layer shares with the live one
        problems.append(f"layouts of {quantization} weights are not learned")
    if getattr(config, "lora_config", None):
        problems.append("the server was started with LoRA, which wraps the layers")
    if getattr(config.parallel_config, "enable_eplb", False):
        problems.append("the server moves experts between ranks (EPLB)")
    for name, module in model.named_modules():
        if (linear := getattr(module, "cpu_linear", None)) is not None and _closes_over(linear):
            problems.append(f"{name!r} computes with a repacked copy of its weight; start with VLLM_PLUGINS=deltawire")
            break
    if derived := derived_problem(model):
        problems.append(derived)
    return problems


def has_draft(config: Any) -> bool:
    """Whether the server uses a separate draft model, whose weights are not in the run."""
    speculative: Any = getattr(config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    return draft is not None and draft is not speculative.target_model_config


def _closes_over(function: Any) -> bool:
    """Whether a function has data in its closure: a packed weight, or the handle of one."""
    return bool(getattr(function, "__closure__", None))


def pack_again(model: nn.Module) -> None:
    """Have experts packed for their kernel by the next reload."""
    for module in model.modules():
        forget_kernel(getattr(module, "quant_method", None))


def forget_kernel(method: Any) -> None:
    """On a CPU, vLLM 0.32 packs experts only when it makes their kernel: without this, processing weights once more
    would put plain ones in the place of packed ones."""
    if type(method).__name__ == "UnquantizedFusedMoEMethod" and method.unquantized_backend.name == "CPU":
        method.moe_kernel = None
