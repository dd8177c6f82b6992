"""How far changed weights moved, in ulps: what `show` draws and what the encodings live on."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .dtypes import Bits, Dtype

EDGES = (0, 1, 2, 3, 4, 8, 16, 256)
"""Where each class of step sizes begins; the last one has no end."""


def in_ulps(old: Bits, new: Bits, dtype: Dtype) -> npt.NDArray[np.int64]:
    """The distance between two bit patterns, counted in values of the dtype that lie between them (plus one)."""
    whole = np.int64(1) << np.int64(8 * old.itemsize)
    top = whole >> np.int64(1)

    def key(bits: Bits) -> npt.NDArray[np.int64]:
        value = bits.astype(np.int64)
        # sign and magnitude: the negative half counts backwards
        return np.where(value >= top, whole - 1 - value, value + top) if dtype.steps_are_signed else value

    step = key(new) - key(old)
    # integers wrap round, the shorter way counts
    return np.where(step > top, step - whole, np.where(step <= -top, step + whole, step))


class Histogram:
    """Counts of steps by size and direction."""

    def __init__(self) -> None:
        self.up: npt.NDArray[Any] = np.zeros(len(EDGES), np.int64)
        self.down: npt.NDArray[Any] = np.zeros(len(EDGES), np.int64)

    def add(self, steps: npt.NDArray[np.int64]) -> None:
        place = np.searchsorted(EDGES, np.abs(steps), side="right") - 1
        self.up += np.bincount(place[steps >= 0], minlength=len(EDGES))
        self.down += np.bincount(place[steps < 0], minlength=len(EDGES))

    def add_all(self, other: Histogram | None) -> None:
        if other is not None:
            self.up += other.up
            self.down += other.down

    def rows(self) -> list[tuple[str, int, int]]:
        """(size of the step, how many up, how many down), without empty ones at the ends. Zero is no step at all."""
        ends = (*(edge - 1 for edge in EDGES[1:]), None)
        names = [
            f"{first}+" if last is None else str(first) if first == last else f"{first}–{last}"
            for first, last in zip(EDGES, ends, strict=True)
        ]
        rows = [(name, int(up), int(down)) for name, up, down in zip(names, self.up, self.down, strict=True)]
        while rows and not sum(rows[-1][1:]):
            rows.pop()
        return rows if rows and sum(rows[0][1:]) else rows[1:]
