"""Steps along the numbers that bit patterns stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deltawire.core.dtypes import lookup
from deltawire.core.ulps import Histogram, in_ulps, step_in_place, take_steps, unzigzag, zigzags_of


def patterns(unit: Any, count: int = 4096) -> np.ndarray:
    """Random patterns and those at the ends: ±0, ±infinity, NaNs."""
    rng = np.random.default_rng(0)
    bits = 8 * np.dtype(unit).itemsize
    ends = [0, 1, (1 << bits - 1) - 1, 1 << bits - 1, (1 << bits - 1) + 1, (1 << bits) - 1]
    return np.concatenate([np.array(ends, unit), rng.integers(0, 1 << bits, count, np.uint64).astype(unit)])


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16", "F16", "F32", "U8", "I16", "I64"])
def test_a_step_leads_from_any_pattern_to_any_other(dtype: str) -> None:
    kind = lookup(dtype)
    old, new = patterns(kind.unit), patterns(kind.unit)[::-1].copy()
    differ = old != new
    old, new = old[differ], new[differ]
    zigzags, found = np.empty(old.size, np.uint32), np.empty_like(old)
    zigzags_of(old, new, kind.steps_are_signed, zigzags)
    take_steps(zigzags, old, kind.steps_are_signed, found)
    assert np.array_equal(found, new)
    assert np.array_equal(unzigzag(zigzags), in_ulps(old, new, kind))


def test_neighbouring_numbers_are_one_step_apart() -> None:
    numbers = np.array([-np.inf, -1.5, -1e-45, -0.0, 0.0, 1e-45, 1.0, np.inf], np.float32)
    up = np.nextafter(numbers[1:-1], np.float32(np.inf))
    steps = in_ulps(numbers[1:-1].view(np.uint32), up.view(np.uint32), lookup("F32"))
    # −0 lies between the smallest negative number and +0
    assert steps.tolist() == [1, 1, 2, 1, 1, 1]
    assert in_ulps(numbers.view(np.uint32), numbers.view(np.uint32), lookup("F32")).tolist() == [0] * 8


def test_steps_in_place_are_those_on_the_side() -> None:
    rng = np.random.default_rng(0)
    live = patterns(np.uint16, 5000)
    positions = np.flatnonzero(rng.random(live.size) < 0.3).astype(np.uint32)
    zigzags = rng.integers(0, 9, positions.size).astype(np.uint16)
    was, now, expected = live[positions], np.empty(positions.size, np.uint16), live.copy()
    take_steps(zigzags, was, True, now)
    expected[positions] = now
    old, new = np.empty_like(was), np.empty_like(was)
    step_in_place(live, positions, zigzags, True, old, new, 0, live.size, live.size)
    assert np.array_equal(live, expected)
    assert np.array_equal(old, was)
    assert np.array_equal(new, now)


def test_a_histogram_leaves_out_empty_ends() -> None:
    histogram, other = Histogram(), Histogram()
    histogram.add(np.array([1, -1, 5, 2]))
    other.add(np.array([-6]))
    histogram.add_all(other)
    histogram.add_all(None)
    assert histogram.rows() == [("1", 1, 1), ("2", 1, 0), ("3", 0, 0), ("4–7", 1, 1)]
    assert Histogram().rows() == []
