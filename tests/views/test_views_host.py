"""Views in host memory are what their definitions say, whatever part of a tensor is asked for."""

from __future__ import annotations

import numpy as np
import pytest

from deltawire.core.change import Region, whole
from deltawire.core.schema import Schema, TensorSpec
from deltawire.views import FP8_BLOCK, FP8_BLOCK_UE8M0, VIEWS
from deltawire.views.blocks import Blocks
from deltawire.views.host import BlockView, Place
from support import Bag, random_bits
from view_models import ATTENTION, E4M3, EXPERTS, SCHEMA, as_float32, defined, rounded, weights


def one_matrix(bits: np.ndarray, dtype: str, shape: tuple[int, int], view: str) -> BlockView:
    schema = Schema.build([TensorSpec("w.weight", dtype, shape)])
    return BlockView(Bag(schema, {"w.weight": bits}), Blocks(schema, view))


def read(view: BlockView, name: str) -> np.ndarray:
    return view.region(whole(view.schema.by_name()[name]))


def assert_defined(bits: np.ndarray, dtype: str, shape: tuple[int, int]) -> None:
    for name in VIEWS:
        view = one_matrix(bits, dtype, shape, name)
        codes, scales = defined(as_float32(bits, dtype).reshape(shape), name)
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


@pytest.mark.parametrize("name", VIEWS)
def test_a_nan_and_an_infinity_spoil_their_own_block(name: str) -> None:
    bits = np.full(256 * 256, 0x3F80, np.uint16)
    matrix = bits.reshape(256, 256)
    matrix[0, 0], matrix[0, 200], matrix[1, 200] = 0xFFC1, 0xFF80, 0xBF80
    view = one_matrix(bits, "BF16", (256, 256), name)
    codes = read(view, "w.weight").reshape(256, 256)
    assert (codes[:128, :128] == 0x7F).all()
    assert (codes[0, 200], codes[1, 200], codes[2, 200]) == (0x7F, 0x80, 0x00)
    assert (codes[128:] == codes[128, 0]).all()
    assert codes[128, 0] == {FP8_BLOCK: 0x7E, FP8_BLOCK_UE8M0: 0x78}[name], "448, and 256 at a scale of 1/256"
    assert [hex(x) for x in read(view, "w.weight_scale_inv")[:2]] == ["0x7fc00000", "0x7f800000"]


def test_the_experts_of_one_tensor_are_matrices_of_their_own() -> None:
    bag, shape = weights(), SCHEMA.by_name()[EXPERTS].shape
    view = BlockView(bag, Blocks(SCHEMA, FP8_BLOCK))
    made, scales = read(view, EXPERTS).reshape(shape), read(view, EXPERTS + "_scale_inv").reshape(3, 2, 2)
    for expert, matrix in enumerate(as_float32(bag.tensors[EXPERTS], "F32").reshape(shape)):
        codes, expected = defined(matrix, FP8_BLOCK)
        assert np.array_equal(made[expert], codes)
        assert np.array_equal(scales[expert], expected.view(np.uint32))


def test_what_is_not_converted_is_left_as_it_is() -> None:
    bag = weights()
    view = BlockView(bag, Blocks(SCHEMA, FP8_BLOCK))
    for name in ("embed_tokens.weight", "layers.0.norm.weight", "layers.0.mlp.gate.weight"):
        assert view.schema.by_name()[name] == SCHEMA.by_name()[name]
        assert np.array_equal(read(view, name), bag.tensors[name])
    assert view.schema.ties == SCHEMA.ties
    assert view.schema == Blocks(SCHEMA, FP8_BLOCK).schema


def test_a_part_is_what_it_is_in_the_whole() -> None:
    view = BlockView(weights(), Blocks(SCHEMA, FP8_BLOCK))
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
    bag, blocks = weights(), Blocks(SCHEMA, FP8_BLOCK)
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


def requantized(codes: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What vLLM makes of blocks of one row each for DeepGEMM, `requant_weight_ue8m0_inplace`, in exact numbers."""
    values = E4M3[codes & 0x7F].astype(np.float64) * scales[:, None] * np.where(codes & 0x80, -1, 1)
    largest = np.maximum(np.abs(values).max(1), np.float64(np.float32(1e-4)))
    again = 2.0 ** np.ceil(np.log2(largest / 448))
    return rounded(values / again[:, None]), again.astype(np.float32)


def test_requantizing_for_deepgemm_changes_nothing() -> None:
    """Blocks whose largest weight is any number of bf16 from 2⁻²⁰ to 2⁸, or near 448 or 464 times a scale."""
    largest = np.arange(0x3580, 0x4380, dtype=np.uint16)
    near = np.float32([447.5, 448, 448.5, 463.5, 464, 464.5, 479.5]) * np.float32(2.0) ** -np.arange(4, 30)[:, None]
    tops = np.concatenate([largest.astype(np.uint32) << 16, near.reshape(-1).view(np.uint32)])
    rows = np.random.default_rng(0).uniform(-1, 1, (tops.size, 128)).astype(np.float32)
    rows = rows * tops.view(np.float32)[:, None] * np.float32(2.0) ** -(np.arange(128, dtype=np.float32)[None] ** 0.5)
    rows[:, 5] = tops.view(np.float32)
    # each row in a block of its own: the other rows of the block are zeros
    matrix = np.zeros((tops.size, 128, 128), np.float32)
    matrix[:, 0] = rows
    shape = (tops.size * 128, 128)
    view = one_matrix(matrix.view(np.uint32).reshape(-1), "F32", shape, FP8_BLOCK_UE8M0)
    codes = read(view, "w.weight").reshape(-1, 128, 128)[:, 0]
    scales = read(view, "w.weight_scale_inv").view(np.float32)
    assert np.array_equal(np.frexp(scales)[0], np.full(scales.size, 0.5, np.float32)), "powers of two"
    again, scales_again = requantized(codes, scales)
    # the sign of a zero is not kept by the sign of a number
    assert np.array_equal(np.where(again & 0x7F, again, 0), np.where(codes & 0x7F, codes, 0))
    assert np.array_equal(scales_again, scales)
