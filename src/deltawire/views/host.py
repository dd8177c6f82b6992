"""fp8-block and fp8-block-ue8m0 in host memory; fp8-block has the bits of vLLM's `per_block_cast_to_fp8` on a GPU.

    largest = max(largest magnitude of the block, 1e-4)
    scale   = largest · (1 / 448), or with powers of two the least one for which largest ≤ 464 · scale
    weight  = e4m3(w · (1 / scale)), rounded to nearest, ties to even

All in float32, each operation rounded by itself. e4m3 rounds what lies between 448, its largest number, and 464 to 448.
So a block has the same scale, if it is computed again from e4m3 · scale: vLLM's requantization for DeepGEMM does that,
and changes nothing.

A NaN anywhere in a block makes its scale and all its weights NaN; an
infinity makes the scale infinite, finite weights ±0 and infinite ones NaN. Such a NaN is always 0x7F, in scales
0x7FC00000.

Magnitudes are compared as integers, the bits without the sign, which orders them as the numbers, NaNs last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.change import Region, pieces, whole
from ..core.compiled import njit
from ..core.dtypes import Bits
from ..core.full import Source
from ..core.parallel import for_each, threads_for
from ..core.schema import Schema, TensorSpec
from .blocks import SIDE, Blocks, Grid

Maxima = npt.NDArray[np.uint32]
"""The largest magnitude of each block, as bits of float32."""

_READ = 1 << 22
"""Units that are read at a time."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of this process lies in a tensor of the checkpoint: all of it, or a rectangle."""

    grid: Grid
    row: int = 0
    column: int = 0


class BlockView:
    """The view of a source, computed where it is read. The source must not change while it is in use."""

    is_view = True

    def __init__(
        self,
        source: Source,
        blocks: Blocks,
        places: Mapping[str, Place] | None = None,
        scales: Mapping[str, Grid] | None = None,
        reduce: Callable[[Maxima], Maxima] = lambda maxima: maxima,
    ) -> None:
        """Open a view of all tensors of `blocks`, or of those that this process has.

        `places` says what part of `blocks` each tensor of the source is, by name; `scales` are the scales to give, by
        name; `reduce` merges the maxima of all processes.
        """
        self.source, self.blocks = source, blocks
        self._places = {name: Place(grid) for name, grid in blocks.grids.items()} if places is None else places
        self._scales_at = {g.scales.name: g for g in blocks.grids.values()} if scales is None else scales
        self._specs = source.schema.by_name()
        self.schema = view_schema(source.schema, self._places, self._scales_at)
        self.maxima = reduce(self._find_maxima())
        self.scale()

    def scale(self) -> None:
        """Compute all scales from the maxima."""
        self.scales = self.blocks.scales_of(self.maxima)
        with np.errstate(divide="ignore"):
            self.inverse: npt.NDArray[np.float32] = np.float32(1.0) / self.scales

    def region(self, region: Region) -> Bits:
        name = region.tensor.name
        if name in self._scales_at:
            return region.cut(self.scales[self._scales_at[name].span].view(np.uint32))
        if name not in self._places:
            return self.source.region(region)
        place, result = self._places[name], np.empty(region.units, np.uint8)
        bits, shift = self._read(Region(self._specs[name], region.row, region.rows, region.column, region.columns))
        corner = place.row + region.row, place.column + region.column
        _quantize(bits, shift, region.columns, *corner, *geometry(place.grid), self.inverse, result)
        return result

    def _read(self, region: Region) -> tuple[Bits, int]:
        """Bits of a region of the source, and how far to shift them up to become those of float32."""
        return widened(self.source.region(region), region.tensor.dtype)

    def _find_maxima(self) -> Maxima:
        maxima = np.zeros(self.blocks.count, np.uint32)

        def raise_by(names: list[str]) -> None:
            for name in names:
                place = self._places[name]
                for piece in pieces(whole(self._specs[name]), _READ):
                    bits, shift = self._read(piece)
                    corner = place.row + piece.row, place.column + piece.column
                    block_maxima(bits, shift, piece.columns, *corner, *geometry(place.grid), maxima)

        # a thread per tensor of the checkpoint: parts of it may share a block
        together: dict[str, list[str]] = {}
        for name in self._places:
            together.setdefault(self._places[name].grid.tensor.name, []).append(name)
        for_each(raise_by, together.values(), threads_for(self.schema.elements))
        return maxima


def is_view(source: Source) -> bool:
    """Whether a source is a view already, here or on a device."""
    return getattr(source, "is_view", False)


def view_schema(source: Schema, converted: Mapping[str, Place], scales: Mapping[str, Grid]) -> Schema:
    """The schema of a view of a source, some of whose tensors are converted, with these scales."""
    tensors = [TensorSpec(t.name, "F8_E4M3", t.shape) if t.name in converted else t for t in source.tensors]
    tensors += [TensorSpec(name, "F32", grid.scales.shape) for name, grid in scales.items()]
    return Schema.build(tensors, source.ties)


def widened(bits: Bits, dtype: str) -> tuple[Bits, int]:
    """Bits of bf16 or float32, and how far to shift them up to become those of float32."""
    if dtype == "F16":
        return bits.view(np.float16).astype(np.float32).view(np.uint32), 0
    return bits, 16 if dtype == "BF16" else 0


def geometry(grid: Grid) -> tuple[int, int, int, int]:
    """Return what kernels take: height of a matrix, blocks down and across, number of the first block."""
    return grid.height, grid.down, grid.across, grid.first


@njit(cache=True, nogil=True)
def block_maxima(
    bits: Any, shift: int, columns: int, row: int, column: int, height: int, down: int, across: int, first: int,
    maxima: Any,
) -> None:  # fmt: skip
    """Raise the maxima by a rectangle of a tensor, whose first unit is at (row, column)."""
    for start in range(0, bits.size, columns):
        block = first + (row // height * down + row % height // SIDE) * across
        at = 0
        while at < columns:
            end = min(columns, at + SIDE - (column + at) % SIDE)
            largest = np.uint32(0)
            for unit in bits[start + at : start + end]:
                largest = max(largest, (np.uint32(unit) << np.uint32(shift)) & np.uint32(0x7FFFFFFF))
            place = block + (column + at) // SIDE
            maxima[place] = max(maxima[place], largest)
            at = end
        row += 1


@njit(cache=True, nogil=True)
def to_e4m3(products: Any, shifted: Any, result: Any) -> None:
    """Round float32 numbers to e4m3. None is above 464, the last that has a code. `shifted` is scratch."""
    for i in range(products.size):
        # below 2⁻⁶ e4m3 counts in steps of 2⁻⁹, as float32 does from 2¹⁴ on: the addition rounds
        shifted[i] = abs(products[i]) + np.float32(16384.0)
    bits, steps = products.view(np.uint32), shifted.view(np.uint32)
    for i in range(products.size):
        size = bits[i] & np.uint32(0x7FFFFFFF)
        odd = (size >> np.uint32(20)) & np.uint32(1)
        code = ((size + np.uint32(0x7FFFF) + odd) >> np.uint32(20)) - np.uint32(120 << 3)
        if size < np.uint32(0x3C800000):
            code = steps[i] - np.uint32(0x46800000)
        code |= (bits[i] >> np.uint32(24)) & np.uint32(0x80)
        result[i] = 0x7F if size > np.uint32(0x7F800000) else code


@njit(cache=True, nogil=True)
def _quantize(
    bits: Any, shift: int, columns: int, row: int, column: int, height: int, down: int, across: int, first: int,
    inverse: Any, result: Any,
) -> None:  # fmt: skip
    """e4m3 weights of a rectangle of a tensor, whose first unit is at (row, column)."""
    wide, shifted = np.empty(columns, np.uint32), np.empty(columns, np.float32)
    products = wide.view(np.float32)
    for start in range(0, bits.size, columns):
        for i in range(columns):
            wide[i] = np.uint32(bits[start + i]) << np.uint32(shift)
        block = first + (row // height * down + row % height // SIDE) * across
        at = 0
        while at < columns:
            end = min(columns, at + SIDE - (column + at) % SIDE)
            factor = inverse[block + (column + at) // SIDE]
            for i in range(at, end):
                products[i] *= factor
            at = end
        to_e4m3(products, shifted, result[start : start + columns])
        row += 1
