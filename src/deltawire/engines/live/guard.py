"""Find reasons not to patch a running model, and check that a reload changed nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

DERIVED = ("W_UK", "W_UV", "W_UK_T", "W_K", "W_V", "w_kc", "w_vc")
"""What attention layers compute from weights when they are loaded, and use in their place."""


def derived_problem(model: nn.Module) -> str:
    """The first layer that computes with something made from its weights; empty if there is none."""
    for name, module in model.named_modules():
        for key in DERIVED:
            if isinstance(getattr(module, key, None), Tensor):
                return f"{name!r} computes with {key}, which is made from its weights when they are loaded"
    return ""


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
