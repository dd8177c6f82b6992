"""The vector idioms, beside what numpy says of the same arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from deltawire.core.simd import LANES, difference_mask, equal_mask, leading_zeros, popcount, trailing_zeros


@njit
def _difference(a: Any, b: Any, start: Any) -> Any:
    return difference_mask(a, b, start)


@njit
def _equal(data: Any, start: Any, value: Any) -> Any:
    return equal_mask(np.int64(data.ctypes.data) + start, np.uint8(value))


@njit
def _counts(mask: Any) -> Any:
    return popcount(mask), trailing_zeros(mask), leading_zeros(mask)


def as_mask(found: np.ndarray) -> int:
    return int(sum(1 << int(i) for i in np.flatnonzero(found)))


@pytest.mark.parametrize("unit", [np.uint8, np.uint16, np.uint32])
def test_masks_of_lanes(unit: type) -> None:
    rng = np.random.default_rng(0)
    a = rng.integers(0, 4, 3 * LANES).astype(unit)
    b = np.where(rng.random(a.size) < 0.2, a + unit(1), a)
    for start in (0, 1, LANES, 2 * LANES):
        here = slice(start, start + LANES)
        assert _difference(a, b, start) == as_mask(a[here] != b[here])
        if unit is np.uint8:
            assert _equal(a, start, 3) == as_mask(a[here] == 3)


@pytest.mark.parametrize("mask", [0, 1, 1 << 63, 0b1011000, (1 << 64) - 1])
def test_bits_of_a_mask(mask: int) -> None:
    low = (mask & -mask).bit_length() - 1 if mask else 64
    assert _counts(np.uint64(mask)) == (mask.bit_count(), low, 64 - mask.bit_length())
