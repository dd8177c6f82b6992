"""Where a position of a region lies in its tensor, and the kernels that go there.

At 1 % changed nearly every change lies on a cache line of its own: waiting for lines is most of what a change costs, so
each is asked for long before it is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .compiled import njit
from .simd import prefetch

_AHEAD = 128
"""How many changes ahead of its use a cache line is asked for."""

_LOOKED = 1024
"""How many changes are written before they are read again."""


@njit(cache=True, nogil=True, inline="always")
def place(position: Any, base: int, width: int, stride: int) -> Any:
    """Index in the flattened tensor of a position in a region; `Region.geometry` has the other three."""
    local = np.int64(position)
    return base + local if width == stride else base + (local // width) * stride + local % width


@njit(cache=True, nogil=True, inline="always")
def _ask_ahead(bits: Any, positions: Any, i: int, base: int, width: int, stride: int) -> None:
    # of the last ones again and again: cheaper than asking whether there are more
    ahead = positions[min(i + _AHEAD, positions.size - 1)]
    prefetch(np.int64(bits.ctypes.data) + bits.itemsize * place(ahead, base, width, stride))


@njit(cache=True, nogil=True)
def gather(bits: Any, positions: Any, values: Any, base: int, width: int, stride: int) -> None:
    for i in range(positions.size):
        _ask_ahead(bits, positions, i, base, width, stride)
        values[i] = bits[np.uint64(place(positions[i], base, width, stride))]


@njit(cache=True, nogil=True)
def scatter(bits: Any, positions: Any, values: Any, base: int, width: int, stride: int) -> None:
    for i in range(positions.size):
        _ask_ahead(bits, positions, i, base, width, stride)
        bits[np.uint64(place(positions[i], base, width, stride))] = values[i]


@njit(cache=True, nogil=True)
def scatter_and_look(bits: Any, positions: Any, values: Any, base: int, width: int, stride: int) -> Any:
    """Scatter, and return whether memory holds what was written, read again while the lines are in a cache."""
    wrong = values.dtype.type(0)
    for start in range(0, positions.size, _LOOKED):
        end = min(start + _LOOKED, positions.size)
        for i in range(start, end):
            _ask_ahead(bits, positions, i, base, width, stride)
            bits[np.uint64(place(positions[i], base, width, stride))] = values[i]
        for i in range(start, end):
            wrong |= bits[np.uint64(place(positions[i], base, width, stride))] ^ values[i]
    return wrong == 0


@njit(cache=True, nogil=True)
def flatten(positions: Any, indices: Any, base: int, width: int, stride: int) -> None:
    for i in range(positions.size):
        indices[i] = place(positions[i], base, width, stride)
