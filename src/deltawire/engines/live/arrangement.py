"""The weights of an adapter in the order, dtype and scale in which ranks copy them to their devices.

A rank learns how its engine arranges an adapter (`LoadingAdapter.learned`), the decoder's process arranges later
versions accordingly, in one file, and ranks read that file as it is. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from ...core.dtypes import Bits, lookup
from ...core.parallel import for_each
from ...core.schema import TensorSpec

ALIGNED = 64
"""Every part begins at a multiple of so many bytes."""

_AT_ONCE = 1 << 16
"""Weights that are converted at a time: as many as a core's cache holds, with what is made of them."""


class Unusual(Exception):
    """Weights that only the engine itself reads: it could treat them otherwise than they are treated here."""


class Arrangement(msgspec.Struct):
    """Parts, one after the other."""

    dtype: str
    """In which the engine holds adapters."""
    parts: list[list[tuple[str, float]]]
    """Of each part, which tensors it consists of, one after the other, and what each of them is multiplied by."""

    def places(self, sizes: Sequence[int]) -> tuple[list[int], int]:
        """Return where parts of so many weights begin in the file, in bytes, and its size."""
        found, at = [], 0
        for size in sizes:
            found.append(at)
            at += -(-size * lookup(self.dtype).size // ALIGNED) * ALIGNED
        return found, at


def arrange(
    bits: Callable[[str], Bits], tensors: Mapping[str, TensorSpec], wanted: Arrangement, path: Path, threads: int
) -> None:
    """Write the file. Raises Unusual, and writes none, if some number is not finite, or too small to be exact."""
    width = lookup(wanted.dtype).size
    starts, total = wanted.places([sum(tensors[name].elements for name, _ in part) for part in wanted.parts])
    made = np.zeros(total, np.uint8)

    def fill(number: int) -> None:
        at = starts[number]
        for name, scale in wanted.parts[number]:
            size = width * tensors[name].elements
            out = made[at : at + size].view(lookup(wanted.dtype).unit)
            _convert(bits(name), tensors[name].dtype, out, wanted.dtype, scale)
            at += size

    for_each(fill, range(len(starts)), threads)
    made.tofile(path)


def _convert(bits: Bits, dtype: str, out: Bits, wanted: str, scale: float) -> None:
    """Change the dtype, then multiply, and round after each: what torch's `to` and `*=` give, bit for bit."""
    if (dtype, scale) == (wanted, 1.0):
        out[:] = bits
        return
    for start in range(0, bits.size, _AT_ONCE):
        numbers = _numbers(bits[start : start + _AT_ONCE], dtype)
        if dtype != wanted:
            numbers = _numbers(_rounded(numbers, wanted), wanted)
        if scale != 1.0:
            with np.errstate(over="ignore", invalid="ignore"):
                numbers = numbers * np.float32(scale)
        out[start : start + _AT_ONCE] = _rounded(numbers, wanted)


def _numbers(bits: Bits, dtype: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F16":
        return bits.view(np.float16).astype(np.float32)
    if dtype == "F32":
        return bits.view(np.float32)
    raise Unusual(f"{dtype} is no dtype of adapters that is converted here")


def _rounded(numbers: np.ndarray[tuple[int, ...], np.dtype[np.float32]], dtype: str) -> Bits:
    """The bits of the nearest numbers in a dtype, of two that are as near the even one."""
    size = numbers.view(np.uint32) & 0x7FFFFFFF
    # processors differ in what they make of others
    if ((size >= 0x7F800000) | ((size < 0x00800000) & (size > 0))).any():
        raise Unusual("some weights are not finite, or below the smallest normal float32")
    if dtype == "BF16":
        whole = numbers.view(np.uint32)
        return ((whole + (0x7FFF + ((whole >> 16) & 1))) >> 16).astype(np.uint16)
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return numbers.astype(np.float16).view(np.uint16)
    if dtype == "F32":
        return numbers.view(np.uint32)
    raise Unusual(f"{dtype} is no dtype of adapters that is converted here")
