"""What a model may look like on the wire."""

from __future__ import annotations

import pytest

from deltawire.core.errors import SchemaMismatch, UnsafeName, UnsupportedDtype
from deltawire.core.schema import Schema, TensorSpec, check_name


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
