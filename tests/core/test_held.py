"""Parts of an object that a reader needs for what it holds: each can be checked alone, and together they suffice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.core import full
from deltawire.core.change import Region, blocks, whole
from deltawire.core.codecs import ENCODINGS
from deltawire.core.errors import HeaderError
from deltawire.core.held import Held, Part, ranges
from deltawire.core.schema import Schema, TensorSpec
from support import diff, encoded, moved_bag, opened, random_bag

SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5)


def only(data: bytes, head: int, parts: Sequence[Part]) -> bytes:
    """What a reader has that fetched its head and these parts."""
    found = bytearray(len(data))
    for start, end in [(0, head), *((part.start, part.end) for part in parts)]:
        found[start:end] = data[start:end]
    return bytes(found)


def check(data: bytes, parts: Sequence[Part]) -> None:
    for part in parts:
        assert blake3(data[part.start : part.end]).hexdigest(length=16) == part.hash


def schema_of(shapes: Sequence[tuple[int, int]]) -> Schema:
    dtypes = ["BF16", "F32", "U8", "I64"]
    return Schema.build([TensorSpec(f"t{i}", dtypes[i % 4], shape) for i, shape in enumerate(shapes)])


@st.composite
def held_of(draw: st.DrawFn, schema: Schema) -> list[Region]:
    found = []
    for tensor in schema.tensors:
        if draw(st.booleans()):
            row, column = draw(st.integers(0, tensor.rows - 1)), draw(st.integers(0, tensor.columns - 1))
            rows, columns = draw(st.integers(1, tensor.rows - row)), draw(st.integers(1, tensor.columns - column))
            found.append(Region(tensor, row, rows, column, columns))
    return found


@settings(max_examples=40)
@given(st.data(), SHAPES, st.integers(1, 300))
def test_parts_of_an_anchor_suffice(data: st.DataObject, shapes: list[tuple[int, int]], size: int) -> None:
    schema = schema_of(shapes)
    bag, mine = random_bag(schema, 1), data.draw(held_of(schema))
    blob = b"".join(full.anchor(map(whole, schema.tensors), bag.region, {}, part=size).chunks())
    file = full.FullFile(lambda start, length: blob[start : start + length], len(blob))
    found = full.needed(file, schema, Held(mine))
    if found is None:
        assert schema.nbytes < size
        return
    check(blob, found)
    here = only(blob, file.header.size, found)
    anchor = full.Anchor([full.FullFile(lambda start, length: here[start : start + length], len(here))], schema)
    for region in mine:
        assert np.array_equal(anchor.region(region), bag.region(region))


@settings(max_examples=40)
@given(st.data(), SHAPES, st.integers(1, 300), st.sampled_from(ENCODINGS))
def test_blocks_of_a_delta_suffice(
    data: st.DataObject, shapes: list[tuple[int, int]], units: int, encoding: str
) -> None:
    schema = schema_of(shapes)
    old, mine = random_bag(schema, 1), data.draw(held_of(schema))
    new = moved_bag(old, 2, 0.3)
    blob = encoded(old, diff(old, new, blocks(schema, units)), encoding)
    file = opened(blob, schema)
    found, held = file.needed(Held(mine)), Held(mine)
    if found is None:
        assert encoding == "raw"
        return
    check(blob, found)
    here = only(blob, file.blocks[0].items[0].start if file.blocks else len(blob), found)
    part, reached = opened(here, schema), old.copy()
    for _ in part.changes(reached.bits, 1, write=True, held=held):
        pass
    for region in mine:
        assert np.array_equal(reached.region(region), new.region(region))


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 50))), st.integers(0, 100), st.integers(1, 20))
def test_ranges_cover_all_parts_and_are_few(sides: list[tuple[int, int]], gap: int, most: int) -> None:
    parts = [Part(start, size, "") for start, size in sides]
    found = ranges(parts, gap, most)
    assert len(found) <= most
    assert all(any(start <= part.start and part.end <= end for start, end in found) for part in parts)
    assert all(b - a > gap for (_, a), (b, _) in pairwise(found))
    assert {start for start, _ in found} | {end for _, end in found} <= {x for p in parts for x in (p.start, p.end)}


@pytest.mark.parametrize(
    "metadata",
    [
        {"part_bytes": "0"}, {"part_bytes": "-4"}, {"part_bytes": "9" * 30}, {"part_bytes": "٤"}, {"part_bytes": "1"},
        {"part_bytes": "4", "part_hashes": "0" * 31}, {"part_hashes": "F" * 64}, {"part_hashes": ""},
        {"part_hashes": "0" * 64 + "\n"},
    ],
)  # fmt: skip
def test_hashes_that_do_not_fit_the_file_are_refused(metadata: dict[str, str]) -> None:
    schema = Schema.build([TensorSpec("t", "U8", (8,))])
    said = {"part_bytes": "4", "part_hashes": "0" * 64} | metadata
    blob = b"".join(full.anchor(map(whole, schema.tensors), random_bag(schema, 1).region, said).chunks())
    file = full.FullFile(lambda start, length: blob[start : start + length], len(blob))
    with pytest.raises(HeaderError, match="hashes of an anchor's parts"):
        full.needed(file, schema, Held([whole(schema.tensors[0])]))


def test_a_large_anchor_has_larger_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full, "MAX_PARTS", 4)
    schema = Schema.build([TensorSpec("t", "U8", (100,)), TensorSpec("u", "U8", (3,))])
    blob = b"".join(full.anchor(map(whole, schema.tensors), random_bag(schema, 1).region, {}, part=1).chunks())
    file = full.FullFile(lambda start, length: blob[start : start + length], len(blob))
    parts = file.parts()
    assert parts is not None
    assert [len(parts[name]) for name in ("t", "u")] == [4, 1]
