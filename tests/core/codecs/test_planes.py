"""`planes`: flipped bits of every weight, byte plane by byte plane, for dense blocks."""

from __future__ import annotations

import numpy as np
import pytest

from deltawire.core.change import FLIPS, compare, whole
from deltawire.core.codecs import planes
from deltawire.core.codecs.base import BlockRecord, StreamRecord
from deltawire.core.errors import CountMismatch
from deltawire.core.schema import TensorSpec

TENSOR = TensorSpec("w", "BF16", (2, 3))


def test_each_plane_holds_one_byte_of_every_flip() -> None:
    old = np.zeros(6, np.uint16)
    new = np.array([0, 0x0102, 0, 0, 0xFF00, 0], np.uint16)
    change = compare(whole(TENSOR), old, new)
    coded = planes.encode([change], lambda region: old)
    assert coded.streams == {"byte0": bytes([0, 2, 0, 0, 0, 0]), "byte1": bytes([0, 1, 0, 0, 255, 0])}
    record = BlockRecord("planes", [], {name: StreamRecord(len(x), len(x)) for name, x in coded.streams.items()})
    (found,) = planes.moves(record, [(change.region, 2)], coded.streams)
    assert (found.positions.tolist(), found.values.tolist(), found.kind) == ([1, 4], [0x0102, 0xFF00], FLIPS)
    with pytest.raises(CountMismatch, match="has 2 changes"):
        planes.moves(record, [(change.region, 3)], coded.streams)
