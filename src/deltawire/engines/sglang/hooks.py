"""Layers of an SGLang model that process their weights after loading, and how that is done to a copy of one."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from ..live import Layer, copy_of, without_data

_LOADED = "deltawire_loaded"
"""Attribute of a layer: its parameters as the loader fills them, without data."""


def note(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Note how parameters are before layers process them, which SGLang does not; called before it does."""
    for _, module in model.named_modules():
        if getattr(module, "quant_method", None) is not None and _LOADED not in module.__dict__:
            parameters = module.named_parameters(recurse=False)
            module.__dict__[_LOADED] = {name: without_data(tensor) for name, tensor in parameters}


def hooked_layers(model: nn.Module) -> list[Layer]:
    """Layers whose quantization method, which every linear layer and every group of experts has, has a hook."""
    found = []
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        if method is not None and (loaded := module.__dict__.get(_LOADED)):
            found.append(Layer(name, module, loaded, partial(_run, method), (type(method),)))
    return found


def _run(method: Any, made: Any) -> None:
    mine = copy_of(method)
    made.quant_method = mine
    mine.process_weights_after_loading(made)
