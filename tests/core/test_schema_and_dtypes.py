"""What a model may look like on the wire."""

from __future__ import annotations

import numpy as np
import pytest

from deltawire.core import dtypes
from deltawire.core.errors import SchemaMismatch, UnsafeName, UnsupportedDtype
from deltawire.core.schema import Schema, TensorSpec, check_name
from deltawire.models import ModelView


def test_a_schema_is_sorted_and_hashed_by_content() -> None:
    a, b = TensorSpec("a", "BF16", (2, 3)), TensorSpec("b", "F32", ())
    assert Schema.build([b, a]) == Schema.build([a, b])
    assert Schema.build([b, a]).hash == Schema.build([a, b]).hash
    assert Schema.build([a]).hash != Schema.build([TensorSpec("a", "BF16", (3, 2))]).hash
    assert Schema.build([a]).hash != Schema.build([TensorSpec("a", "F16", (2, 3))]).hash
    assert Schema.build([a, b], {"c": "a"}).hash != Schema.build([a, b]).hash


def test_sizes() -> None:
    tensor = TensorSpec("t", "F64", (3, 5))
    assert (tensor.elements, tensor.nbytes, tensor.units, tensor.rows, tensor.columns) == (15, 120, 30, 3, 10)
    scalar = TensorSpec("s", "BF16", ())
    assert (scalar.elements, scalar.units, scalar.rows, scalar.columns) == (1, 1, 1, 1)
    empty = TensorSpec("e", "BF16", (0, 4))
    assert (empty.elements, empty.units, empty.rows, empty.columns) == (0, 0, 0, 4)


@pytest.mark.parametrize("name", ["", "..", "../a", "a/../b", "a/..", "/a", "\\a", "a\\..\\b", "a\0b", "a\nb",
                                  "\x1b[2J", "__metadata__", "x" * 1025, "\u202eabc"])  # fmt: skip
def test_unsafe_names(name: str) -> None:
    with pytest.raises(UnsafeName):
        check_name(name)
    with pytest.raises(UnsafeName):
        Schema.build([TensorSpec(name, "BF16", (1,))])


@pytest.mark.parametrize("name", ["a", "a.b.c", "a..b", "a/b", "...", "größe", "x" * 1024, "model layer 1"])
def test_safe_names(name: str) -> None:
    check_name(name)


def test_what_no_publisher_could_have_made() -> None:
    one = TensorSpec("a", "BF16", (1,))
    for bad in (
        Schema((one, one)),
        Schema((TensorSpec("b", "BF16", (1,)), one)),
        Schema((TensorSpec("a", "BF16", (-1,)),)),
        Schema((TensorSpec("a", "BF16", (-1, -1)),)),
        Schema((TensorSpec("a", "BF16", (1 << 30, 1 << 30)),)),
        Schema((one,), {"b": "c"}),
        Schema((one,), {"a": "a"}),
    ):
        with pytest.raises(SchemaMismatch):
            bad.check()
    with pytest.raises(UnsupportedDtype):
        Schema((TensorSpec("a", "F3", (1,)),)).check()
    with pytest.raises(UnsafeName):
        Schema((one,), {"../b": "a"}).check()


@pytest.mark.timeout(20)
def test_a_shape_of_many_dimensions_is_refused_before_it_is_multiplied() -> None:
    with pytest.raises(SchemaMismatch):
        Schema((TensorSpec("a", "BF16", (1 << 62,) * 2_000_000),)).check()


def test_the_first_difference_is_named() -> None:
    a, b = TensorSpec("a", "BF16", (2,)), TensorSpec("b", "BF16", (2,))
    mine = Schema.build([a, b])
    for other, words in (
        (Schema.build([a]), "'b' is in mine only"),
        (Schema.build([a, b, TensorSpec("c", "BF16", (2,))]), "'c' is in theirs only"),
        (Schema.build([a, TensorSpec("b", "F32", (2,))]), r"'b' is BF16 \[2\] in mine but F32 \[2\] in theirs"),
        (Schema.build([a, TensorSpec("b", "BF16", (1, 2))]), r"BF16 \[2\] in mine but BF16 \[1, 2\]"),
        (Schema.build([a], {"b": "a"}), "'b' is in mine only"),
    ):
        with pytest.raises(SchemaMismatch, match=words):
            mine.require_equal(other, ours="mine", theirs="theirs")
    with pytest.raises(SchemaMismatch, match="tied tensors differ"):
        Schema.build([a], {"c": "a"}).require_equal(Schema.build([a]), ours="mine", theirs="theirs")


@pytest.mark.parametrize("dtype", sorted(dtypes.DTYPES))
def test_every_dtype_has_a_view(dtype: str) -> None:
    kind = dtypes.lookup(dtype)
    assert kind.unit_size * kind.units_per_element == kind.size
    assert np.dtype(kind.unit).itemsize == kind.unit_size


@pytest.mark.parametrize(
    "array, dtype",
    [
        (np.zeros(2, np.uint16), "BF16"), (np.zeros(2, np.float16), "F16"), (np.zeros(2, np.float32), "F32"),
        (np.zeros(2, np.int8), "I8"), (np.zeros(2, bool), "BOOL"), (np.zeros(2, np.float64), "F64"),
        (np.zeros(2, np.int64), "I64"), (np.zeros(2, np.complex64), "C64"), (np.zeros(2, np.int16), "I16"),
    ],
)  # fmt: skip
def test_what_numpy_arrays_are_taken_for(array: np.ndarray, dtype: str) -> None:
    assert dtypes.of_numpy(array) == dtype
    assert dtypes.bits_of(array).nbytes == array.nbytes


@pytest.mark.parametrize("dtype", ["complex128", "longdouble", "M8[s]", "S4", "O", "V3", ">f4", ">u2", ">i8"])
def test_what_cannot_travel(dtype: str) -> None:
    """Bytes in the other order are other bits: a replica would hold them as other numbers."""
    with pytest.raises(UnsupportedDtype):
        ModelView({"w": np.zeros(2, dtype)})


def test_bits_of_what_is_not_contiguous() -> None:
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert dtypes.bits_of(matrix.T).tolist() == matrix.T.copy().view(np.uint32).reshape(-1).tolist()
    assert dtypes.bits_of(matrix[:, ::2]).tolist() == matrix[:, ::2].copy().view(np.uint32).reshape(-1).tolist()
    assert dtypes.bits_of(matrix).base is not None, "a contiguous array is viewed, not copied"
