"""Layers of a vLLM model that process their weights after loading, and how that is done to a copy of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.utils import fp8_utils

from ..live import Layer, copy_of, without_data
from .guard import forget_kernel

_REQUANTIZE = "requant_weight_ue8m0_inplace"


def has_powers_of_two(hf_config: Any) -> bool:
    """Whether the scales of a checkpoint's fp8 blocks are powers of two."""
    quantization = getattr(hf_config, "quantization_config", None)
    return isinstance(quantization, dict) and quantization.get("scale_fmt") == "ue8m0"


@contextmanager
def requantizing_nothing() -> Iterator[None]:
    """Inside, hooks for DeepGEMM do not make powers of two of scales.

    Where scales are powers of two already, that changes no number that a weight stands for, and no bit of a view
    fp8-block-ue8m0. The layout guard compares the weights that vLLM loaded with the checkpoint, bit by bit.
    """
    requantize = getattr(fp8_utils, _REQUANTIZE, None)
    if requantize is None:
        # another vLLM: its hook is refused if it computes
        yield
        return
    setattr(fp8_utils, _REQUANTIZE, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(fp8_utils, _REQUANTIZE, requantize)


def hooked_layers(model: nn.Module, powers_of_two: bool = False) -> list[Layer]:
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
            hook = partial(_run, method, powers_of_two)
            found.append(Layer(name, module, loaded, hook, (type(method), *choices)))
    return found


def _run(method: Any, powers_of_two: bool, made: Any) -> None:
    mine = copy_of(method)
    forget_kernel(mine)
    made.quant_method = mine
    made.__dict__.pop("_already_called_process_weights_after_loading", None)
    with requantizing_nothing() if powers_of_two else nullcontext():
        mine.process_weights_after_loading(made)
