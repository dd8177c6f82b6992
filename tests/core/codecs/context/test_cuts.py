"""Blocks are cut into parts that are coded apart: together they are the block, and half a model needs about half."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.core.change import Region, blocks
from deltawire.core.codecs.context import cuts
from deltawire.core.held import Held
from deltawire.core.schema import Schema, TensorSpec
from support import Bag, applied, diff, encoded, opened, same
from tiled import always_tiles, moved, tiles_of, weights


@pytest.fixture(autouse=True)
def small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, tiles_of(1 << 9):
        patch.setattr(cuts, "PART_UNITS", 1 << 10)
        yield


def pair(schema: Schema, seed: int, share: float) -> tuple[Bag, Bag]:
    rng = np.random.default_rng(seed)
    old = {t.name: weights(rng, t.dtype, t.shape) for t in schema.tensors}
    return Bag(schema, old), Bag(schema, {name: moved(rng, bits, np.asarray(share)) for name, bits in old.items()})


sides = st.sampled_from([1, 3, 64, 96, 128, 200, 256])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(sides, sides), min_size=1, max_size=3), st.sampled_from(["BF16", "F8_E4M3", "F32"]),
    st.sampled_from(["context", "context or packed", "packed", "planes"]), st.sampled_from([0.001, 0.02, 0.2, 0.9]),
    st.sampled_from([1 << 12, 1 << 14, 1 << 24]), st.integers(0, 99),
)  # fmt: skip
def test_parts_are_the_block(
    shapes: list[tuple[int, int]], dtype: str, encoding: str, share: float, units: int, seed: int
) -> None:
    schema = Schema.build([TensorSpec(f"w.{i}", dtype, shape) for i, shape in enumerate(shapes)])
    old, new = pair(schema, seed, share)
    with always_tiles(1 << 9) if encoding == "context" else nullcontext():
        blob = encoded(old, diff(old, new, blocks(schema, units)), encoding.removesuffix(" or packed"))
    assert same(applied(blob, old)[0].tensors, new.tensors)


@pytest.mark.parametrize("units", [1 << 24, 1 << 14], ids=["whole tensors", "bands"])
@pytest.mark.parametrize("encoding, columns", [("context", True), ("context", False), ("packed", False)])
def test_half_a_model_needs_about_half(encoding: str, columns: bool, units: int) -> None:
    schema = Schema.build([TensorSpec(f"w.{i}", "BF16", (256, 512)) for i in range(4)])
    old, new = pair(schema, 1, 0.1)
    with always_tiles(1 << 9):
        blob = encoded(old, diff(old, new, blocks(schema, units)), encoding)
    file = opened(blob, schema)
    assert {block.record.encoding for block in file.blocks if block.record} == {encoding}
    for half in (0, 1):
        mine = [
            Region(t, 0, 256, 256 * half, 256) if columns else Region(t, 128 * half, 128, 0, 512)
            for t in schema.tensors
        ]
        found = file.needed(Held(mine))
        assert found is not None
        assert sum(part.nbytes for part in found) < 0.6 * len(blob)


def test_a_part_without_changes_is_left_out() -> None:
    schema = Schema.build([TensorSpec("w", "BF16", (256, 512))])
    old, _ = pair(schema, 1, 0.1)
    new = old.copy()
    rows = new.tensors["w"].reshape(256, 512)
    rows[:100, :200] = moved(np.random.default_rng(2), rows[:100, :200].reshape(-1), np.asarray(0.2)).reshape(100, 200)
    for encoding in ("context", "packed"):
        blob = encoded(old, diff(old, new), encoding)
        file = opened(blob, schema)
        assert {(region.row, region.column) for block in file.blocks for region, _ in block.regions} == {(0, 0)}
        assert same(applied(blob, old)[0].tensors, new.tensors)


def test_tensors_of_a_kind_are_neighbours() -> None:
    names = [f"layers.{layer}.experts.{e}.{kind}" for layer in (0, 1) for e in (0, 2, 10) for kind in ("down", "up")]
    schema = Schema.build([TensorSpec(name, "BF16", (8, 8)) for name in names])
    found = [region.tensor.name for block in blocks(schema) for region in block]
    assert found == [f"layers.{n}.experts.{e}.{k}" for k in ("down", "up") for n in (0, 1) for e in (0, 2, 10)]
