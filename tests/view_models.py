"""Weights for the tests of views, and what views are by their definition, computed in another way."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from deltawire.core.dtypes import DTYPES, Bits, numbers
from deltawire.core.schema import Schema, TensorSpec
from deltawire.views import FP8_BLOCK_UE8M0
from support import Bag

ATTENTION, EXPERTS = "layers.0.q_proj.weight", "layers.0.mlp.experts.gate_up_proj"
SCHEMA = Schema.build(
    [
        TensorSpec("embed_tokens.weight", "BF16", (40, 24)),
        TensorSpec(ATTENTION, "BF16", (300, 257)),
        TensorSpec("layers.0.k_proj.weight", "BF16", (128, 256)),
        TensorSpec("layers.0.o_proj.weight", "F16", (5, 130)),
        TensorSpec("layers.0.norm.weight", "BF16", (24,)),
        TensorSpec("layers.0.mlp.gate.weight", "BF16", (4, 24)),
        TensorSpec(EXPERTS, "F32", (3, 200, 140)),
    ],
    {"lm_head.weight": "embed_tokens.weight"},
)

_FLOATS: dict[str, Callable[[np.ndarray], Bits]] = {
    "BF16": lambda x: (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
    "F16": lambda x: x.astype(np.float16).view(np.uint16),
    "F32": lambda x: x.astype(np.float32).view(np.uint32),
}


def weights(seed: int = 0, schema: Schema = SCHEMA) -> Bag:
    """Numbers of the size that weights have, and blocks that are odd: zeros, tiny ones, one large weight."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for spec in schema.tensors:
        values = rng.standard_normal(spec.shape) * 0.02
        if spec.name == ATTENTION:
            values[:128, :128] = 0
            values[128:256, :128] *= 1e-6
            values[200, 200] = 3.0
            values[0, 140] = -0.0
        tensors[spec.name] = _FLOATS[spec.dtype](values).reshape(-1)
    return Bag(schema, tensors)


E4M3 = numbers(np.arange(127, dtype=np.uint8), DTYPES["F8_E4M3"])
"""Every number that is not negative, by its code."""


def rounded(products: np.ndarray) -> np.ndarray:
    """The nearest e4m3 numbers, of two equally near ones that with the even code."""
    halfway, sizes = (E4M3[1:] + E4M3[:-1]) / 2, np.abs(products).astype(np.float64)
    codes = np.searchsorted(halfway, sizes)
    codes += (codes % 2 == 1) & (halfway[np.minimum(codes, 125)] == sizes)
    return np.where(np.isnan(products), 0x7F, codes | 0x80 * np.signbit(products)).astype(np.uint8)


def scale_of(largest: np.float32, view: str) -> np.float32:
    if view == FP8_BLOCK_UE8M0:
        return np.float32(2.0 ** math.ceil(math.log2(float(largest) / 464))) if np.isfinite(largest) else largest
    return largest * (np.float32(1) / np.float32(448))  # type: ignore[no-any-return]


def defined(matrix: np.ndarray, view: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of a float32 matrix, as the view is defined."""
    rows, columns = matrix.shape
    codes = np.zeros(matrix.shape, np.uint8)
    scales = np.zeros((-(-rows // 128), -(-columns // 128)), np.float32)
    for i, j in np.ndindex(scales.shape):
        place = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
        block = matrix[place]
        with np.errstate(all="ignore"):
            scale = scale_of(np.maximum(np.abs(block).max(), np.float32(1e-4)), view)
            products = block * (np.float32(1) / scale)
        scales[i, j] = scale if not np.isnan(scale) else np.nan
        codes[place] = rounded(products)
    return codes, scales


def as_float32(bits: Bits, dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return numbers(bits, DTYPES[dtype]).astype(np.float32)
