"""Imports Megatron-Bridge where there is no GPU and no Transformer Engine. Import it before Megatron.

Bridge imports Transformer Engine for its adapters, which these tests do not use. Loading needs more
of NCCL and CUDA: parts to scatter that are not contiguous, which gloo takes for contiguous, and a current device.
"""

from __future__ import annotations

import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

warnings.simplefilter("ignore")

# what of Megatron-core looks for Transformer Engine must not find the one below
import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402
import megatron.core.models.gpt.gpt_model  # noqa: E402
import megatron.core.transformer.attention  # noqa: E402

engine, layers = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
linear = type("Linear", (torch.nn.Module,), {})
for name in ("Linear", "LayerNormLinear", "GroupedLinear"):
    setattr(layers, name, linear)
layers.ops = SimpleNamespace(Sequential=linear)  # type: ignore[attr-defined]
engine.pytorch, engine.__version__, engine.__path__ = layers, "0", []  # type: ignore[attr-defined]
for module in (engine, layers):
    module.__spec__ = ModuleSpec(module.__name__, None)
    sys.modules[module.__name__] = module
import megatron.bridge  # noqa: E402, F401

for module in (engine, layers):
    del sys.modules[module.__name__]

torch.cuda.current_device = lambda: None  # type: ignore[assignment, return-value]
torch.cuda.current_stream = lambda: None  # type: ignore[assignment, return-value]
Tensor.cuda = lambda tensor, *_: tensor  # type: ignore[assignment, method-assign]
scatter = dist.scatter


def scatter_contiguous(tensor: Any, parts: Any = None, **options: Any) -> Any:
    return scatter(tensor, parts and [part.contiguous() for part in parts], **options)


dist.scatter = scatter_contiguous
