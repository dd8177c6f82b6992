"""decode(encode(old, new), old) is new, bit for bit, and the digest moves as if it had been recomputed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.core.change import Region, blocks, compare
from deltawire.core.codecs import BLOCK_ENCODINGS, ENCODINGS, packed, raw
from deltawire.core.codecs.base import BlockRecord, StreamRecord, exactly
from deltawire.core.dtypes import DTYPES, lookup
from deltawire.core.errors import PositionError
from deltawire.core.schema import Schema, TensorSpec
from support import (
    Bag,
    applied,
    column_cut,
    densities,
    diff,
    encoded,
    moved_bag,
    opened,
    random_bag,
    schemas,
    seeds,
    specials,
)

every_encoding = pytest.mark.parametrize("encoding", ENCODINGS)
every_dtype = pytest.mark.parametrize("dtype", sorted(DTYPES))


def check(old: Bag, new: Bag, encoding: str, plan: list[tuple[Region, ...]] | None = None) -> bytes:
    before = old.copy()
    blob = encoded(old, diff(old, new, plan), encoding)
    result, moves = applied(blob, old)
    assert result == new
    assert old.digest() + moves == new.digest()
    assert old == before, "decoding touched the base"
    return blob


@every_encoding
@given(schema=schemas(), density=densities, old=seeds, new=seeds)
def test_any_pair_of_models(encoding: str, schema: Schema, density: float, old: int, new: int) -> None:
    base = random_bag(schema, old)
    check(base, moved_bag(base, new, density), encoding)


@every_encoding
@given(schema=schemas(), block_units=st.integers(1, 70), density=densities, old=seeds, new=seeds)
def test_any_cut_into_blocks(
    encoding: str, schema: Schema, block_units: int, density: float, old: int, new: int
) -> None:
    base = random_bag(schema, old)
    check(base, moved_bag(base, new, density), encoding, blocks(schema, block_units))


@pytest.mark.parametrize("encoding", BLOCK_ENCODINGS)
@given(schema=schemas(), rows=st.integers(1, 5), columns=st.integers(1, 5), density=densities, old=seeds, new=seeds)
def test_regions_that_are_columns(
    encoding: str, schema: Schema, rows: int, columns: int, density: float, old: int, new: int
) -> None:
    base = random_bag(schema, old)
    check(base, moved_bag(base, new, density), encoding, column_cut(schema, rows, columns))


@every_encoding
@given(schema=schemas(max_tensors=2), columns=st.integers(1, 5), density=densities, old=seeds, new=seeds)
def test_one_file_per_column_shard(
    encoding: str, schema: Schema, columns: int, density: float, old: int, new: int
) -> None:
    """As several ranks write it: each file covers its own columns, all of them together make the version."""
    base = random_bag(schema, old)
    target = moved_bag(base, new, density)
    result, moves = base.copy(), base.digest()
    for block in column_cut(schema, 10**6, columns):
        shard, moved = applied(encoded(base, diff(base, target, [block]), encoding), base)
        (region,) = block
        region.matrix(result.tensors[region.tensor.name])[:] = region.matrix(shard.tensors[region.tensor.name])
        moves += moved
    assert result == target
    assert moves == target.digest()


@every_encoding
@every_dtype
def test_every_special_pattern_to_every_other(encoding: str, dtype: str) -> None:
    """±0, infinities, NaNs with payloads, denormals: all n² transitions in one tensor."""
    patterns = specials(dtype)
    per = lookup(dtype).units_per_element
    old, new = (side.reshape(-1) for side in np.meshgrid(patterns, patterns))
    schema = Schema.build([TensorSpec("w", dtype, (old.size // per,))])
    fit = old.size // per * per
    check(Bag(schema, {"w": old[:fit].copy()}), Bag(schema, {"w": new[:fit].copy()}), encoding)


@every_encoding
@pytest.mark.parametrize("dtype", ["U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL"])
def test_every_byte_to_every_other(encoding: str, dtype: str) -> None:
    values = np.arange(256, dtype=np.uint8)
    old, new = (side.reshape(-1).copy() for side in np.meshgrid(values, values))
    schema = Schema.build([TensorSpec("w", dtype, (256, 256))])
    check(Bag(schema, {"w": old}), Bag(schema, {"w": new}), encoding)


@every_encoding
@pytest.mark.parametrize("dtype", ["BF16", "F16", "I16"])
def test_every_16_bit_pattern_moves_by_every_small_step(encoding: str, dtype: str) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    schema = Schema.build([TensorSpec("w", dtype, (1 << 16,))])
    for step in (1, -1, 2, -7, 8, -8, 9, 1 << 8, 1 << 15):
        new = (patterns.astype(np.int64) + step).astype(np.uint16)
        check(Bag(schema, {"w": patterns.copy()}), Bag(schema, {"w": new}), encoding)


@every_encoding
@every_dtype
def test_every_dtype_in_every_kind_of_shape(encoding: str, dtype: str) -> None:
    for shape in [(), (0,), (1,), (0, 5), (5, 0), (3, 0, 2), (1, 1, 1, 1), (7, 3), (2, 3, 5, 7)]:
        schema = Schema.build([TensorSpec("w", dtype, shape)])
        base = random_bag(schema, 1)
        for density in (0.0, 0.1, 1.0):
            check(base, moved_bag(base, 2, density), encoding)


@every_encoding
def test_gaps_of_every_size(encoding: str) -> None:
    """One change, a gap, another change, for gaps around every power of two: all shifts and escapes of a gap coder."""
    units = 1 << 20
    schema = Schema.build([TensorSpec("w", "U8", (units,))])
    base = Bag(schema, {"w": np.zeros(units, np.uint8)})
    for exponent in range(20):
        for gap in {(1 << exponent) + off for off in (-1, 0, 1)} | {255 << max(exponent - 8, 0)}:
            if 0 < gap < units - 1:
                new = base.copy()
                new.tensors["w"][[0, gap, units - 1]] = 1, 2, 3
                check(base, new, encoding)


@every_encoding
def test_few_changes_among_many_dense_ones(encoding: str) -> None:
    """Densities that differ within one block: a shift chosen for the mean must still code the outliers."""
    schema = Schema.build([TensorSpec("dense", "BF16", (3000,)), TensorSpec("sparse", "BF16", (200_000,))])
    base = random_bag(schema, 3)
    new = base.copy()
    new.tensors["dense"] ^= 1
    new.tensors["sparse"][[0, 77_777, 199_999]] ^= 0x8000
    check(base, new, encoding)


@every_encoding
def test_a_delta_without_changes_is_a_valid_file(encoding: str) -> None:
    base = random_bag(Schema.build([TensorSpec("w", "BF16", (9,))]), 0)
    blob = check(base, base.copy(), encoding)
    assert opened(blob, base.schema).metadata["changed_params"] == "0"


@every_encoding
@given(schema=schemas(), old=seeds, new=seeds)
def test_the_same_change_gives_the_same_bytes(encoding: str, schema: Schema, old: int, new: int) -> None:
    """Whatever the thread count: a retry or a second writer makes the same object."""
    from deltawire.core.sparse import write_delta

    base = random_bag(schema, old)
    target = moved_bag(base, new, 0.3)
    plan = blocks(schema, 20)
    files = []
    for threads in (1, 4):
        writer, file = write_delta(diff(base, target, plan), encoding, base.region, {}, threads)
        files.append(b"".join(file.chunks()))
        # a store that retries asks for the chunks again
        assert b"".join(file.chunks()) == files[-1]
        writer.close()
    assert files[0] == files[1]


def test_raw_indices_beyond_2_to_the_32() -> None:
    """A tensor of more than 2^32 units: its positions do not fit 32 bits, whatever the region they are counted in."""
    units = (1 << 32) + 1000
    tensor = TensorSpec("w", "U8", (units,))
    # never touched, so never in memory: pages of zeros
    base = np.zeros(units, np.uint8)
    where = np.array([3, (1 << 31) + 7, (1 << 32) + 5], np.int64)
    for moves in raw.moves(tensor, "I64", where.tobytes(), bytes([1, 2, 3])):
        moves.apply(base)
    assert [int(base[at]) for at in where] == [1, 2, 3]
    assert base[5] == 0, "position 2^32 + 5 was written at 5"


def test_a_block_is_checked_before_any_of_it_is_written() -> None:
    """Moves are written as they come, so what is wrong with the last region must be known before the first."""
    rng = np.random.default_rng(0)
    tensors = [TensorSpec(name, "BF16", (64, 64)) for name in ("a", "b")]
    live = {t.name: rng.integers(0, 1 << 16, t.units).astype(np.uint16) for t in tensors}
    regions = [Region(t, 0, 64, 0, 64) for t in tensors]
    changes = [compare(r, live[r.tensor.name], live[r.tensor.name] ^ np.uint16(1)) for r in regions]
    coded = packed.encode(changes, lambda region: live[region.tensor.name])
    record = BlockRecord(
        packed.name, [], {k: StreamRecord(len(v), len(v)) for k, v in coded.streams.items()}, coded.parameters
    )
    before = {name: bits.copy() for name, bits in live.items()}
    short = [(regions[0], changes[0].count), (Region(tensors[1], 0, 63, 0, 64), changes[1].count)]
    with pytest.raises(PositionError):
        packed.moves(record, short, coded.streams)
    assert all(np.array_equal(live[name], before[name]) for name in live)
    for moves in packed.moves(record, [(c.region, c.count) for c in changes], coded.streams):
        moves.apply(live[moves.region.tensor.name])
    assert all(np.array_equal(live[name], before[name] ^ np.uint16(1)) for name in live)


@pytest.mark.parametrize("held", [bytes, bytearray])
def test_kernels_are_compiled_for_one_kind_of_memory(held: type[bytes | bytearray]) -> None:
    """Numba compiles a kernel once more for arrays that may not be written, seconds each."""
    data = held(b"1234")
    record = BlockRecord(packed.name, [], {"gaps": StreamRecord(4, 4)}, {})
    assert not exactly(record, {"gaps": data}, "gaps", (0, 4)).flags.writeable
    tensor = TensorSpec("w", "U8", (9,))
    (moves,) = raw.moves(tensor, "I32", np.arange(4, dtype=np.int32).tobytes(), data)
    assert moves.values.flags.writeable
