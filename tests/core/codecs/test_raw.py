"""`raw`: indices and values that any reader of safetensors understands."""

from __future__ import annotations

import numpy as np
import pytest

from deltawire.core.change import compare, whole
from deltawire.core.codecs import raw
from deltawire.core.errors import PositionError
from deltawire.core.schema import TensorSpec

TENSOR = TensorSpec("w", "BF16", (4, 5))


def test_indices_and_values_of_a_change() -> None:
    old = np.arange(20, dtype=np.uint16)
    new = old.copy()
    new[[3, 17]] = 900, 901
    (indices, values) = raw.encode([compare(whole(TENSOR), old, new)])
    assert indices[:2] == ("w.indices", "I32")
    assert values[:2] == ("w.values", "BF16")
    assert np.frombuffer(indices[2], np.int32).tolist() == [3, 17]
    assert np.frombuffer(values[2], np.uint16).tolist() == [900, 901]
    (found,) = raw.moves(TENSOR, "I32", indices[2], values[2])
    assert found.positions.tolist() == [3, 17]
    assert found.values.tolist() == [900, 901]


def test_dtypes_of_indices_and_values() -> None:
    assert raw.index_dtype(TensorSpec("w", "U8", (1 << 31,))) == "I64"
    assert raw.index_dtype(TensorSpec("w", "U8", (1 << 20,))) == "I32"
    assert raw.value_dtype(TensorSpec("w", "F64", (3,))) == "U32"


def test_indices_must_ascend_within_the_tensor() -> None:
    values = np.zeros(2, np.uint16).tobytes()
    for bad in ([5, 5], [6, 5], [-1, 3], [3, 20]):
        with pytest.raises(PositionError):
            raw.moves(TENSOR, "I64", np.array(bad, np.int64).tobytes(), values)
