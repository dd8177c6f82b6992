"""Results of kernels: changes, ranks, and the class rules they were counted by; tiles of a `context` delta."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..core.codecs.context.classes import CLASSES, COLUMN_NEUTRAL, ROW_NEUTRAL
from .plan import Plan, Remember, Segment

CLASS_STEPS = (16, 24, CLASSES)
"""Numbers of classes that kernels are compiled for, each a multiple of four: fewer than the rules of deltas have, since
compiling holds up a model that is served in the same process."""

_ALIGNMENT = 16


class TooMany(Exception):
    """More changed than the caller allows. Nothing was written."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} units changed")
        self.count = count


@dataclass(frozen=True, slots=True)
class Changed:
    """Changed units, tile after tile. In a tile they come row by row from `detect`, class by class from `place`."""

    starts: Tensor
    """int64, tiles + 1: where each tile's begin."""
    positions: Tensor
    """Within the tile, row by row; uint16 where every tile is that small, else uint32."""
    old: Tensor
    """Unsigned bits, zero-extended where the plan has wider units elsewhere."""
    new: Tensor

    @property
    def count(self) -> int:
        return self.positions.numel()

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.starts, self.positions, self.old, self.new))

    def each(self, move: Callable[[Tensor], Tensor]) -> Changed:
        """The same change in other memory."""
        return Changed(*(move(t) for t in (self.starts, self.positions, self.old, self.new)))

    def swapped(self) -> Changed:
        """The change that takes this one back."""
        return Changed(self.starts, self.positions, self.new, self.old)


@dataclass(frozen=True, slots=True)
class Moves:
    """Changed units whose old bits are only where the weights are: `resolve` makes a `Changed` of them."""

    starts: Tensor
    positions: Tensor
    """`starts` and `positions` are those of `Changed`."""
    values: Tensor
    """Unsigned integers as wide as the bits."""
    kinds: Tensor
    """int32 [tiles]."""


@dataclass(frozen=True, slots=True)
class Origins:
    """Where the tensors of a plan lie in the tensors whose state digest is asked for, and how sums are kept apart."""

    table: Tensor
    """int64 [tiles, 4]: position of the tensor's first unit, units of its rows, units of the rows it is cut from, and
    the group that the tile counts to."""
    groups: int
    """Number of groups."""


@dataclass(frozen=True, slots=True)
class ClassRanks:
    """Changed units as ranks within classes of the old bits: tile after tile, class by class, rank by rank."""

    sizes: Tensor
    """int32 [tiles, CLASSES]: units of each class; of class 0, in which nothing changes, none."""
    counts: Tensor
    """int32 [tiles, CLASSES]: how many of them changed."""
    ranks: Tensor
    """Unsigned integers as wide as positions."""
    steps: Tensor
    """Zigzagged step in ulps, as core/ulps.py has it; as wide as the bits."""


@dataclass(frozen=True, slots=True)
class ClassRules:
    """How the old bits of every tile get their class, as the `context` codec has it:

    offset − clamp(exponent, low, top) + row level + column level, modulo 256 and at most classes − 1; 0 in rows of
    level 0, which did not change.
    """

    table: Tensor
    """int32 [tiles, 6]: exponent's shift, its mask (0: not a float), low, top, offset, classes."""
    classes: int
    """The most any tile has."""
    levels: Tensor
    """uint8: of all rows and columns, one segment after the other; empty where all are neutral."""
    level_at: Tensor
    """int64 [tiles, 2]: where the levels of a tile's rows begin, and those of its columns, which can be read wide."""


Level = npt.NDArray[np.uint8] | None


def rules(
    plan: Plan,
    table: Sequence[Sequence[int] | npt.NDArray[Any]] | npt.NDArray[Any],
    levels: Sequence[tuple[Level, Level]] | None = None,
) -> ClassRules:
    """The rules of a plan from six numbers per segment (see `ClassRules.table`), and its row and column levels.

    A level that is None is neutral everywhere.
    """
    numbers = np.asarray(table, np.int32).reshape(len(plan.segments), 6)
    per_tile = np.repeat(numbers, [s.tiles for s in plan.segments], axis=0)
    joined, at = np.zeros(0, np.uint8), np.zeros((plan.tiles, 2), np.int64)
    if levels is not None and any(line is not None for pair in levels for line in pair):
        joined, at = _join(plan, levels)
    return ClassRules(
        torch.from_numpy(per_tile).to(plan.device),
        int(numbers[:, 5].max(initial=1)),
        torch.from_numpy(joined).to(plan.device),
        torch.from_numpy(at).to(plan.device),
    )


def _join(plan: Plan, levels: Sequence[tuple[Level, Level]]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """All levels in one array, and where those of each tile's rows and columns begin."""
    parts: list[npt.NDArray[np.uint8]] = []
    at: list[npt.NDArray[np.int64]] = []
    length = 0
    for segment, (row, column) in zip(plan.segments, levels, strict=True):
        row = np.full(segment.rows, ROW_NEUTRAL, np.uint8) if row is None else row
        column = np.full(segment.columns, COLUMN_NEUTRAL, np.uint8) if column is None else column
        # padded behind the columns of each tile, and behind the rows: the levels of columns are read wide
        widths = np.diff(segment.column_cuts)
        places = np.cumsum([0, *(-(-widths // _ALIGNMENT) * _ALIGNMENT)])
        spread = np.zeros(places[-1], np.uint8)
        spread[np.arange(column.size) + np.repeat(places[:-1] - segment.column_cuts[:-1], widths)] = column
        parts += [spread, row, np.zeros(-row.size % _ALIGNMENT, np.uint8)]
        rows, columns = np.meshgrid(segment.row_cuts[:-1], places[:-1], indexing="ij")
        if segment.tiles:
            at.append(np.stack([length + spread.size + rows.reshape(-1), length + columns.reshape(-1)], axis=1))
        length += sum(part.size for part in parts[-3:])
    return np.concatenate(parts), np.concatenate(at)


Sheet = Mapping[str, npt.NDArray[Any]]
"""The result of `core.codecs.context.decoder.make_sheet`."""


def read_sheet(sheet: Sheet, tensors: Sequence[Tensor], plans: Remember) -> tuple[Plan, ClassRules]:
    """Plan and rules of a sheet. Deltas of a run mostly have the same tiles, so `plans` caches them."""
    key = tuple(sheet[name].tobytes() for name in ("segments", "lengths", "row_cuts", "column_cuts"))
    plan = plans.get(key, lambda: Plan(tensors, _segments(sheet)))
    levels = None
    if sheet["segments"][:, 3].any():
        rows, columns = (
            np.split(sheet[f"{axis}_levels"], np.cumsum([getattr(s, f"{axis}s") for s in plan.segments])[:-1])
            for axis in ("row", "column")
        )
        levels = list(zip(rows, columns, strict=True))
    return plan, rules(plan, sheet["rules"], levels)


def tiles_of(sheet: Sheet) -> npt.NDArray[np.int64]:
    """Number of tiles in each segment of a sheet."""
    return np.prod(sheet["lengths"] - 1, axis=1)  # type: ignore[no-any-return]


def part_of_sheet(sheet: Sheet, first: int, last: int) -> Sheet:
    """Segments [first:last] of a sheet."""
    found = {name: sheet[name][first:last] for name in ("segments", "lengths", "rules")}
    for axis, name in enumerate(("row", "column")):
        cuts = np.append(0, np.cumsum(sheet["lengths"][:, axis]))
        # a level for each row and column, the last of which ends at the last line
        levels = np.append(0, np.cumsum(sheet[f"{name}_cuts"][cuts[1:] - 1]))
        found[f"{name}_cuts"] = sheet[f"{name}_cuts"][cuts[first] : cuts[last]]
        found[f"{name}_levels"] = sheet[f"{name}_levels"][levels[first] : levels[last]]
    return found


def _segments(sheet: Sheet) -> list[Segment]:
    lengths = sheet["lengths"]
    rows, columns = (
        np.split(sheet[name], np.cumsum(lengths[:, axis])[:-1]) for axis, name in enumerate(("row_cuts", "column_cuts"))
    )
    return [
        Segment(int(tensor), int(offset), int(stride), rows[n].copy(), columns[n].copy())
        for n, (tensor, offset, stride, _) in enumerate(sheet["segments"])
    ]
