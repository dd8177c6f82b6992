"""The state digest: linear, layout-free, and sensitive to every kind of misplacement."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deltawire.core import digest
from deltawire.core.change import blocks
from deltawire.core.digest import StateDigest
from deltawire.core.dtypes import DTYPES
from deltawire.core.full import digest_of
from deltawire.core.schema import Schema, TensorSpec
from support import Bag, column_cut, densities, diff, moved_bag, random_bag, schemas, seeds


def of(bag: Bag) -> StateDigest:
    return digest_of(bag, threads=1)


def one(dtype: str, shape: tuple[int, ...], bits: np.ndarray, name: str = "w") -> StateDigest:
    return of(Bag(Schema.build([TensorSpec(name, dtype, shape)]), {name: bits}))


def slow(name: str, bits: np.ndarray) -> StateDigest:
    """The definition, in big integers, written down a second time."""
    if bits.itemsize == 4:
        bits = bits.view(np.uint16)
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    lanes = [0, 0]
    for lane in (0, 1):
        seed = int(digest.tensor_keys(name)[lane])
        for position, value in enumerate(bits.tolist()):
            a, b = mix((seed + (position >> 10)) & mask), int(digest.TABLE[lane, position & 1023])
            lanes[lane] = (lanes[lane] + a * b * value) & mask
    return StateDigest(*lanes)


def test_golden_value() -> None:
    """Pinned: another value means that no published version can be proven any more."""
    schema = Schema.build(
        [TensorSpec("a", "BF16", (40, 60)), TensorSpec("b", "F32", (33,)), TensorSpec("c", "I8", (2, 3)),
         TensorSpec("d", "F64", (2,))]
    )  # fmt: skip
    bits = {
        "a": (np.arange(2400, dtype=np.uint32) * 40503 >> 3).astype(np.uint16),
        "b": np.arange(33, dtype=np.uint32) * np.uint32(2654435761),
        "c": np.array([0, 1, 127, 128, 129, 255], np.uint8),
        "d": np.array([1, 2, 3, 0xFFFFFFFF], np.uint32),
    }
    assert str(of(Bag(schema, bits))) == "14cebe60824646d83718c834947e8de0"
    assert str(of(Bag(Schema.build([]), {}))) == "0" * 32


@given(schema=schemas(), seed=seeds)
def test_the_digest_equals_its_definition(schema: Schema, seed: int) -> None:
    bag = random_bag(schema, seed)
    assert of(bag) == sum((slow(name, bits) for name, bits in bag.tensors.items()), StateDigest())


def test_long_tensors_cross_block_borders() -> None:
    rng = np.random.default_rng(0)
    for unit in (np.uint8, np.uint16, np.uint32):
        bits = rng.integers(0, np.iinfo(unit).max, 3333, unit, endpoint=True)
        assert digest.of_bits("w", bits) == slow("w", bits)


@given(schema=schemas(), block_units=st.integers(1, 50), seed=seeds)
def test_blocks_add_up(schema: Schema, block_units: int, seed: int) -> None:
    bag = random_bag(schema, seed)
    parts = [
        digest.of_bits(region.tensor.name, bag.region(region), region.start)
        for block in blocks(schema, block_units)
        for region in block
    ]
    assert sum(reversed(parts), StateDigest()) == of(bag)


@given(schema=schemas(), rows=st.integers(1, 4), columns=st.integers(1, 4), seed=seeds)
def test_shards_by_columns_add_up(schema: Schema, rows: int, columns: int, seed: int) -> None:
    """Each rank digests the rectangle it holds, as a change from zero; the sum is the digest of the whole."""
    bag = random_bag(schema, seed)
    zero = Bag(schema, {name: np.zeros_like(bits) for name, bits in bag.tensors.items()})
    parts = [c.digest() for block in diff(zero, bag, column_cut(schema, rows, columns)) for c in block]
    assert sum(parts, StateDigest()) == of(bag)


@given(schema=schemas(), seed=seeds)
def test_files_of_a_sharded_checkpoint_add_up(schema: Schema, seed: int) -> None:
    bag = random_bag(schema, seed)
    alone = [of(Bag(Schema.build([t]), {t.name: bag.tensors[t.name]})) for t in schema.tensors]
    assert sum(alone[::-1], StateDigest()) == of(bag)


@given(schema=schemas(), seed=seeds, threads=st.integers(1, 4))
def test_threads_do_not_matter(schema: Schema, seed: int, threads: int) -> None:
    bag = random_bag(schema, seed)
    assert digest_of(bag, threads) == of(bag)


@given(schema=schemas(), density=densities, old=seeds, new=seeds, block_units=st.integers(1, 60))
def test_a_delta_moves_it_there_and_back(schema: Schema, density: float, old: int, new: int, block_units: int) -> None:
    a = random_bag(schema, old)
    b = moved_bag(a, new, density)
    forth = sum((c.digest() for block in diff(a, b, blocks(schema, block_units)) for c in block), StateDigest())
    back = sum((c.digest() for block in diff(b, a) for c in block), StateDigest())
    assert of(a) + forth == of(b)
    assert forth + back == StateDigest()
    assert of(b) - forth == of(a)


@given(data=st.data(), dtype=st.sampled_from(sorted(DTYPES)), seed=seeds)
def test_two_swapped_positions_show(data: st.DataObject, dtype: str, seed: int) -> None:
    tensor = TensorSpec("w", dtype, (3000,))
    bits = random_bag(Schema.build([tensor]), seed).tensors["w"]
    i, j = data.draw(st.integers(0, bits.size - 1)), data.draw(st.integers(0, bits.size - 1))
    assume(bits[i] != bits[j])
    swapped = bits.copy()
    swapped[[i, j]] = swapped[[j, i]]
    assert digest.of_bits("w", swapped) != digest.of_bits("w", bits)


def test_swapped_rows_show() -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 16, (64, 1024), np.uint16)
    whole = one("BF16", (64, 1024), bits.reshape(-1))
    for i, j in ((0, 1), (3, 60), (62, 63)):
        swapped = bits.copy()
        swapped[[i, j]] = swapped[[j, i]]
        assert one("BF16", (64, 1024), swapped.reshape(-1)) != whole


def test_swapped_tensors_show() -> None:
    schema = Schema.build([TensorSpec("a", "BF16", (8,)), TensorSpec("b", "BF16", (8,))])
    x, y = np.arange(8, dtype=np.uint16), np.arange(8, 16, dtype=np.uint16)
    assert of(Bag(schema, {"a": x, "b": y})) != of(Bag(schema, {"a": y, "b": x}))
    # and a renamed one
    assert one("BF16", (8,), x, "a") != one("BF16", (8,), x, "b")


def test_a_shifted_tensor_shows() -> None:
    """Off by one, by a block, by a row: what a wrong offset would do."""
    bits = np.random.default_rng(2).integers(0, 1 << 16, 4096, np.uint16)
    whole = digest.of_bits("w", bits)
    for shift in (1, 2, 64, 1023, 1024, 1025, 2048):
        assert digest.of_bits("w", np.roll(bits, shift)) != whole


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_single_bit_counts(dtype: str) -> None:
    bits = random_bag(Schema.build([TensorSpec("w", dtype, (5,))]), 4).tensors["w"]
    whole = digest.of_bits("w", bits)
    seen = {whole}
    for position in range(bits.size):
        for bit in range(bits.itemsize * 8):
            flipped = bits.copy()
            flipped[position] ^= bits.dtype.type(1 << bit)
            seen.add(digest.of_bits("w", flipped))
    assert len(seen) == 1 + bits.size * bits.itemsize * 8


def test_a_zero_and_a_minus_zero_differ() -> None:
    zeros = np.zeros(4, np.uint16)
    minus = np.array([0, 0x8000, 0, 0], np.uint16)
    assert digest.of_bits("w", zeros) != digest.of_bits("w", minus)


def test_text_form() -> None:
    value = StateDigest(0x1234, (1 << 64) - 1)
    assert str(value) == "ffffffffffffffff0000000000001234"
    assert StateDigest.parse(str(value)) == value
