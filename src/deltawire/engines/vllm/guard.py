"""Find reasons not to patch a running model, and check that a reload changed nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

DERIVED = ("W_UK", "W_UV", "W_UK_T", "W_K", "W_V")
"""What attention layers compute from weights when they are loaded, and use in their place."""


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
    for name, module in model.named_modules():
        derived = [key for key in DERIVED if isinstance(getattr(module, key, None), Tensor)]
        if derived:
            problems.append(f"{name!r} computes with {derived[0]}, which is made from its weights when they are loaded")
            break
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


def fingerprint(model: nn.Module) -> str:
    """A hash of every parameter, persistent buffer and tensor that layers keep for their kernels."""
    whole = hashlib.sha256()
    for name, tensor in _tensors(model):
        whole.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        whole.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return whole.hexdigest()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    for name, module in model.named_modules():
        for key in DERIVED:
            if isinstance(value := getattr(module, key, None), Tensor):
                yield f"{name}.{key}", value
        closure = getattr(getattr(module, "cpu_linear", None), "__closure__", None) or ()
        for number, cell in enumerate(closure):
            if isinstance(cell.cell_contents, Tensor):
                yield f"{name}.cpu_linear.{number}", cell.cell_contents
