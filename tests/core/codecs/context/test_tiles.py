"""How a segment is cut into tiles."""

from __future__ import annotations

import numpy as np
import pytest

from deltawire.core.codecs.context.classes import CHUNK, COLUMN_NEUTRAL, ROW_NEUTRAL
from deltawire.core.codecs.context.tiles import NARROW, TILE, Matrix, cuts, grid_of, padded, walked, widest


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
