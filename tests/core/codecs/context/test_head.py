"""The head of a `context` block, the sizes of its tiles and its levels: written and read again, and checked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deltawire.core.codecs.context.classes import CLASSES, LEVELS, Rule
from deltawire.core.codecs.context.head import (
    BlockHead,
    RegionGrid,
    exponent,
    head_limit,
    pack_head,
    pack_levels,
    pack_sizes,
    parse_head,
    unpack_levels,
    unpack_sizes,
)  # fmt: skip
from deltawire.core.dtypes import lookup
from deltawire.core.errors import CorruptStream, CountMismatch

BF16 = lookup("BF16")
SHAPES = [(64, 256), (1, 700)]


def head(**changes: object) -> BlockHead:
    whole = BlockHead(
        rule=Rule(120, 9, True, *exponent(BF16)),
        classes=19,
        spread=1,
        rates=np.arange(CLASSES, dtype=np.uint8),
        inverse=np.arange(CLASSES) % 3 == 0,
        steps=[bytes([255, 3]), bytes([1, 2, 3])],
        step_table=(np.arange(CLASSES) % 2).astype(np.uint8),
        grids=[RegionGrid(2, 1, 3, -5), RegionGrid(1, 1, 0, 7)],
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def parsed(data: bytes) -> BlockHead:
    return parse_head(BF16, np.frombuffer(data, np.uint8), SHAPES)


def test_a_head_is_read_as_it_was_written() -> None:
    data = pack_head(head())
    found = parsed(data)
    assert (found.rule, found.classes, found.spread, found.grids) == (head().rule, 19, 1, head().grids)
    assert np.array_equal(found.rates, head().rates)
    assert np.array_equal(found.inverse, head().inverse)
    assert [bytes(table) for table in found.steps] == head().steps
    assert np.array_equal(found.step_table, head().step_table)
    assert len(data) <= head_limit(len(SHAPES))


def test_a_head_that_is_too_short_or_too_long_is_refused() -> None:
    data = pack_head(head())
    for length in range(len(data)):
        with pytest.raises((CountMismatch, CorruptStream, ValueError)):
            parsed(data[:length])
    with pytest.raises(CountMismatch, match="goes on"):
        parsed(data + b"x")


def test_a_head_that_makes_no_sense_is_refused() -> None:
    for wrong in (
        {"classes": CLASSES + 1},
        {"spread": 9},
        {"rule": Rule(120, 0, True, *exponent(BF16))},
        {"grids": [RegionGrid(65, 1, 0, 0), RegionGrid(1, 1, 0, 0)]},
        {"grids": [RegionGrid(1, 1, 4, 0), RegionGrid(1, 1, 0, 0)]},
        {"steps": [bytes(3)]},
        {"step_table": np.full(CLASSES, 2, np.uint8)},
    ):
        with pytest.raises(CorruptStream):
            parsed(pack_head(head(**wrong)))


def test_sizes_of_tiles() -> None:
    sizes = np.array([3, 0, 70_000, 255])
    data = np.frombuffer(pack_sizes(sizes), np.uint8)
    assert unpack_sizes(data, 4, int(sizes.sum())).tolist() == [0, 3, 3, 70_003, 70_258]
    with pytest.raises(CountMismatch, match="add up"):
        unpack_sizes(data, 4, 5)
    with pytest.raises(CountMismatch, match="for 5 tiles"):
        unpack_sizes(data, 5, 70_258)


def test_levels() -> None:
    levels = np.random.default_rng(1).integers(0, LEVELS, 300).astype(np.uint8)
    data = np.frombuffer(pack_levels(levels) + b"more", np.uint8)
    found = unpack_levels(data, 300)
    assert found is not None
    assert np.array_equal(found[0], levels)
    assert found[1] == data.size - 4
    assert unpack_levels(data[:5], 300) is None
    assert unpack_levels(np.zeros(40, np.uint8), 300) is None
