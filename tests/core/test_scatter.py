"""Positions of a region and the places they have in their tensor."""

from __future__ import annotations

import numpy as np
import pytest

from deltawire.core.scatter import flatten, gather, scatter, scatter_and_look


@pytest.mark.parametrize("base, width, stride", [(0, 7, 7), (14, 7, 7), (16, 5, 7), (13, 1, 7)])
def test_positions_are_those_of_a_rectangle(base: int, width: int, stride: int) -> None:
    rng = np.random.default_rng(0)
    live = rng.integers(0, 1 << 16, 300 * stride).astype(np.uint16)
    places = np.arange(live.size).reshape(-1, stride)[base // stride :, base % stride : base % stride + width]
    positions = np.flatnonzero(rng.random(places.size) < 0.3).astype(np.uint32)
    found = np.empty(positions.size, np.int64)
    flatten(positions, found, base, width, stride)
    assert found.tolist() == places.reshape(-1)[positions].tolist()
    values = np.empty(positions.size, np.uint16)
    gather(live, positions, values, base, width, stride)
    assert values.tolist() == live[found].tolist()
    expected = live.copy()
    expected[found] = ~values
    scatter(live, positions, ~values, base, width, stride)
    assert np.array_equal(live, expected)


@pytest.mark.parametrize("unit", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize("width, stride", [(7, 7), (5, 7)])
def test_what_was_written_is_read_again(unit: type, width: int, stride: int) -> None:
    rng = np.random.default_rng(0)
    rows = 900
    live = rng.integers(0, 200, rows * stride).astype(unit)
    expected = live.copy().reshape(rows, stride)
    positions = np.flatnonzero(rng.random(rows * width) < 0.5).astype(np.uint32)
    values = rng.integers(0, 200, positions.size).astype(unit)
    expected[positions // width, positions % width] = values
    assert scatter_and_look(live, positions, values, 0, width, stride)
    assert np.array_equal(live, expected.reshape(-1))
    # memory that does not keep what it was given: the same place, written twice
    positions[-1], values[-1] = positions[-2], values[-2] ^ unit(1)
    assert not scatter_and_look(live, positions, values, 0, width, stride)
