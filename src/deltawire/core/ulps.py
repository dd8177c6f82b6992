"""Steps in ulps: the distance between two bit patterns, counted along the numbers they stand for.

A key orders patterns as those numbers. It is a bijection, so ±0 and NaN payloads survive. A step is zigzagged without
zero, since a change is never a step of zero: +1 → 0, −1 → 1, +2 → 2 …
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .compiled import njit
from .dtypes import Bits, Dtype, read_only
from .scatter import gather, scatter

_PIECE = 256
"""Changes whose cache lines fit the first-level cache."""


@njit(cache=True, nogil=True, inline="always")
def _key(bits: Any, signed: bool, sign: int) -> Any:
    """Bit patterns in the order of the numbers they stand for: flip a negative number, set the sign bit of the others.

    `sign` is the number of the sign bit.
    """
    if not signed:
        return bits
    top = np.int64(1) << sign
    return bits ^ (top | (-(bits >> sign) & (top - 1)))


@njit(cache=True, nogil=True, inline="always")
def _unkey(key: Any, signed: bool, sign: int) -> Any:
    if not signed:
        return key
    top = np.int64(1) << sign
    return key ^ (top | (((key >> sign) - 1) & (top - 1)))


@njit(cache=True, nogil=True, inline="always")
def _step(old: Any, new: Any, signed: bool, sign: int) -> Any:
    # the shorter way round, so that every step fits the dtype's width
    top = np.int64(1) << sign
    step = _key(np.int64(new), signed, sign) - _key(np.int64(old), signed, sign)
    return ((step + top - 1) & (2 * top - 1)) - (top - 1)


@njit(cache=True, nogil=True)
def _steps(old: Any, new: Any, signed: bool, steps: Any) -> None:
    for i in range(old.size):
        steps[i] = _step(old[i], new[i], signed, old.itemsize * 8 - 1)


@njit(cache=True, nogil=True)
def zigzags_of(old: Any, new: Any, signed: bool, zigzags: Any) -> None:
    for i in range(old.size):
        step = _step(old[i], new[i], signed, old.itemsize * 8 - 1)
        zigzags[i] = np.uint32(2 * step - 2 if step > 0 else -2 * step - 1)


@njit(cache=True, nogil=True, inline="always")
def _stepped(bits: Any, zigzag: Any, signed: bool, sign: int) -> Any:
    z = np.int64(zigzag)
    step = ((z >> 1) + 1) * (1 - 2 * (z & 1))
    return _unkey((_key(np.int64(bits), signed, sign) + step) & ((np.int64(2) << sign) - 1), signed, sign)


@njit(cache=True, nogil=True)
def take_steps(zigzags: Any, old: Any, signed: bool, new: Any) -> None:
    sign = old.itemsize * 8 - 1
    for i in range(old.size):
        new[i] = _stepped(old[i], zigzags[i], signed, sign)


@njit(cache=True, nogil=True)
def step_in_place(
    bits: Any, positions: Any, zigzags: Any, signed: bool, old: Any, new: Any, base: int, width: int, stride: int
) -> None:
    """Take steps at positions of a region and write the new bits while their cache lines are still near."""
    for start in range(0, positions.size, _PIECE):
        part = slice(start, start + _PIECE)
        # one after the other: the shorter a loop that waits for memory, the more of its waits overlap
        gather(bits, positions[part], old[part], base, width, stride)
        take_steps(zigzags[part], old[part], signed, new[part])
        scatter(bits, positions[part], new[part], base, width, stride)


def in_ulps(old: Bits, new: Bits, dtype: Dtype) -> npt.NDArray[np.int64]:
    """How far each pattern is from another, in ulps; 0 where they are equal."""
    steps = np.empty(old.size, np.int64)
    _steps(read_only(old), read_only(new), dtype.steps_are_signed, steps)
    return steps


def unzigzag(zigzags: Bits) -> npt.NDArray[np.int64]:
    """The steps that zigzags stand for."""
    z = zigzags.astype(np.int64)
    return np.where(z & 1, -((z + 1) >> 1), (z >> 1) + 1)


EDGES = (0, 1, 2, 3, 4, 8, 16, 256)
"""Where each class of step sizes begins; the last one has no end."""


class Histogram:
    """Counts of steps by size and direction. Made by `step_sizes`; `rows` has them as text and numbers.

    _, steps = dw.step_sizes(run, 41)
    for size, up, down in steps.rows():
        print(size, up, down)
    """

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
