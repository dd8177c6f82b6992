"""What is in a file, ours or another tool's, without the model it belongs to; two models compared tensor by tensor."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save

from deltawire.core.codecs import ENCODINGS
from deltawire.core.describe import FileContents, TensorDifference, difference
from deltawire.core.schema import Schema, TensorSpec
from support import Bag, diff, encoded, moved_bag, random_bag

SCHEMA = Schema.build([TensorSpec("a", "BF16", (40, 70)), TensorSpec("b", "F32", (9,))])


def contents(blob: bytes) -> FileContents:
    return FileContents(lambda start, length: blob[start : start + length], len(blob))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_changes_and_steps_of_a_delta(encoding: str) -> None:
    old = random_bag(SCHEMA, 1)
    new = moved_bag(old, 2, 0.2)
    found = contents(encoded(old, diff(old, new), encoding))
    changed = {name: int(np.count_nonzero(bits != new.tensors[name])) for name, bits in old.tensors.items()}
    assert (found.kind, found.encoding) == ("delta", encoding)
    assert {part.name: part.changed for part in found.parts()} == {name: n for name, n in changed.items() if n}
    steps = found.steps()
    if encoding == "packed":
        assert steps is not None
        assert sum(up + down for _, up, down in steps.rows()) == sum(changed.values())
    elif encoding in ("raw", "planes"):
        assert steps is None


def test_a_file_of_others() -> None:
    found = contents(save({"w.indices": np.array([5, 3], np.int32), "w.values": np.array([2, 1], np.float16),
                           "other": np.zeros(4, np.float32)}))  # fmt: skip
    assert (found.kind, found.encoding) == ("delta", "raw")
    assert {(part.name, part.changed, part.elements) for part in found.parts()} == {("w", 2, None), ("other", None, 4)}
    stats = found.stats()["w"]
    assert (stats.first, stats.last, stats.ascending, stats.low, stats.high) == (3, 5, False, 1.0, 2.0)
    assert found.steps() is None


def test_full_weights() -> None:
    found = contents(save({"w": np.zeros((2, 3), np.float32)}))
    assert (found.kind, found.encoding) == ("full", "")
    (part,) = found.parts()
    assert (part.shape, part.nbytes, part.changed) == ((2, 3), 24, None)


def bag(**tensors: np.ndarray) -> Bag:
    specs = [TensorSpec(name, "F32", array.shape) for name, array in tensors.items()]
    return Bag(Schema.build(specs), {name: array.reshape(-1).view(np.uint32) for name, array in tensors.items()})


def differences(old: Bag, new: Bag) -> list[TensorDifference]:
    return [difference(tensor, old, new) for tensor in old.schema.tensors]


def test_counts_steps_and_norms_of_a_tensor() -> None:
    old = np.array([3.0, 4.0, 0.0, 1.0], np.float32)
    new = old.copy()
    new[3] = np.nextafter(np.float32(1), np.float32(2))
    new[2] = 5.0
    one, same = differences(bag(a=old, b=old), bag(a=new, b=old))
    assert (one.name, one.changed, one.elements, one.not_finite) == ("a", 2, 4, 0)
    assert one.max_ulps == int(new[2:3].view(np.uint32)[0])
    assert np.isclose(one.norm, 5.0)
    assert np.isclose(one.old_norm, np.sqrt(26))
    assert one.relative is not None
    assert (same.changed, same.max_ulps, same.norm, same.relative) == (0, None, 0.0, 0.0)


def test_what_is_not_finite_is_counted_and_left_out_of_norms() -> None:
    old = np.array([1.0, np.inf, 2.0], np.float32)
    new = np.array([np.nan, 1.0, 2.5], np.float32)
    (found,) = differences(bag(a=old), bag(a=new))
    assert (found.changed, found.not_finite) == (3, 2)
    assert found.norm == 0.5


def test_bits_are_compared_and_not_numbers() -> None:
    old, new = np.array([0.0], np.float32), np.array([-0.0], np.float32)
    (found,) = differences(bag(a=old), bag(a=new))
    assert found.changed == 1
    assert found.relative is None
