"""The dtypes that travel, and the integer view each one is compared and coded in.

Weights are never compared as floats: 0.0 → −0.0 and NaN payloads count as changes. A tensor is a flat array of *units*,
unsigned integers of 1, 2 or 4 bytes. An 8-byte dtype (an int64 buffer, say) is seen as pairs of 4-byte units.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
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
    """Name in safetensors."""
    plain: str
    """Name in numpy, ml_dtypes and torch."""
    size: int
    """Bytes per element."""
    exponent_shift: int
    """Lowest bit of the exponent field."""
    exponent_bits: int
    """Width of the exponent field; 0 if there is none, or if an element has several units."""
    unit_size: int
    """Bytes per unit."""
    unit: type[np.unsignedinteger[Any]]
    units_per_element: int
    steps_are_signed: bool
    """True where one unit holds a whole sign-magnitude number: steps are then counted along the numbers (see ulps)."""


def _dtype(name: str, plain: str, size: int, exponent_shift: int = 0, exponent_bits: int = 0) -> Dtype:
    unit_size = min(size, 4)
    unit, per = UNIT_TYPES[unit_size], size // unit_size
    return Dtype(name, plain, size, exponent_shift, exponent_bits, unit_size, unit, per, exponent_bits > 0)


DTYPES: dict[str, Dtype] = {
    d.name: d
    for d in (
        _dtype("BOOL", "bool", 1),
        _dtype("U8", "uint8", 1),
        _dtype("I8", "int8", 1),
        _dtype("F8_E4M3", "float8_e4m3fn", 1, 3, 4),
        _dtype("F8_E5M2", "float8_e5m2", 1, 2, 5),
        _dtype("F8_E8M0", "float8_e8m0fnu", 1),
        _dtype("F8_E4M3FNUZ", "float8_e4m3fnuz", 1, 3, 4),
        _dtype("F8_E5M2FNUZ", "float8_e5m2fnuz", 1, 2, 5),
        _dtype("I16", "int16", 2),
        _dtype("U16", "uint16", 2),
        _dtype("F16", "float16", 2, 10, 5),
        _dtype("BF16", "bfloat16", 2, 7, 8),
        _dtype("I32", "int32", 4),
        _dtype("U32", "uint32", 4),
        _dtype("F32", "float32", 4, 23, 8),
        _dtype("I64", "int64", 8),
        _dtype("U64", "uint64", 8),
        _dtype("F64", "float64", 8),
        _dtype("C64", "complex64", 8),
    )
}

# numpy has no bfloat16: a plain uint16 array is taken as the bits of one, which is what people keep in it
_FROM_NUMPY = {d.plain: d.name for d in DTYPES.values()} | {"uint16": "BF16"}


def lookup(name: str) -> Dtype:
    try:
        return DTYPES[name]
    except KeyError:
        raise UnsupportedDtype(f"dtype {name!r} is unknown; known: {', '.join(sorted(DTYPES))}") from None


def of_numpy(array: npt.NDArray[Any]) -> str:
    # bytes in the other order would be other numbers where they arrive
    name = _FROM_NUMPY.get(array.dtype.name) if array.dtype.isnative else None
    if name is None:
        raise UnsupportedDtype(f"numpy dtype {array.dtype} cannot be published; pass an integer view of its bits")
    return name


def bits_of(array: npt.NDArray[Any]) -> Bits:
    """The flat unit view of an array; a copy only when it is not contiguous."""
    dtype = lookup(of_numpy(array))
    return np.ascontiguousarray(array).reshape(-1).view(dtype.unit)


def numbers(bits: Bits, dtype: Dtype) -> npt.NDArray[Any]:
    """The numbers that bits stand for, in float64 (complex128 for C64)."""
    if dtype.name == "BF16":
        with np.errstate(invalid="ignore"):  # a signalling NaN
            wide: npt.NDArray[Any] = bits.astype(np.uint32) << np.uint32(16)
            return wide.view(np.float32).astype(np.float64)
    if dtype.name.startswith("F8_"):
        return _float8(dtype.name)[bits]
    with np.errstate(invalid="ignore"):
        values = bits.view("uint8" if dtype.name == "BOOL" else dtype.plain)
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


def read_only(bits: Bits) -> Bits:
    """Return a read-only view for a kernel that only reads.

    numba compiles a kernel once for memory that may be written, and once more for memory that may not.
    """
    view: Bits = bits.view()
    view.flags.writeable = False
    return view
