"""How a segment is cut into tiles."""

from __future__ import annotations

import numpy as np
import pytest

from deltawire.core.change import regions
from deltawire.core.codecs.context.classes import CHUNK, COLUMN_NEUTRAL, ROW_NEUTRAL
from deltawire.core.codecs.context.tiles import NARROW, TILE, Matrix, cuts, grid_of, padded, walked, widest
from deltawire.core.schema import TensorSpec


@pytest.mark.parametrize("rows, columns", [(4096, 4096), (1, 7), (1, 10**6), (151_936, 1024), (30, 129), (0, 8)])
def test_tiles_are_neither_large_nor_empty(rows: int, columns: int) -> None:
    down, across = grid_of(rows, columns)
    assert 1 <= down <= max(rows, 1)
    assert 1 <= across <= columns
    assert widest(cuts(rows, down)) * widest(cuts(columns, across)) <= 2 * TILE


def test_lines_of_a_large_matrix_are_where_eight_shards_have_theirs() -> None:
    down, across = grid_of(4096, 4096)
    for lines, length in ((cuts(4096, down), 4096), (cuts(4096, across), 4096)):
        assert set(range(0, length + 1, length // 8)) <= set(lines.tolist())
    assert 4096 // across % CHUNK == 0


ROWS, COLUMNS = 0, 1
SHARDED = [
    # rows, columns, and which of them ranks share: queries, keys, output, gate and up, down, embedding
    *[("Qwen3-0.6B", *s) for s in ((2048, 1024, ROWS), (1024, 1024, ROWS), (1024, 2048, COLUMNS), (3072, 1024, ROWS),
                                   (1024, 3072, COLUMNS), (151_936, 1024, ROWS))],
    *[("Qwen3-8B", *s) for s in ((4096, 4096, ROWS), (4096, 4096, COLUMNS), (1024, 4096, ROWS), (12_288, 4096, ROWS),
                                 (4096, 12_288, COLUMNS), (151_936, 4096, ROWS))],
    *[("Llama-3.1-70B", *s) for s in ((8192, 8192, ROWS), (8192, 8192, COLUMNS), (1024, 8192, ROWS),
                                      (28_672, 8192, ROWS), (8192, 28_672, COLUMNS), (128_256, 8192, ROWS))],
    *[("Qwen3-30B-A3B", *s) for s in ((4096, 2048, ROWS), (512, 2048, ROWS), (2048, 4096, COLUMNS), (768, 2048, ROWS),
                                      (2048, 768, COLUMNS), (151_936, 2048, ROWS))],
    *[("Qwen3-235B-A22B", *s) for s in ((8192, 4096, ROWS), (512, 4096, ROWS), (4096, 8192, COLUMNS),
                                        (1536, 4096, ROWS), (4096, 1536, COLUMNS))],
    *[("DeepSeek-V3", *s) for s in ((24_576, 1536, ROWS), (7168, 16_384, COLUMNS), (2048, 7168, ROWS),
                                    (7168, 2048, COLUMNS), (129_280, 7168, ROWS))],
]  # fmt: skip


OF_ONE_NODE = ("Qwen3-0.6B", "Qwen3-30B-A3B")
KEYS = {(1024, 4096), (1024, 8192), (512, 4096)}
"""With at most 8 heads, of which more ranks hold copies."""


@pytest.mark.parametrize("model, rows, columns, axis", SHARDED)
def test_shards_of_published_models_end_where_tiles_do(model: str, rows: int, columns: int, axis: int) -> None:
    """At 2, 4 and 8 tensor-parallel ranks, and for large models at 16, on two nodes: no rank then needs old weights of
    another."""
    degrees = (2, 4, 8) if model in OF_ONE_NODE or (rows, columns) in KEYS else (2, 4, 8, 16)
    borders = {i * (rows, columns)[axis] // degree for degree in degrees for i in range(degree)}
    for dtype in ("BF16", "F8_E4M3"):
        for region in regions(TensorSpec("w", dtype, (rows, columns))):
            start, length = ((region.row, region.rows), (region.column, region.columns))[axis]
            lines = {start + line for line in cuts(length, grid_of(region.rows, region.columns)[axis]).tolist()}
            assert {border for border in borders if start <= border < start + length} <= lines


def test_a_narrow_segment_is_walked_as_one_row() -> None:
    assert walked(500, NARROW - 1) == (1, 500 * (NARROW - 1))
    assert walked(500, NARROW) == (500, NARROW)


def test_a_matrix_is_a_view_where_its_rows_allow_it() -> None:
    whole = np.arange(40, dtype=np.uint16).reshape(5, 8)
    part = Matrix.over(whole[1:4, 2:6])
    assert (part.stride, part.rows, part.columns, part.size) == (8, 3, 4, 2)
    assert np.shares_memory(part.units, whole)
    assert not np.shares_memory(Matrix.over(whole[:, ::2]).units, whole)
    assert Matrix.over(whole[:0]).units.size == 0


def test_levels_that_are_not_there_are_neutral() -> None:
    rows, columns = padded(None, None, (3, 5))
    assert rows.tolist() == [ROW_NEUTRAL] * 3
    assert columns[:5].tolist() == [COLUMN_NEUTRAL] * 5
    assert columns.size == 5 + CHUNK
