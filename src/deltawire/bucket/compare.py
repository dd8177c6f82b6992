"""Two sets of weights, tensor by tensor: how many changed, by how many ulps, and the norm of the difference.

Both are read a few megabytes at a time, so what it takes beside the sources themselves is little.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.change import pieces, whole
from ..core.dtypes import lookup, numbers
from ..core.full import Source
from ..core.schema import TensorSpec
from ..core.ulps import Histogram, in_ulps

_PIECE = 1 << 20
"""Units compared at a time."""


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
        was, now = (np.ascontiguousarray(source.region(region)).reshape(-1) for source in (old, new))
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


def _squares(values: npt.NDArray[Any]) -> float:
    size = np.abs(values[np.isfinite(values)]).astype(np.float64)
    return float(np.dot(size, size))
