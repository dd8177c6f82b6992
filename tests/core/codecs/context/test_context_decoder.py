"""A shard decodes what it holds from what it holds: every tile from its own old weights, through the file format."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from deltawire.core.change import BLOCK_UNITS, blocks, regions
from deltawire.core.codecs.context import TiledBlock
from deltawire.core.codecs.context.tiles import TILE, grid_of
from deltawire.core.dtypes import Bits
from deltawire.core.schema import TensorSpec
from support import Bag, column_cut, diff, encoded, opened
from tiled import always_tiles, pair

SHAPES = [(1024, 1024), (768, 1024), (1024, 3072), (2048, 384), (768, 288), (999, 321), (4096, 48), (77, 64)]


def block_of(old: Bag, new: Bag) -> TiledBlock:
    with always_tiles():
        blob = encoded(old, diff(old, new), "context")
    file = opened(blob, old.schema)
    (ref,) = file.blocks
    assert ref.record is not None
    assert ref.record.encoding == "context"
    found = file.read(ref)
    assert isinstance(found, TiledBlock)
    return found


def matrix(bag: Bag) -> Bits:
    tensor = bag.schema.tensors[0]
    return bag.tensors[tensor.name].reshape(tensor.rows, tensor.columns)


def decoded(block: TiledBlock, rows: slice, columns: slice, old: Bits) -> Bits:
    """A shard's weights after the delta; `old` is all that it holds."""
    mine = old[rows, columns].copy()
    positions, was, now = block.shard(0, rows, columns, mine)
    assert np.all(np.diff(positions.astype(np.int64)) > 0)
    assert mine.reshape(-1)[positions].tolist() == was.tolist()
    mine.reshape(-1)[positions] = now
    return mine


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("leveled", [False, True])
def test_every_tile_from_a_shard_that_holds_only_that_tile(shape: tuple[int, int], leveled: bool) -> None:
    chance = np.full(shape, 0.01)
    if leveled:
        chance *= np.random.default_rng(1).choice([0, 1, 4], (shape[0], 1))
    old, new = pair("BF16", shape, chance)
    block = block_of(old, new)
    row_lines, column_lines = block.lines(0)
    assert (row_lines[0], row_lines[-1], column_lines[0], column_lines[-1]) == (0, shape[0], 0, shape[1])
    for r in pairwise(row_lines):
        for c in pairwise(column_lines):
            rows, columns = slice(*r), slice(*c)
            after = decoded(block, rows, columns, matrix(old))
            assert np.array_equal(after, matrix(new)[rows, columns])


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F32"])
@pytest.mark.parametrize("shape", [(2048, 1024), (512, 4096), (256, 8192), (1152, 1024)], ids=str)
def test_row_and_column_shards(dtype: str, shape: tuple[int, int]) -> None:
    old, new = pair(dtype, shape, 0.005)
    block = block_of(old, new)
    for degree, axis in product([2, 4, 8], [0, 1]):
        each = shape[axis] // degree
        for i in range(degree):
            where = [slice(0, shape[0]), slice(0, shape[1])]
            where[axis] = slice(i * each, (i + 1) * each)
            after = decoded(block, where[0], where[1], matrix(old))
            assert np.array_equal(after, matrix(new)[where[0], where[1]]), (degree, axis, i)


@pytest.mark.parametrize("shape", [(1000, 1000), (999, 321), (1024, 1024), (4096, 48), (300, 5)], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("degree", [3, 7])
def test_uneven_shards_take_the_tiles_around_them(shape: tuple[int, int], axis: int, degree: int) -> None:
    """A shard off the lines is refused; with the old weights of the whole tiles it decodes, and is cut."""
    old, new = pair("BF16", shape, 0.01)
    block = block_of(old, new)
    refused = 0
    for i in range(degree):
        where = [slice(0, shape[0]), slice(0, shape[1])]
        where[axis] = slice(i * shape[axis] // degree, (i + 1) * shape[axis] // degree)
        rows, columns = where
        if where[axis].start == where[axis].stop:
            continue
        around = block.around(0, rows, columns)
        if around != (rows, columns):
            refused += 1
            with pytest.raises(ValueError, match="not on the lines of its tiles"):
                block.shard(0, rows, columns, matrix(old)[rows, columns])
        whole = decoded(block, *around, matrix(old))
        mine = whole[rows.start - around[0].start :, columns.start - around[1].start :]
        mine = mine[: rows.stop - rows.start, : columns.stop - columns.start]
        assert np.array_equal(mine, matrix(new)[rows, columns])
    assert refused


def test_what_is_no_part_of_the_region_is_refused() -> None:
    old, new = pair("BF16", (256, 256), 0.01)
    block = block_of(old, new)
    with pytest.raises(ValueError, match="no part of"):
        block.shard(0, slice(0, 300), slice(0, 256), matrix(old))
    with pytest.raises(ValueError, match="old weights of shape"):
        block.shard(0, slice(0, 256), slice(0, 256), matrix(old)[:10])


def test_a_shard_reads_a_strided_view() -> None:
    old, new = pair("BF16", (512, 2048), 0.01)
    block = block_of(old, new)
    columns = slice(512, 1024)
    view = matrix(old)[:, columns]
    positions, _, now = block.shard(0, slice(0, 512), columns, view)
    mine = view.copy()
    mine.reshape(-1)[positions] = now
    assert np.array_equal(mine, matrix(new)[:, columns])


def test_blocks_of_columns_decode_alone() -> None:
    """As ranks write it that hold columns: each block is a rectangle of its own."""
    old, new = pair("BF16", (256, 1024), 0.02)
    with always_tiles():
        blob = encoded(old, diff(old, new, column_cut(old.schema, 256, 256)), "context")
    file = opened(blob, old.schema)
    for ref in file.blocks:
        assert ref.record is not None
        region = ref.regions[0][0]
        mine = region.matrix(old.tensors["w"]).copy()
        block = file.read(ref)
        assert isinstance(block, TiledBlock)
        positions, _, now = block.shard(0, slice(0, region.rows), slice(0, region.columns), mine)
        mine.reshape(-1)[positions] = now
        assert np.array_equal(mine, region.matrix(new.tensors["w"]))


# ── where the lines are ──────────────────────────────────────────────────────────────────────────────────────────────

MODEL_SHAPES = [(151936, 1024), (128256, 4096), (1024, 3072), (3072, 1024), (4096, 14336), (2048, 1024), (6144, 1024)]


@pytest.mark.parametrize("shape", MODEL_SHAPES, ids=str)
@pytest.mark.parametrize("degree", [2, 4, 8])
def test_shards_of_common_degrees_lie_on_lines(shape: tuple[int, int], degree: int) -> None:
    """Of blocks first, then of their tiles: no rank needs a weight it does not hold."""
    tensor = TensorSpec("w", "BF16", shape)
    row_lines, column_lines = set(), None
    for region in regions(tensor):
        down, across = grid_of(region.rows, region.columns)
        row_lines |= {region.row + i * region.rows // down for i in range(down + 1)}
        columns = {i * region.columns // across for i in range(across + 1)}
        column_lines = columns if column_lines is None else column_lines & columns
    assert column_lines is not None
    assert {i * shape[0] // degree for i in range(degree + 1)} <= row_lines
    assert {i * shape[1] // degree for i in range(degree + 1)} <= column_lines


@pytest.mark.parametrize(
    "shape", [*MODEL_SHAPES, (50257, 1600), (32000, 288), (1, 10**7), (10**6, 64), (65, 65)], ids=str
)
def test_tiles_have_a_size_that_pays(shape: tuple[int, int]) -> None:
    for region in regions(TensorSpec("w", "BF16", shape)):
        down, across = grid_of(region.rows, region.columns)
        largest = -(-region.rows // down) * -(-region.columns // across)
        assert largest <= 1.1 * TILE
        assert down * across == 1 or region.units // (down * across) >= TILE // 8


def test_large_tensors_are_cut_where_their_shards_are() -> None:
    cut = [(r.row, r.rows) for r in regions(TensorSpec("embed", "BF16", (151936, 1024)))]
    assert cut == [(i * 9496, 9496) for i in range(16)]
    # a quarter fits a block, so it is not cut further
    assert [r.rows for r in regions(TensorSpec("w", "BF16", (16384, 4096)))] == [4096] * 4
    assert [r.rows for r in regions(TensorSpec("w", "BF16", (13, 10)), 40)] == [3, 3, 3, 4]
    assert [r.rows for r in regions(TensorSpec("w", "BF16", (10, 10)), 30)] == [2, 3, 2, 3]
    assert all(r.units <= BLOCK_UNITS for r in regions(TensorSpec("w", "BF16", (50257, 1600))))
    old, _ = pair("BF16", (64, 64), 0)
    assert [len(block) for block in blocks(old.schema)] == [1]
