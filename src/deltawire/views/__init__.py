"""Views: weights derived from other weights by a pure function, published as a run of their own.

blocks.py    what both are: which tensors they convert, their blocks and scales, config.json
host.py      the function in host memory
device.py    the same in torch, on the device of the model

`trainer/` publishes a model's view, `derive/` that of a run.
"""

from __future__ import annotations

from ..core.errors import Misconfigured

FP8_BLOCK = "fp8-block"
"""e4m3 weights in blocks of 128 × 128, each with a float32 scale."""

FP8_BLOCK_UE8M0 = "fp8-block-ue8m0"
"""The same with scales that are powers of two, which vLLM's DeepGEMM computes with on Hopper."""

VIEWS = (FP8_BLOCK_UE8M0, FP8_BLOCK)


def check_view(name: str, *, of_adapters: bool = False) -> None:
    """Raise Misconfigured for a name that no view has, and for a view of adapters."""
    if name not in VIEWS:
        raise Misconfigured(f"there is no view {name!r:.40}; known: {', '.join(VIEWS)}")
    if of_adapters:
        raise Misconfigured(f"a run of adapters has no {name} view; serve it as it is")
