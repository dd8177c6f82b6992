"""`context`: exact for every dtype, shape and density, and never larger than what it could have been instead."""

from __future__ import annotations

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from deltawire.core.change import Change, Region
from deltawire.core.codecs.context import classes, entropy
from deltawire.core.dtypes import DTYPES
from deltawire.core.errors import PositionError
from deltawire.core.schema import Schema, TensorSpec
from support import Bag, applied, column_cut, diff, encoded, moved_bag, opened, random_bag, schemas, seeds, specials
from tiled import always_tiles, by_exponent, encode_tiles, moved, pair, weights

WIDTHS = (1, 3, 63, 64, 65, 127, 128, 129, 200, 288, 513)
DENSITIES = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0)


def check(old: Bag, new: Bag, plan: list[tuple[Region, ...]] | None = None) -> bytes:
    blob = encoded(old, diff(old, new, plan), "context")
    result, moves = applied(blob, old)
    assert result == new
    assert old.digest() + moves == new.digest()
    return blob


def encodings(blob: bytes) -> list[str]:
    return [block.record.encoding for block in opened(blob).blocks if block.record]


@given(data=st.data())
def test_any_tensors(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(seeds))
    dtype = data.draw(st.sampled_from(("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "I8", "I32", "I64", "F64")))
    specs = [
        TensorSpec(f"w{i}", dtype, (data.draw(st.integers(1, 70)), data.draw(st.sampled_from(WIDTHS))))
        for i in range(data.draw(st.integers(1, 3)))
    ]
    old = {t.name: weights(rng, dtype, t.shape, data.draw(st.booleans())) for t in specs}
    new = {name: moved(rng, bits, data.draw(st.sampled_from(DENSITIES))) for name, bits in old.items()}
    schema = Schema.build(specs)
    tile, levels = data.draw(st.sampled_from((1 << 9, 1 << 12, 1 << 16))), data.draw(st.booleans())
    with always_tiles(tile, levels=levels):
        check(Bag(schema, old), Bag(schema, new))


@given(
    schema=schemas(), density=st.floats(0, 1), old=seeds, new=seeds, rows=st.integers(1, 5), columns=st.integers(1, 5)
)
def test_any_small_model_cut_anyhow(
    schema: Schema, density: float, old: int, new: int, rows: int, columns: int
) -> None:
    base = random_bag(schema, old)
    with always_tiles():
        check(base, moved_bag(base, new, density))
        check(base, moved_bag(base, new, density), column_cut(schema, rows, columns))


@pytest.mark.parametrize("density", [0.0001, 0.003, 0.01, 0.1, 0.3, 0.6, 1])
def test_large(density: float) -> None:
    with always_tiles():
        blob = check(*pair("BF16", (1500, 1024), density))
    assert encodings(blob) == ["context"]


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_special_pattern_to_every_other(dtype: str) -> None:
    patterns = specials(dtype)
    old, new = (np.tile(side.reshape(-1), 8) for side in np.meshgrid(patterns, patterns))
    schema = Schema.build([TensorSpec("w", dtype, (old.nbytes // DTYPES[dtype].size,))])
    with always_tiles():
        check(Bag(schema, {"w": old}), Bag(schema, {"w": new}))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16", "F32"])
def test_regions_that_are_columns_of_a_wide_tensor(dtype: str) -> None:
    """Their rows lie apart in memory, and the last one ends where the tensor does."""
    old, new = pair(dtype, (200, 700), 0.02)
    with always_tiles():
        check(old, new, column_cut(old.schema, 100, 256))


def test_rows_and_columns_that_differ_use_levels() -> None:
    rng = np.random.default_rng(3)
    chance = 0.02 * rng.choice([0, 1, 4], (4096, 1)) * rng.choice([0.3, 2], (1, 512))
    old, new = pair("BF16", (4096, 512), chance)
    with always_tiles(levels=False):
        plain = check(old, new)
    assert len(check(old, new)) < 0.9 * len(plain)


def test_the_same_change_gives_the_same_bytes() -> None:
    old, new = pair("BF16", (700, 300), 0.02)
    assert encoded(old, diff(old, new), "context") == encoded(old, diff(old, new), "context")


# ── what it is instead ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3", "I8"])
@pytest.mark.parametrize("density", [0.00002, 0.0005, 0.01, 0.2, 0.5, 1])
@pytest.mark.parametrize("wild", [False, True])
def test_never_larger_than_packed(dtype: str, density: float, wild: bool) -> None:
    old, new = pair(dtype, (512, 512), density, wild=wild)
    # the name of the encoding is in the header
    assert len(check(old, new)) <= len(encoded(old, diff(old, new), "packed")) + 16


def test_tiles_where_they_pay() -> None:
    assert encodings(check(*pair("BF16", (512, 512), by_exponent))) == ["context"]
    assert encodings(check(*pair("BF16", (512, 512), 0.01))) == ["packed"], "classes say nothing here"
    assert encodings(check(*pair("BF16", (512, 512), 0.00002))) == ["packed"]
    assert encodings(check(*pair("BF16", (512, 512), 0.5))) == ["packed"]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F8_E4M3", "I64"])
def test_a_fully_changed_tensor_costs_little_more_than_sending_it(dtype: str) -> None:
    schema = Schema.build([TensorSpec("w", dtype, (512, 1024))])
    old, new = random_noise(schema, 1), random_noise(schema, 2)
    blob = check(old, new)
    assert len(blob) < 1.01 * old.tensors["w"].nbytes
    assert encodings(blob) == ["planes"]


def random_noise(schema: Schema, seed: int) -> Bag:
    rng = np.random.default_rng(seed)
    return Bag(schema, {t.name: weights(rng, t.dtype, t.shape, wild=True) for t in schema.tensors})


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("width", [64, 100, 127])
@pytest.mark.parametrize("leveled", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_chunk_at_the_end_of_memory_has_the_same_classes(width: int, leveled: bool, size: int) -> None:
    rng = np.random.default_rng(12)
    shift, mask, top = {1: (3, 15, 9), 2: (7, 255, 122), 4: (23, 255, 122)}[size]
    units = rng.integers(0, 256, (2 * width + classes.CHUNK) * size, np.uint8)
    rule = classes.Rule(top, min(16, top), leveled, shift, mask).table(classes.CLASSES if leveled else 17)
    rows = rng.integers(1, 6, 2).astype(np.uint8) if leveled else np.full(2, 3, np.uint8)
    columns = rng.integers(0, 5, width + classes.CHUNK).astype(np.uint8)
    if not leveled:
        columns[:] = 2
    seen = []
    # with memory behind the tile, and without
    for memory in (units, units[: 2 * width * size].copy()):
        memory.flags.writeable = False
        found = np.zeros(2 * classes.CHUNK + classes.SPARE, np.uint8)
        hist, n = np.zeros((2, classes.CLASSES), np.uint8), np.zeros(classes.CLASSES, np.int64)
        classes.classify_tile(memory, size, width, rule, rows, columns, 0, 2, 0, width, found, hist, n)
        seen.append((found[: 2 * classes.CHUNK].tolist(), hist.tolist(), n.tolist()))
    assert seen[0] == seen[1]
    assert sum(seen[0][2]) == 2 * width
    bits = units[: 2 * width * size].view(f"<u{size}").reshape(2, width).astype(np.int64)
    exponent = np.clip((bits >> shift) & mask, rule[2], rule[3])
    expected = np.minimum(rule[4] - exponent + rows[:, None] + columns[:width], rule[5] - 1)
    assert np.array(seen[0][0]).reshape(2, classes.CHUNK)[:, :width].tolist() == expected.tolist()


def test_the_tables_of_the_format() -> None:
    """Both sides make them from formulas: another bit in one of them, and nothing decodes any more."""
    tables = b"".join(np.ascontiguousarray(table).tobytes() for table in entropy.models())
    assert blake3(tables).hexdigest(length=16) == "aeb88441b43e7644329627e0423e6c26"


@pytest.mark.parametrize("bad", [[5, 5], [7, 3], [10**6]])
def test_positions_that_do_not_ascend_are_refused(bad: list[int]) -> None:
    region = Region(TensorSpec("w", "BF16", (4, 100)), 0, 4, 0, 100)
    bits = np.zeros(400, np.uint16)
    change = Change(region, np.array(bad, np.uint32), bits[: len(bad)], bits[: len(bad)] + np.uint16(1))
    with pytest.raises(PositionError):
        encode_tiles([change], lambda _: bits)
