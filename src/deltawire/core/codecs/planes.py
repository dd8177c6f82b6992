"""`planes`: old XOR new of whole regions as byte planes, for blocks where most of the weights changed.

Positions cost nothing here and weights that did not change cost what zeros cost, so a block is never noticeably larger
than its weights, whatever happened to them. `context` uses it for such blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..change import FLIPS, Change, RegionMoves
from ..dtypes import lookup
from ..errors import CountMismatch
from .base import Before, BlockRecord, Coded, CountedRegions, check_names, exactly

name = "planes"


def encode(changes: Sequence[Change], before: Before) -> Coded:
    units = sum(change.region.units for change in changes)
    flips, at = np.zeros(units, changes[0].old.dtype), 0
    for change in changes:
        flips[at : at + change.region.units][change.positions] = change.old ^ change.new
        at += change.region.units
    rows = flips.view(np.uint8).reshape(units, flips.itemsize)
    return Coded({_stream(i): rows[:, i].tobytes() for i in range(flips.itemsize)})


def moves(record: BlockRecord, regions: CountedRegions, streams: dict[str, bytes]) -> list[RegionMoves]:
    """Flipped bits of each region, checked."""
    unit = lookup(regions[0][0].tensor.dtype).unit
    units, size = sum(region.units for region, _ in regions), np.dtype(unit).itemsize
    check_names(record, [_stream(i) for i in range(size)])
    planes = [exactly(record, streams, _stream(i), (units, units)) for i in range(size)]
    result, at = [], 0
    for region, count in regions:
        flips = np.empty((region.units, size), np.uint8)
        for i, plane in enumerate(planes):
            flips[:, i] = plane[at : at + region.units]
        at += region.units
        bits = flips.reshape(-1).view(unit)
        where = np.flatnonzero(bits)
        if where.size != count:
            raise CountMismatch(f"a region of {region.tensor.name!r} has {where.size} changes, its count is {count}")
        result.append(RegionMoves(region, where.astype(np.uint32), bits[where], FLIPS))
    return result


def _stream(plane: int) -> str:
    """Named by what the plane holds, the lowest byte of every unit first."""
    return f"byte{plane}"
