"""Two models compared tensor by tensor."""

from __future__ import annotations

import numpy as np

from deltawire.bucket.compare import differences
from deltawire.core.schema import Schema, TensorSpec
from support import Bag


def bag(**tensors: np.ndarray) -> Bag:
    specs = [TensorSpec(name, "F32", array.shape) for name, array in tensors.items()]
    return Bag(Schema.build(specs), {name: array.reshape(-1).view(np.uint32) for name, array in tensors.items()})


def test_counts_steps_and_norms_of_a_tensor() -> None:
    old = np.array([3.0, 4.0, 0.0, 1.0], np.float32)
    new = old.copy()
    new[3] = np.nextafter(np.float32(1), np.float32(2))
    new[2] = 5.0
    one, same = differences(bag(a=old, b=old), bag(a=new, b=old), [*bag(a=old, b=old).schema.tensors])
    assert (one.name, one.changed, one.elements, one.not_finite) == ("a", 2, 4, 0)
    assert one.max_ulps == int(new[2:3].view(np.uint32)[0])
    assert np.isclose(one.norm, 5.0)
    assert np.isclose(one.old_norm, np.sqrt(26))
    assert one.relative is not None
    assert (same.changed, same.max_ulps, same.norm, same.relative) == (0, None, 0.0, 0.0)


def test_what_is_not_finite_is_counted_and_left_out_of_norms() -> None:
    old = np.array([1.0, np.inf, 2.0], np.float32)
    new = np.array([np.nan, 1.0, 2.5], np.float32)
    (found,) = differences(bag(a=old), bag(a=new), [*bag(a=old).schema.tensors])
    assert (found.changed, found.not_finite) == (3, 2)
    assert found.norm == 0.5


def test_bits_are_compared_and_not_numbers() -> None:
    old, new = np.array([0.0], np.float32), np.array([-0.0], np.float32)
    (found,) = differences(bag(a=old), bag(a=new), [*bag(a=old).schema.tensors])
    assert found.changed == 1
    assert found.relative is None
