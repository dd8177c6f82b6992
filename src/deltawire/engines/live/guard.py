"""Find reasons not to patch a running model, and check that a reload changed nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch import Tensor, nn

DERIVED = ("W_UK", "W_UV", "W_UK_T", "W_K", "W_V", "w_kc", "w_vc")
"""Values that attention layers compute from weights while loading, and use in their place."""


def common_problems(model: nn.Module, model_config: Any) -> list[str]:
    """Reasons to refuse deltas that all engines have: weights that are not those of the run, or that a layer computes
    with something made from them."""
    problems = []
    quantization = getattr(model_config, "quantization", None)
    if quantization and getattr(model_config.hf_config, "quantization_config", None) is None:
        problems.append(f"the server quantizes its weights ({quantization})")
    elif quantization and quantization != "fp8":
        # hooks of other schemes note things in objects that a copy of the layer shares with the live one
        problems.append(f"layouts of {quantization} weights are not learned")
    for name, key, _ in islice(_derived(model), 1):
        problems.append(f"{name!r} computes with {key}, which is made from its weights when they are loaded")
    return problems


def computed_with(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, and every tensor that layers keep for their kernels, by name."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    found.update((f"{name}.{key}", tensor) for name, key, tensor in _derived(model))
    for name, module in model.named_modules():
        closure = getattr(getattr(module, "cpu_linear", None), "__closure__", None) or ()
        for number, cell in enumerate(closure):
            if isinstance(cell.cell_contents, Tensor):
                found[f"{name}.cpu_linear.{number}"] = cell.cell_contents
    return found


def _derived(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for name, module in model.named_modules():
        for key in DERIVED:
            if isinstance(value := getattr(module, key, None), Tensor):
                yield name, key, value
