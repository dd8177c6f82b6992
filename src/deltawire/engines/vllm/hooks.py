"""Layers of a vLLM model that process their weights after loading, and how that is done to a copy of one."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from ..live import Layer, copy_of, without_data
from .guard import forget_kernel


def hooked_layers(model: nn.Module) -> list[Layer]:
    """Layers whose quantization method, which every linear layer and every group of experts has, has a hook. None in a
    vLLM that does not note how parameters were before their hook."""
    try:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
    except ImportError:
        return []
    found = []
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        if not isinstance(method, QuantizeMethodBase):
            continue
        # as vLLM noted them when it made the layer; loaders that are methods of the layer are noted without it
        noted, _ = get_layerwise_info(module).restore_metadata
        if loaded := {key: restore_layer_refs(without_data(tensor), module) for key, tensor in noted.items()}:
            choices = [str(v) for key, v in sorted(vars(method).items()) if key.endswith(("backend", "experts_cls"))]
            found.append(Layer(name, module, loaded, partial(_run, method), (type(method), *choices)))
    return found


def _run(method: Any, made: Any) -> None:
    mine = copy_of(method)
    forget_kernel(mine)
    made.quant_method = mine
    made.__dict__.pop("_already_called_process_weights_after_loading", None)
    mine.process_weights_after_loading(made)
