"""The dtypes that travel, and the integer view each one is compared and coded in.

Weights are never compared as floats: 0.0 → −0.0 and NaN payloads count as changes. A tensor is a flat array of *units*,
unsigned integers of 1, 2 or 4 bytes. An 8-byte dtype (an int64 buffer, say) is seen as pairs of 4-byte units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import UnsupportedDtype

Bits = npt.NDArray[Any]
"""A flat, C-contiguous array of uint8, uint16 or uint32: the bits of one tensor."""

UNIT_TYPES: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True, slots=True)
class Dtype:
    name: str
    """As safetensors spells it."""
    size: int
    """Bytes per element."""
    is_float: bool
    """Sign-magnitude: an ulp step needs the order-preserving key."""
    exponent_shift: int = 0
    """Lowest bit of the exponent field."""
    exponent_bits: int = 0

    @property
    def unit_size(self) -> int:
        return min(self.size, 4)

    @property
    def unit(self) -> type[np.unsignedinteger[Any]]:
        return UNIT_TYPES[self.unit_size]

    @property
    def units_per_element(self) -> int:
        return self.size // self.unit_size

    @property
    def steps_are_signed(self) -> bool:
        """True where one unit holds the whole sign-magnitude number, so that steps can be counted in ulps."""
        return self.is_float and self.units_per_element == 1


DTYPES: dict[str, Dtype] = {
    d.name: d
    for d in (
        Dtype("BOOL", 1, False),
        Dtype("U8", 1, False),
        Dtype("I8", 1, False),
        Dtype("F8_E4M3", 1, True, 3, 4),
        Dtype("F8_E5M2", 1, True, 2, 5),
        Dtype("F8_E8M0", 1, False),
        Dtype("F8_E4M3FNUZ", 1, True, 3, 4),
        Dtype("F8_E5M2FNUZ", 1, True, 2, 5),
        Dtype("I16", 2, False),
        Dtype("U16", 2, False),
        Dtype("F16", 2, True, 10, 5),
        Dtype("BF16", 2, True, 7, 8),
        Dtype("I32", 4, False),
        Dtype("U32", 4, False),
        Dtype("F32", 4, True, 23, 8),
        Dtype("I64", 8, False),
        Dtype("U64", 8, False),
        Dtype("F64", 8, True),
        Dtype("C64", 8, True),
    )
}

# numpy has no bfloat16: a plain uint16 array is taken as the bits of one, which is what people keep in it.
_FROM_NUMPY = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "BF16",
    "int16": "I16",
    "float16": "F16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
    "complex64": "C64",
    # ml_dtypes, where somebody uses it
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}


def lookup(name: str) -> Dtype:
    try:
        return DTYPES[name]
    except KeyError:
        raise UnsupportedDtype(f"dtype {name!r} cannot travel; known: {', '.join(sorted(DTYPES))}") from None


def of_numpy(array: npt.NDArray[Any]) -> str:
    # bytes in the other order would be other numbers where they arrive
    name = _FROM_NUMPY.get(array.dtype.name) if array.dtype.isnative else None
    if name is None:
        raise UnsupportedDtype(f"numpy dtype {array.dtype} cannot travel; pass an integer view of its bits")
    return name


def bits_of(array: npt.NDArray[Any]) -> Bits:
    """The flat unit view of an array; a copy only when it is not contiguous."""
    dtype = lookup(of_numpy(array))
    return np.ascontiguousarray(array).reshape(-1).view(dtype.unit)
