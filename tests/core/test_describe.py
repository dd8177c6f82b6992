"""What is in a file, ours or somebody else's, without the model it belongs to."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save

from deltawire.core.codecs import ENCODINGS
from deltawire.core.describe import Contents
from deltawire.core.errors import PositionError
from deltawire.core.schema import Schema, TensorSpec
from support import diff, encoded, moved_bag, random_bag

SCHEMA = Schema.build([TensorSpec("a", "BF16", (40, 70)), TensorSpec("b", "F32", (9,))])


def contents(blob: bytes) -> Contents:
    return Contents(lambda start, length: blob[start : start + length], len(blob))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_changes_and_steps_of_a_delta(encoding: str) -> None:
    old = random_bag(SCHEMA, 1)
    new = moved_bag(old, 2, 0.2)
    found = contents(encoded(old, diff(old, new), encoding))
    changed = {name: int(np.count_nonzero(bits != new.tensors[name])) for name, bits in old.tensors.items()}
    assert (found.kind, found.encoding) == ("delta", encoding)
    assert {part.name: part.changed for part in found.parts()} == {name: n for name, n in changed.items() if n}
    specs = SCHEMA.by_name()
    based = found.steps(lambda name: (specs[name], old.tensors[name]))
    assert based is not None
    assert sum(up + down for _, up, down in based.rows()) == sum(changed.values())
    alone = found.steps()
    if encoding == "packed":
        assert alone is not None
        assert alone.rows() == based.rows()
    elif encoding in ("raw", "planes"):
        assert alone is None


def test_a_file_of_others() -> None:
    found = contents(save({"w.indices": np.array([5, 3], np.int32), "w.values": np.array([2, 1], np.float16),
                           "other": np.zeros(4, np.float32)}))  # fmt: skip
    assert (found.kind, found.encoding) == ("delta", "raw")
    assert {(part.name, part.changed, part.elements) for part in found.parts()} == {("w", 2, None), ("other", None, 4)}
    stats = found.stats()["w"]
    assert (stats.first, stats.last, stats.ascending, stats.low, stats.high) == (3, 5, False, 1.0, 2.0)
    with pytest.raises(PositionError):
        found.steps(lambda name: (TensorSpec("w", "F16", (4,)), np.zeros(4, np.uint16)))


def test_full_weights() -> None:
    found = contents(save({"w": np.zeros((2, 3), np.float32)}))
    assert (found.kind, found.encoding) == ("full", "")
    (part,) = found.parts()
    assert (part.shape, part.nbytes, part.changed) == ((2, 3), 24, None)
