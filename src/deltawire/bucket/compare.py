"""Two sets of weights, tensor by tensor: how many changed, by how many ulps, and the norm of the difference.

Both are read a few megabytes at a time, so what it takes beside the sources themselves is little.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.change import Region, pieces, whole
from ..core.dtypes import Bits, Dtype, lookup
from ..core.full import Source
from ..core.schema import TensorSpec
from ..core.ulps import Histogram, in_ulps

_PIECE = 1 << 20
"""Units compared at a time."""

_AS_NUMPY = {
    "BOOL": np.uint8, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "U16": np.uint16, "F16": np.float16,
    "I32": np.int32, "U32": np.uint32, "F32": np.float32, "I64": np.int64, "U64": np.uint64, "F64": np.float64,
    "C64": np.complex64,
}  # fmt: skip


@dataclass(slots=True)
class TensorDifference:
    """What changed in one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    changed: int = 0
    """Elements with other bits."""
    max_ulps: int | None = None
    """The largest step, in representable values; None where steps cannot be counted (8-byte dtypes) or none was."""
    mean_ulps: float | None = None
    """The mean size of a step, of those that changed."""
    norm: float = 0.0
    """Euclidean norm of new − old, over the elements that are finite in both."""
    old_norm: float = 0.0
    """Euclidean norm of old, over its finite elements."""
    not_finite: int = 0
    """Changed elements that are NaN or infinite on either side."""
    histogram: Histogram = field(default_factory=Histogram)

    @property
    def relative(self) -> float | None:
        """The norm of the difference as a share of the old one's; None where that is zero."""
        return self.norm / self.old_norm if self.old_norm else None


def differences(old: Source, new: Source, tensors: list[TensorSpec]) -> Iterator[TensorDifference]:
    """For these tensors, which both must have with this dtype and shape. The same for both is bit equality."""
    for tensor in tensors:
        yield _one(tensor, old, new)


def _one(tensor: TensorSpec, old: Source, new: Source) -> TensorDifference:
    dtype = lookup(tensor.dtype)
    result = TensorDifference(tensor.name, tensor.dtype, tensor.shape, tensor.elements)
    squares = before = ulps = 0.0
    for region in pieces(whole(tensor), _PIECE):
        was, now = _read(old, region), _read(new, region)
        values = numbers(was, dtype)
        before += _squares(values)
        differ = (was != now).reshape(-1, dtype.units_per_element).any(axis=1)
        if not differ.any():
            continue
        result.changed += int(differ.sum())
        # infinities and NaNs of weights that went wrong
        with np.errstate(invalid="ignore", over="ignore"):
            moved = numbers(now, dtype)[differ] - values[differ]
        finite = np.isfinite(moved)
        result.not_finite += int(moved.size - finite.sum())
        squares += _squares(moved[finite])
        if dtype.units_per_element == 1:
            steps = in_ulps(was[differ], now[differ], dtype)
            sizes = np.abs(steps)
            result.histogram.add(steps)
            result.max_ulps = max(result.max_ulps or 0, int(sizes.max()))
            ulps += float(sizes.sum(dtype=np.float64))
    result.norm, result.old_norm = squares**0.5, before**0.5
    result.mean_ulps = ulps / result.changed if result.max_ulps is not None else None
    return result


def _read(source: Source, region: Region) -> Bits:
    return np.ascontiguousarray(source.region(region)).reshape(-1)


def _squares(values: npt.NDArray[Any]) -> float:
    size = np.abs(values[np.isfinite(values)]).astype(np.float64)
    return float(np.dot(size, size))


def numbers(bits: Bits, dtype: Dtype) -> npt.NDArray[Any]:
    """The numbers that bits stand for, in float64 (complex128 for C64)."""
    if dtype.name == "BF16":
        with np.errstate(invalid="ignore"):  # a signalling NaN
            wide: npt.NDArray[Any] = bits.astype(np.uint32) << np.uint32(16)
            return wide.view(np.float32).astype(np.float64)
    if dtype.name.startswith("F8_"):
        return _float8(dtype.name)[bits]
    with np.errstate(invalid="ignore"):
        values = bits.view(_AS_NUMPY[dtype.name])
        return values.astype(np.complex128 if dtype.name == "C64" else np.float64)


@cache
def _float8(name: str) -> npt.NDArray[np.float64]:
    """Every value of an 8-bit float, by its bits (the OCP and the FNUZ formats)."""
    codes = np.arange(256)
    if name == "F8_E8M0":
        return np.where(codes == 255, np.nan, np.exp2(codes - 127.0))
    fraction = lookup(name).exponent_shift
    no_zero = name.endswith("FNUZ")  # no negative zero: its bits are the one NaN
    bias = (1 << (6 - fraction)) - 1 + no_zero
    exponent, rest = (codes & 127) >> fraction, codes & ((1 << fraction) - 1)
    size = np.where(
        exponent == 0,
        rest * np.exp2(1.0 - bias - fraction),
        (1 + rest / (1 << fraction)) * np.exp2(exponent.astype(np.float64) - bias),
    )
    values = np.where(codes > 127, -size, size)
    if no_zero:
        values[128] = np.nan
    elif name == "F8_E4M3":
        values[[127, 255]] = np.nan
    else:
        top = exponent == 31
        values[top] = np.where(rest[top] == 0, np.where(codes[top] > 127, -np.inf, np.inf), np.nan)
    return values
