"""Comparing, composing, cutting: what a delta is made of."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.core import change as changes
from deltawire.core.change import Region, blocks, compare, compose, join, regions
from deltawire.core.digest import StateDigest
from deltawire.core.schema import Schema, TensorSpec
from support import Bag, column_cut, densities, diff, moved_bag, random_bag, schemas, seeds


def lists(c: changes.Change) -> tuple[list[int], list[int], list[int]]:
    return c.positions.tolist(), c.old.tolist(), c.new.tolist()


@given(schema=schemas(), density=densities, old=seeds, new=seeds, block_units=st.integers(1, 60))
def test_compare_finds_every_difference(schema: Schema, density: float, old: int, new: int, block_units: int) -> None:
    a = random_bag(schema, old)
    b = moved_bag(a, new, density)
    for block in diff(a, b, blocks(schema, block_units)):
        for c in block:
            x, y = a.region(c.region), b.region(c.region)
            where = np.flatnonzero(x != y)
            assert lists(c) == (where.tolist(), x[where].tolist(), y[where].tolist())


def test_compare_while_another_thread_writes_finds_no_change_of_nothing() -> None:
    """Such a change has no code: the version was committed, and no replica could read it, nor those after it."""
    size = (1 << 18) + 7
    region = Region(TensorSpec("w", "BF16", (size,)), 0, 1, 0, size)
    old = np.zeros(size, np.uint16)
    weights, ended = old.copy(), threading.Event()

    def write() -> None:
        while not ended.is_set():
            np.bitwise_xor(weights, 1, out=weights)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            found = compare(region, old, weights)
            assert np.all(found.old != found.new)
            assert np.all(np.diff(found.positions.astype(np.int64)) > 0)
    finally:
        ended.set()
        writer.join()


@pytest.mark.parametrize("size", [1, 7, 8, 9, 63, 64, 65, (1 << 20) - 1, 1 << 20, (1 << 20) + 3])
@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32"])
def test_compare_around_its_strides(size: int, dtype: str) -> None:
    """Kernels go eight or more at a time, in pieces of a megabyte: the ends must not be lost."""
    tensor = TensorSpec("w", dtype, (size,))
    region = Region(tensor, 0, 1, 0, size)
    old = np.zeros(size, f"u{tensor.unit_size}")
    new = old.copy()
    where = sorted({0, size // 2, size - 1, max(size - 8, 0)})
    new[where] = 1
    assert compare(region, old, new).positions.tolist() == where
    assert compare(region, old, old.copy()).count == 0
    everything = compare(region, old, old + old.dtype.type(1))
    assert everything.count == size
    assert everything.positions[-1] == size - 1


@given(
    schema=schemas(),
    seed=seeds,
    steps=st.lists(st.tuples(densities, seeds), min_size=1, max_size=5),
    cut=st.one_of(st.integers(1, 60), st.tuples(st.integers(1, 4), st.integers(1, 4))),
    comes_back=st.booleans(),
)
def test_a_composed_chain_is_the_direct_difference(
    schema: Schema, seed: int, steps: list[tuple[float, int]], cut: int | tuple[int, int], comes_back: bool
) -> None:
    plan = blocks(schema, cut) if isinstance(cut, int) else column_cut(schema, *cut)
    states = [random_bag(schema, seed)]
    for density, step in steps:
        states.append(moved_bag(states[-1], step, density))
    if comes_back:
        states.append(states[0].copy())
    merged = diff(states[0], states[1], plan)
    for a, b in itertools.pairwise(states[1:]):
        merged = [
            [compose(x, y) for x, y in zip(*pair, strict=True)] for pair in zip(merged, diff(a, b, plan), strict=True)
        ]
    direct = diff(states[0], states[-1], plan)
    assert [[lists(c) for c in block] for block in merged] == [[lists(c) for c in block] for block in direct]
    moves = sum((c.digest() for block in merged for c in block), StateDigest())
    assert states[0].digest() + moves == states[-1].digest()


@given(schema=schemas(), density=densities, old=seeds, new=seeds, rows=st.integers(1, 4), columns=st.integers(1, 4))
def test_undo_is_the_inverse_of_write(
    schema: Schema, density: float, old: int, new: int, rows: int, columns: int
) -> None:
    a = random_bag(schema, old)
    b = moved_bag(a, new, density)
    live = a.copy()
    every = [c for block in diff(a, b, column_cut(schema, rows, columns)) for c in block]
    for c in every:
        c.write(live.tensors[c.region.tensor.name])
        assert c.region.cut(live.tensors[c.region.tensor.name])[c.positions].tolist() == c.new.tolist()
    assert live == b
    for c in reversed(every):
        c.undo(live.tensors[c.region.tensor.name])
    assert live == a


@given(schema=schemas(), block_units=st.integers(1, 60))
def test_blocks_cover_everything_once(schema: Schema, block_units: int) -> None:
    seen = Bag(schema, {t.name: np.zeros(t.units, np.int64) for t in schema.tensors})
    for block in blocks(schema, block_units):
        assert block
        assert len({region.tensor.dtype for region in block}) == 1
        assert sum(region.units for region in block) <= block_units
        for region in block:
            region.matrix(seen.tensors[region.tensor.name])[:] += 1
    assert all((count == 1).all() for count in seen.tensors.values())


def test_regions_follow_the_bytes() -> None:
    """Whatever is written from them in order is the tensor: anchors and checkpoint files count on it."""
    for shape in ((1000,), (10, 100), (100, 10), (3, 7, 11), ()):
        tensor = TensorSpec("w", "BF16", shape)
        bits = np.arange(tensor.units, dtype=np.uint16)
        for block_units in (1, 3, 16, 64, 250, 10**6):
            pieces = [region.cut(bits) for region in regions(tensor, block_units)]
            assert np.concatenate(pieces).tolist() == bits.tolist()


def test_a_wide_row_is_cut_by_columns() -> None:
    tensor = TensorSpec("w", "U8", (2, 10))
    assert [(r.row, r.rows, r.column, r.columns) for r in regions(tensor, 4)] == [
        (0, 1, 0, 4), (0, 1, 4, 4), (0, 1, 8, 2), (1, 1, 0, 4), (1, 1, 4, 4), (1, 1, 8, 2),
    ]  # fmt: skip


def test_an_8_byte_element_counts_once_though_it_is_two_units() -> None:
    tensor = TensorSpec("w", "F64", (4,))
    region = Region(tensor, 0, 1, 0, 8)
    old = np.zeros(8, np.uint32)
    new = old.copy()
    new[[0, 1, 4]] = 1
    c = compare(region, old, new)
    assert (c.count, c.elements) == (3, 2)


def test_arrays_that_follow_each_other_are_joined_without_a_copy() -> None:
    whole = np.arange(20, dtype=np.uint16)
    found = join([whole[3:5], whole[5:5], whole[5:9]])
    assert np.shares_memory(found, whole)
    assert found.tolist() == [*range(3, 9)]
    for parts in (
        [whole[3:5], whole[6:9]],
        [whole[5:9], whole[3:5]],
        [whole[3:5], whole[3:5]],
        [whole[3:5], np.arange(2, dtype=np.uint16)],
        [whole.view(np.uint8)[3:5], whole.view(np.uint8)[5:9]],
        [whole[::2], whole[1::2]],
        [whole[::2]],
    ):
        assert join(parts).tolist() == [int(value) for part in parts for value in part]
