"""The views fp8-block and fp8-block-ue8m0: which tensors they convert, in what blocks, and what config.json says of it.

The layout is that of block-fp8 checkpoints of the Hugging Face Hub. A matrix W becomes e4m3 under its own name, and
float32 `W_scale_inv` has one number per block of 128 × 128: weight = e4m3 · scale. Everything else stays as it is:
embeddings, the output head, norms, biases, routers of experts. The two views differ in their scales alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from ..core.errors import SchemaMismatch
from ..core.schema import Schema, TensorSpec
from . import FP8_BLOCK_UE8M0

SIDE = 128
"""Rows and columns of a block."""

SHARE = np.float32(1) / np.float32(448)
"""What the largest weight of a block is multiplied by for its scale: 448 is the largest e4m3 number. On a GPU, torch
multiplies where a number is divided by a constant."""

LEAST = np.float32(1e-4)
"""A block whose weights are all smaller is scaled as if its largest were this."""

INFINITE, A_NAN = 0x7F800000, 0x7FC00000
"""Bits of float32: infinity, and the NaN that is written for every NaN. Which one arithmetic gives depends on the
machine."""

ROUNDS_UP = 0x7FFFFF - 0x680000
"""Added to the bits of a float32 number, it carries into the exponent if the number is more than 464/256 of its power
of two. 464 is the largest number that e4m3 rounds down to 448."""

SCALES = "_scale_inv"

_SOURCES = ("BF16", "F16", "F32")
_KEPT = re.compile(
    r"embed|lm_head|norm|router|(^|[._])(wte|wpe|score|classifier|visual|vision_tower|vision_model)([._]|$)"
    r"|(^|[._])(gate|shared_expert_gate)\.weight$",
    re.IGNORECASE,
)
"""Names of matrices that usual fp8 checkpoints leave as they are. `gate` is a router; `gate_proj` is not."""

_EXPERTS = re.compile(r"(^|\.)experts\.(\w+)$")
"""All experts of a layer in one tensor, as some checkpoints have them."""


def converts(tensor: TensorSpec) -> bool:
    """Whether the view stores a tensor as fp8."""
    if tensor.dtype not in _SOURCES or not tensor.elements or _KEPT.search(tensor.name):
        return False
    if len(tensor.shape) == 3:
        return _EXPERTS.search(tensor.name) is not None and not tensor.name.endswith("bias")
    return len(tensor.shape) == 2 and tensor.name.endswith(".weight")


@dataclass(frozen=True, slots=True)
class Grid:
    """The blocks of one tensor, whose last two dimensions are a matrix; others count matrices."""

    tensor: TensorSpec
    """The tensor in the source."""
    first: int
    """Number of its first block among those of all tensors."""

    @property
    def height(self) -> int:
        """Rows of each matrix."""
        return self.tensor.shape[-2]

    @property
    def down(self) -> int:
        """Blocks in a column of a matrix."""
        return -(-self.tensor.shape[-2] // SIDE)

    @property
    def across(self) -> int:
        """Blocks in a row of a matrix."""
        return -(-self.tensor.shape[-1] // SIDE)

    @property
    def weights(self) -> TensorSpec:
        """The tensor as it is in the view."""
        return TensorSpec(self.tensor.name, "F8_E4M3", self.tensor.shape)

    @property
    def scales(self) -> TensorSpec:
        """The scales of its blocks."""
        return TensorSpec(self.tensor.name + SCALES, "F32", (*self.tensor.shape[:-2], self.down, self.across))

    @property
    def span(self) -> slice:
        """Its blocks among those of all tensors."""
        return slice(self.first, self.first + self.scales.elements)


class Blocks:
    """All blocks of a checkpoint: what the view makes of a schema."""

    def __init__(self, source: Schema, view: str) -> None:
        self.source = source
        self.powers_of_two = view == FP8_BLOCK_UE8M0
        """Whether scales are powers of two."""
        self.grids: dict[str, Grid] = {}
        self.count = 0
        """Number of blocks."""
        for tensor in filter(converts, source.tensors):
            grid = self.grids[tensor.name] = Grid(tensor, self.count)
            self.count += grid.scales.elements
        if not self.grids:
            already = any(tensor.name.endswith(SCALES) for tensor in source.tensors)
            raise SchemaMismatch(
                f"{view} converts no tensor of this model: it converts matrices of bf16, fp16 or fp32 whose names "
                "end in .weight, other than embeddings, norms, routers and the output head"
                + ("; this one has fp8 blocks already: name the run of its bf16 weights first" if already else "")
            )

    @cached_property
    def schema(self) -> Schema:
        """The schema of the view."""
        kept = [tensor for tensor in self.source.tensors if tensor.name not in self.grids]
        made = [spec for grid in self.grids.values() for spec in (grid.weights, grid.scales)]
        return Schema.build([*kept, *made], self.source.ties)

    def scales_of(self, maxima: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
        """Scales of blocks whose largest weights have these magnitudes, as bits of float32.

        A power of two is the least with which e4m3 rounds no weight of the block to more than 448.
        """
        least = np.maximum(maxima, LEAST.view(np.uint32))
        if self.powers_of_two:
            bits = ((least + np.uint32(ROUNDS_UP)) >> np.uint32(23)) - np.uint32(8) << np.uint32(23)
            scales = np.where(maxima < INFINITE, bits, maxima).view(np.float32)
        else:
            with np.errstate(invalid="ignore"):  # a signalling NaN
                scales = least.view(np.float32) * SHARE
        scales.view(np.uint32)[maxima > INFINITE] = A_NAN
        return scales


def with_config(config: bytes, schema: Schema, view: str) -> bytes:
    """config.json for weights of the view, which have this schema: with a quantization_config."""
    content = msgspec.json.decode(config, type=dict[str, msgspec.Raw])
    by_name = schema.by_name()
    matrices = [t.name for t in schema.tensors if len(t.shape) > 1 and t.name.endswith(".weight")]
    kept = [name for name in (*matrices, *schema.ties) if name + SCALES not in by_name]
    quantization = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": sorted({name.removesuffix(".weight") for name in kept} | {"lm_head"}),
        "quant_method": "fp8",
        "weight_block_size": [SIDE, SIDE],
    }
    if view == FP8_BLOCK_UE8M0:
        quantization["scale_fmt"] = "ue8m0"
    content["quantization_config"] = msgspec.Raw(msgspec.json.encode(quantization))
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
