"""`raw`: `{name}.indices` and `{name}.values`, readable by any tool that opens safetensors.

The layout of the first public delta-sync work, and the only encoding that is by tensor rather than by block: indices
count in the whole flattened tensor, int32 (int64 for a tensor of more than 2^31 units).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..change import NEW_BITS, Change, RegionMoves, regions
from ..container import Header, Item
from ..dtypes import Bits, lookup
from ..errors import CountMismatch, PositionError, SchemaMismatch
from ..scatter import flatten
from ..schema import TensorSpec

name = "raw"

INDICES, VALUES = ".indices", ".values"


def index_dtype(tensor: TensorSpec) -> str:
    return "I32" if tensor.units < 1 << 31 else "I64"


def value_dtype(tensor: TensorSpec) -> str:
    """An 8-byte dtype travels as pairs of 4-byte units, here as everywhere."""
    return tensor.dtype if lookup(tensor.dtype).units_per_element == 1 else "U32"


def encode(changes: Sequence[Change]) -> list[tuple[str, str, bytes]]:
    """(file tensor, dtype, bytes) for each change; parts of one file tensor follow each other."""
    parts = []
    for change in changes:
        tensor = change.region.tensor
        dtype = index_dtype(tensor)
        flat = np.empty(change.count, np.int32 if dtype == "I32" else np.int64)
        flatten(change.positions, flat, *change.region.geometry)
        parts.append((tensor.name + INDICES, dtype, flat.tobytes()))
        parts.append((tensor.name + VALUES, value_dtype(tensor), change.new.tobytes()))
    return parts


def tensors(header: Header) -> dict[str, tuple[Item, Item]]:
    """The (indices, values) of each tensor in a raw file, of deltawire or another tool."""
    found = {}
    for key, item in header.items.items():
        if not key.endswith(INDICES):
            continue
        stem = key.removesuffix(INDICES)
        values = header.items.get(stem + VALUES)
        if values is None:
            raise SchemaMismatch(f"{key!r} has no {stem + VALUES!r} beside it")
        if item.dtype not in ("I32", "I64", "U32"):
            raise SchemaMismatch(f"{key!r} is {item.dtype}; indices are I32 or I64")
        if item.shape != values.shape or len(item.shape) != 1:
            raise CountMismatch(f"{key!r} has shape {list(item.shape)}, its values {list(values.shape)}")
        found[stem] = (item, values)
    strays = header.items.keys() - {i.name for pair in found.values() for i in pair}
    if strays:
        raise SchemaMismatch(f"a raw delta holds only indices and values, this one also {sorted(strays)[0]!r}")
    return found


def moves(tensor: TensorSpec, index_dtype: str, indices: bytes, values: bytes) -> list[RegionMoves]:
    """New bits of a tensor, checked; several where it is so large that positions in it do not fit 32 bits."""
    flat = np.frombuffer(indices, {"I32": np.int32, "I64": np.int64, "U32": np.uint32}[index_dtype]).astype(np.int64)
    # copied: memory of its own, as that of other encodings, else every kernel that takes new bits is compiled twice
    new: Bits = np.frombuffer(values, lookup(tensor.dtype).unit).copy()
    if flat.size and (flat[0] < 0 or flat[-1] >= tensor.units):
        raise PositionError(f"an index of {tensor.name!r} lies outside its {tensor.units} units")
    # compared, not subtracted: a difference of two hostile 64-bit indices may wrap around
    if np.any(flat[1:] <= flat[:-1]):
        raise PositionError(f"the indices of {tensor.name!r} are not ascending")
    result = []
    for region in regions(tensor, 1 << 32):
        first, last = np.searchsorted(flat, (region.start, region.start + region.units))
        positions = (flat[first:last] - region.start).astype(np.uint32)
        result.append(RegionMoves(region, positions, new[first:last], NEW_BITS))
    return result
