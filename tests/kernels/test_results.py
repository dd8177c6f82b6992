"""What kernels hand over."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from deltawire.core.codecs.context.classes import COLUMN_NEUTRAL, ROW_NEUTRAL
from deltawire.kernels.plan import Plan, grid
from deltawire.kernels.results import Changed, rules


def test_a_change_that_is_swapped_twice_is_itself() -> None:
    old, new = torch.tensor([1, 2], dtype=torch.int16), torch.tensor([3, 4], dtype=torch.int16)
    change = Changed(torch.tensor([0, 2]), torch.tensor([5, 6], dtype=torch.int32), old, new)
    assert change.count == 2
    assert change.nbytes == 16 + 8 + 4 + 4
    assert torch.equal(change.swapped().old, new)
    assert torch.equal(change.swapped().swapped().old, old)


def test_levels_of_a_tile_are_found_where_the_rules_say() -> None:
    tensor = torch.zeros(40, 64)
    plan = Plan([tensor], [grid(0, 0, 64, (20, 64), (2, 2)), grid(0, 20 * 64, 64, (20, 64), (1, 1))])
    rows = np.arange(20, dtype=np.uint8) % 6
    found = rules(plan, [[7, 255, 1, 9, 9, 12]] * 2, [(rows, None), (None, None)])
    assert found.classes == 12
    row_at, column_at = found.level_at[2].tolist()
    assert found.levels[row_at : row_at + 10].tolist() == rows[10:].tolist()
    assert found.levels[column_at : column_at + 32].tolist() == [COLUMN_NEUTRAL] * 32
    row_at, _ = found.level_at[4].tolist()
    assert found.levels[row_at : row_at + 20].tolist() == [ROW_NEUTRAL] * 20
    assert rules(plan, [[7, 255, 1, 9, 9, 12]] * 2).levels.numel() == 0


def test_levels_of_columns_begin_where_wide_reads_are_allowed() -> None:
    tensor = torch.zeros(6, 250)
    plan = Plan([tensor], [grid(0, 0, 250, (3, 250), (1, 7)), grid(0, 750, 250, (3, 250), (3, 2))])
    rows, columns = np.arange(3, dtype=np.uint8), np.arange(250, dtype=np.uint8) % 5
    found = rules(plan, [[7, 255, 1, 9, 9, 12]] * 2, [(rows, columns), (None, columns)])
    assert not (found.level_at[:, 1] % 16).any()
    tile = 0
    for segment, of_rows in zip(plan.segments, (rows, np.full(3, ROW_NEUTRAL)), strict=True):
        for r0, r1 in pairwise(segment.row_cuts):
            for c0, c1 in pairwise(segment.column_cuts):
                row_at, column_at = found.level_at[tile].tolist()
                assert found.levels[row_at : row_at + r1 - r0].tolist() == of_rows[r0:r1].tolist()
                assert found.levels[column_at : column_at + c1 - c0].tolist() == columns[c0:c1].tolist()
                tile += 1
    assert tile == plan.tiles
