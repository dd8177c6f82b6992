"""What kernels hand over: changes, ranks, and the class rules they were counted by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .plan import Plan

CLASSES = 32
"""Room for classes per tile, whatever a rule uses."""

ROW_NEUTRAL, COLUMN_NEUTRAL = 3, 2
"""Levels of rows and columns that are as likely to change as their exponents say; a row of level 0 did not change."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Changed units, tile after tile. In a tile they come row by row from `detect`, class by class from `place`."""

    starts: Tensor
    # int64, tiles + 1: where each tile's begin
    positions: Tensor
    # within the tile, row by row; uint16 where every tile is that small, else uint32
    old: Tensor
    # unsigned bits, zero-extended where the plan has wider units elsewhere
    new: Tensor

    @property
    def count(self) -> int:
        return self.positions.numel()

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.starts, self.positions, self.old, self.new))

    def swapped(self) -> Changed:
        """The change that takes this one back."""
        return Changed(self.starts, self.positions, self.new, self.old)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Changed units as ranks within classes of the old bits: tile after tile, class by class, rank by rank."""

    sizes: Tensor
    # int32 [tiles, CLASSES]: units of each class
    counts: Tensor
    # int32 [tiles, CLASSES]: how many of them changed
    ranks: Tensor
    # as wide as positions
    steps: Tensor
    # zigzag of the step in ulps, less one; as wide as the bits


@dataclass(frozen=True, slots=True)
class Rules:
    """How the old bits of every tile get their class, as the `context` codec has it:

    offset − clamp(exponent, low, top) + row level + column level, modulo 256 and at most classes − 1; 0 in rows of
    level 0, which did not change.
    """

    table: Tensor
    # int32 [tiles, 6]: exponent's shift, its mask (0: not a float), low, top, offset, classes
    classes: int
    # the most any tile has
    levels: Tensor
    # uint8: of all rows and columns, one segment after the other; empty where all are neutral
    level_at: Tensor
    # int64 [tiles, 2]: where the levels of a tile's rows and of its columns begin


Level = npt.NDArray[np.uint8] | None


def rules(
    plan: Plan, table: Sequence[Sequence[int]] | npt.NDArray[Any], levels: Sequence[tuple[Level, Level]] | None = None
) -> Rules:
    """Rules of a plan from six numbers per segment (see `Rules.table`), and its row and column levels.

    A level that is None is neutral everywhere.
    """
    rows = np.asarray(table, np.int32).reshape(len(plan.segments), 6)
    tiles = [s.tiles for s in plan.segments]
    at = np.zeros((plan.tiles, 2), np.int64)
    parts: list[npt.NDArray[np.uint8]] = []
    if levels is not None and any(line is not None for pair in levels for line in pair):
        length = 0
        for number, segment in enumerate(plan.segments):
            row, column = levels[number]
            here = slice(plan.first_tile[number], plan.first_tile[number + 1])
            across = len(segment.column_cuts) - 1
            at[here, 0] = length + np.repeat(segment.row_cuts[:-1], across)[: tiles[number]]
            at[here, 1] = (
                length + segment.rows + np.tile(segment.column_cuts[:-1], len(segment.row_cuts) - 1)[: tiles[number]]
            )
            parts.append(np.full(segment.rows, ROW_NEUTRAL, np.uint8) if row is None else row)
            parts.append(np.full(segment.columns, COLUMN_NEUTRAL, np.uint8) if column is None else column)
            length += segment.rows + segment.columns
    joined = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
    per_tile = np.repeat(rows, tiles, axis=0)
    return Rules(
        torch.from_numpy(per_tile).to(plan.device),
        int(rows[:, 5].max(initial=1)),
        torch.from_numpy(joined).to(plan.device),
        torch.from_numpy(at).to(plan.device),
    )
