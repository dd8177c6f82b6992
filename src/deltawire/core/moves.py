"""Changes as a delta tells them, before the weights they change have been looked at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .change import Region
from .dtypes import Bits, lookup

NEW_BITS, NUMBER_STEPS, BIT_STEPS, FLIPS = range(4)
"""What the values of moves are: new bits; zigzagged steps along the numbers that bits stand for; steps along the bits;
old XOR new."""


@dataclass(frozen=True, slots=True)
class RegionMoves:
    """Changed units of a region, without their old bits."""

    region: Region
    positions: npt.NDArray[np.uint32]
    """Ascending, counted within the region, and checked."""
    values: Bits
    """One per position, as wide as the region's units."""
    kind: int
    """What the values are: NEW_BITS, NUMBER_STEPS, BIT_STEPS or FLIPS."""


def steps_of(region: Region) -> int:
    """The kind of step that a dtype is coded in."""
    return NUMBER_STEPS if lookup(region.tensor.dtype).steps_are_signed else BIT_STEPS
