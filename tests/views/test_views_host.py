"""fp8-block in host memory is what its definition says, whatever part of a tensor is asked for."""

from __future__ import annotations

import numpy as np
import pytest

from deltawire.core.change import Region, whole
from deltawire.core.schema import Schema, TensorSpec
from deltawire.views.blocks import Blocks
from deltawire.views.host import BlockView, Place
from support import Bag, random_bits
from view_models import ATTENTION, EXPERTS, SCHEMA, as_float32, defined, weights


def one_matrix(bits: np.ndarray, dtype: str, shape: tuple[int, int]) -> BlockView:
    schema = Schema.build([TensorSpec("w.weight", dtype, shape)])
    return BlockView(Bag(schema, {"w.weight": bits}), Blocks(schema))


def read(view: BlockView, name: str) -> np.ndarray:
    return view.region(whole(view.schema.by_name()[name]))


def assert_defined(bits: np.ndarray, dtype: str, shape: tuple[int, int]) -> None:
    view = one_matrix(bits, dtype, shape)
    codes, scales = defined(as_float32(bits, dtype).reshape(shape))
    assert np.array_equal(read(view, "w.weight").reshape(shape), codes)
    assert np.array_equal(read(view, "w.weight_scale_inv").reshape(scales.shape), scales.view(np.uint32))


@pytest.mark.parametrize("name", [ATTENTION, "layers.0.k_proj.weight", "layers.0.o_proj.weight"])
def test_weights_and_scales_are_as_defined(name: str) -> None:
    bag, spec = weights(), SCHEMA.by_name()[name]
    assert_defined(bag.tensors[name], spec.dtype, spec.shape)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_any_bits_at_all(dtype: str) -> None:
    """NaN and infinity among them, of every size and sign."""
    spec = TensorSpec("w.weight", dtype, (140, 40))
    assert_defined(random_bits(np.random.default_rng(3), spec), dtype, spec.shape)


def test_every_finite_bf16_number_that_a_scale_of_one_leaves_as_it_is() -> None:
    """Scale 1: all boundaries between two e4m3 numbers are hit, from both sides."""
    codes = np.arange(1 << 16, dtype=np.uint32)
    sizes = (codes & 0x7FFF) << 16
    bits = codes[sizes.view(np.float32) <= 448].astype(np.uint16)
    rows = -(-bits.size // 128)
    padded = np.zeros(rows * 128, np.uint16)
    padded[: bits.size] = bits
    padded[::16384] = 0x43E0  # 448, in every block
    assert_defined(padded, "BF16", (rows, 128))


def test_a_nan_and_an_infinity_spoil_their_own_block() -> None:
    bits = np.full(256 * 256, 0x3F80, np.uint16)
    matrix = bits.reshape(256, 256)
    matrix[0, 0], matrix[0, 200], matrix[1, 200] = 0xFFC1, 0xFF80, 0xBF80
    view = one_matrix(bits, "BF16", (256, 256))
    codes = read(view, "w.weight").reshape(256, 256)
    assert (codes[:128, :128] == 0x7F).all()
    assert (codes[0, 200], codes[1, 200], codes[2, 200]) == (0x7F, 0x80, 0x00)
    assert (codes[128:] == 0x7E).all()
    assert [hex(x) for x in read(view, "w.weight_scale_inv")[:2]] == ["0x7fc00000", "0x7f800000"]


def test_the_experts_of_one_tensor_are_matrices_of_their_own() -> None:
    bag, shape = weights(), SCHEMA.by_name()[EXPERTS].shape
    view = BlockView(bag, Blocks(SCHEMA))
    made, scales = read(view, EXPERTS).reshape(shape), read(view, EXPERTS + "_scale_inv").reshape(3, 2, 2)
    for expert, matrix in enumerate(as_float32(bag.tensors[EXPERTS], "F32").reshape(shape)):
        codes, expected = defined(matrix)
        assert np.array_equal(made[expert], codes)
        assert np.array_equal(scales[expert], expected.view(np.uint32))


def test_what_is_not_converted_is_left_as_it_is() -> None:
    bag = weights()
    view = BlockView(bag, Blocks(SCHEMA))
    for name in ("embed_tokens.weight", "layers.0.norm.weight", "layers.0.mlp.gate.weight"):
        assert view.schema.by_name()[name] == SCHEMA.by_name()[name]
        assert np.array_equal(read(view, name), bag.tensors[name])
    assert view.schema.ties == SCHEMA.ties
    assert view.schema == Blocks(SCHEMA).schema


def test_a_part_is_what_it_is_in_the_whole() -> None:
    view = BlockView(weights(), Blocks(SCHEMA))
    rng = np.random.default_rng(1)
    for name in (ATTENTION, EXPERTS, ATTENTION + "_scale_inv"):
        tensor = view.schema.by_name()[name]
        for _ in range(20):
            row, column = int(rng.integers(tensor.rows)), int(rng.integers(tensor.columns))
            rows, columns = (
                int(rng.integers(1, tensor.rows - row + 1)),
                int(rng.integers(1, tensor.columns - column + 1)),
            )
            region = Region(tensor, row, rows, column, columns)
            assert np.array_equal(view.region(region), region.cut(read(view, name)))


def test_parts_of_several_processes_give_the_same_once_their_maxima_are_merged() -> None:
    """Cut through blocks and through experts, in rows and in columns."""
    bag, blocks = weights(), Blocks(SCHEMA)
    expected = BlockView(bag, blocks)

    def part(name: str, region: Region) -> tuple[Schema, dict[str, Place], Bag]:
        schema = Schema.build([TensorSpec("part", region.tensor.dtype, (region.rows, region.columns))])
        bits = np.ascontiguousarray(region.cut(bag.tensors[name]))
        return schema, {"part": Place(blocks.grids[name], region.row, region.column)}, Bag(schema, {"part": bits})

    for name, cuts in ((ATTENTION, ((0, 77), (77, 300))), (EXPERTS, ((0, 301), (301, 600)))):
        spec = SCHEMA.by_name()[name]
        held = [
            part(name, Region(spec, a, b - a, column, columns))
            for a, b in cuts
            for column, columns in ((0, 90), (90, spec.columns - 90))
        ]
        found = [BlockView(source, blocks, places, {}).maxima for _, places, source in held]
        merged = np.maximum.reduce(found)
        for _, places, source in held:
            view = BlockView(source, blocks, places, {}, lambda own, merged=merged: merged)
            place, part_spec = places["part"], view.schema.by_name()["part"]
            region = Region(blocks.grids[name].weights, place.row, part_spec.rows, place.column, part_spec.columns)
            assert np.array_equal(view.region(whole(part_spec)), expected.region(region))
