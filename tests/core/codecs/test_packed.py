"""`packed`: gaps and steps as byte streams."""

from __future__ import annotations

import numpy as np
import pytest

from deltawire.core.change import NUMBER_STEPS, compare, whole
from deltawire.core.codecs import packed
from deltawire.core.codecs.base import BlockRecord, Coded, StreamRecord
from deltawire.core.errors import CorruptStream, CountMismatch, PositionError
from deltawire.core.schema import TensorSpec

REGION = whole(TensorSpec("w", "BF16", (1, 4000)))


def record(coded: Coded, **parameters: int) -> BlockRecord:
    streams = {name: StreamRecord(len(data), len(data)) for name, data in coded.streams.items()}
    return BlockRecord("packed", [], streams, {**coded.parameters, **parameters})


def coded(new: dict[int, int]) -> tuple[Coded, int]:
    old = np.full(4000, 0x3F80, np.uint16)
    changed = old.copy()
    for at, bits in new.items():
        changed[at] = bits
    return packed.encode([compare(REGION, old, changed)], lambda region: old), len(new)


def test_gaps_are_counted_from_one_change_to_the_next() -> None:
    block, count = coded({0: 0x3F81, 1: 0x3F7F, 300: 0x3F80 + 40, 3999: 0})
    (found,) = packed.moves(record(block), [(REGION, count)], block.streams)
    assert found.positions.tolist() == [0, 1, 300, 3999]
    assert found.kind == NUMBER_STEPS
    # one up, one down, and two that do not fit a nibble
    assert found.values.tolist()[:2] == [0, 1]
    assert len(block.streams["steps"]) == 2
    assert len(block.streams["wide"]) == 2 * 2


def test_streams_that_do_not_fit_their_count_are_refused() -> None:
    block, count = coded({5: 0x3F81, 9: 0x3F81})
    for wrong in (count - 1, count + 1):
        with pytest.raises((CountMismatch, PositionError, CorruptStream)):
            packed.moves(record(block), [(REGION, wrong)], block.streams)
    for shift in (-1, 25):
        with pytest.raises(CorruptStream, match="shift"):
            packed.moves(record(block, shift=shift), [(REGION, count)], block.streams)
    with pytest.raises(CorruptStream, match="no stream or parameter"):
        packed.moves(record(block, other=1), [(REGION, count)], block.streams)
