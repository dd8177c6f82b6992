"""Steps in ulps: the distance between two bit patterns, counted along the numbers they stand for.

A key orders patterns as those numbers. It is a bijection, so ±0 and NaN payloads survive. A step is zigzagged without
zero, since a change is never a step of zero: +1 → 0, −1 → 1, +2 → 2 …
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ..scatter import gather, scatter

_PIECE = 256
"""Changes whose cache lines fit the first-level cache."""


@njit(cache=True, nogil=True, inline="always")
def _key(bits: Any, signed: bool, sign: int) -> Any:
    """Bit patterns in the order of the numbers they stand for: flip a negative number, set the sign bit of the others.

    `sign` is the number of the sign bit.
    """
    if not signed:
        return bits
    top = np.int64(1) << sign
    return bits ^ (top | (-(bits >> sign) & (top - 1)))


@njit(cache=True, nogil=True, inline="always")
def _unkey(key: Any, signed: bool, sign: int) -> Any:
    if not signed:
        return key
    top = np.int64(1) << sign
    return key ^ (top | (((key >> sign) - 1) & (top - 1)))


@njit(cache=True, nogil=True)
def zigzags_of(old: Any, new: Any, signed: bool, zigzags: Any) -> None:
    # the shorter way round, so that every step fits the dtype's width
    sign = old.itemsize * 8 - 1
    top = np.int64(1) << sign
    for i in range(old.size):
        step = _key(np.int64(new[i]), signed, sign) - _key(np.int64(old[i]), signed, sign)
        step = ((step + top - 1) & (2 * top - 1)) - (top - 1)
        zigzags[i] = np.uint32(2 * step - 2 if step > 0 else -2 * step - 1)


@njit(cache=True, nogil=True, inline="always")
def _stepped(bits: Any, zigzag: Any, signed: bool, sign: int) -> Any:
    z = np.int64(zigzag)
    step = ((z >> 1) + 1) * (1 - 2 * (z & 1))
    return _unkey((_key(np.int64(bits), signed, sign) + step) & ((np.int64(2) << sign) - 1), signed, sign)


@njit(cache=True, nogil=True)
def take_steps(zigzags: Any, old: Any, signed: bool, new: Any) -> None:
    sign = old.itemsize * 8 - 1
    for i in range(old.size):
        new[i] = _stepped(old[i], zigzags[i], signed, sign)


@njit(cache=True, nogil=True)
def gathered(
    bits: Any, positions: Any, zigzags: Any, signed: bool, old: Any, new: Any, base: int, width: int, stride: int
) -> None:
    """Old and new bits at positions of a region."""
    # one after the other: the shorter a loop that waits for memory, the more of its waits overlap
    gather(bits, positions, old, base, width, stride)
    take_steps(zigzags, old, signed, new)


@njit(cache=True, nogil=True)
def moved(
    bits: Any, positions: Any, zigzags: Any, signed: bool, old: Any, new: Any, base: int, width: int, stride: int
) -> None:
    """The same, and the new bits are written, while their cache lines are still near."""
    for start in range(0, positions.size, _PIECE):
        part = slice(start, start + _PIECE)
        gathered(bits, positions[part], zigzags[part], signed, old[part], new[part], base, width, stride)
        scatter(bits, positions[part], new[part], base, width, stride)
