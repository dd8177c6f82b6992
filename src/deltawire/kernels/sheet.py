"""Tiles of the `context` codec over tensors on a device: how they are cut, and how their weights get classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .plan import Plan, Remember, Segment
from .results import Rules, rules

Sheet = Mapping[str, npt.NDArray[Any]]
"""What `core.codecs.context.decoder.make_sheet` makes."""


def read_sheet(sheet: Sheet, tensors: Sequence[Tensor], plans: Remember) -> tuple[Plan, Rules]:
    """Plan and rules of a sheet. Deltas of a run mostly have the same tiles: `plans` remembers."""
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


def _segments(sheet: Sheet) -> list[Segment]:
    lengths = sheet["lengths"]
    rows, columns = (
        np.split(sheet[name], np.cumsum(lengths[:, axis])[:-1]) for axis, name in enumerate(("row_cuts", "column_cuts"))
    )
    return [
        Segment(int(tensor), int(offset), int(stride), rows[n].copy(), columns[n].copy())
        for n, (tensor, offset, stride, _) in enumerate(sheet["segments"])
    ]
