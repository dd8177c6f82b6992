"""A SHA-256 of a model's weights, computed by torch alone: an independent check of the state digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def fingerprint(weights: Mapping[str, Tensor], dtype: str | None = None, *, exact: bool = False) -> str:
    """Hash names, shapes and bits, with floating-point weights cast to `dtype` if one is given.

    With `exact`, a weight that the cast would change is a ValueError: weights of a version that are served in a wider
    dtype have no such values.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}")
    whole = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        kept = tensor.detach().cpu().contiguous().reshape(-1)
        cast = kept.to(_DTYPES[dtype]) if dtype is not None and kept.is_floating_point() else kept
        if exact and not torch.equal(cast.to(kept.dtype).view(torch.uint8), kept.view(torch.uint8)):
            raise ValueError(f"{name} has weights that are no {dtype}")
        whole.update(f"{name} {tuple(tensor.shape)} {cast.dtype}\n".encode())
        whole.update(cast.view(torch.uint8).numpy().data)
    return whole.hexdigest()
