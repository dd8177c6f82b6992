"""`planes`: old XOR new of whole regions as byte planes, for blocks where most of the weights changed.

Positions cost nothing here and weights that did not change cost what zeros cost, so a block is never noticeably larger
than its weights, whatever happened to them. `context` turns to it by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..change import Change, Region, gather
from ..dtypes import lookup
from ..errors import CountMismatch
from ..moves import FLIPS, RegionMoves
from .base import BaseBits, Before, Coded, CodedBlock, check_names, exactly

name = "planes"


def encode(changes: Sequence[Change], before: Before) -> Coded:
    units = sum(change.region.units for change in changes)
    flips, at = np.zeros(units, changes[0].old.dtype), 0
    for change in changes:
        flips[at : at + change.region.units][change.positions] = change.old ^ change.new
        at += change.region.units
    rows = flips.view(np.uint8).reshape(units, flips.itemsize)
    return Coded({_stream(i): rows[:, i].tobytes() for i in range(flips.itemsize)})


def decode(
    coded: CodedBlock, regions: Sequence[tuple[Region, int]], streams: dict[str, bytes], base: BaseBits
) -> list[Change]:
    result = []
    for found in moves(coded, regions, streams):
        old = gather(found.region, found.positions, base(found.region.tensor.name))
        result.append(Change(found.region, found.positions, old, old ^ found.values))
    return result


def moves(coded: CodedBlock, regions: Sequence[tuple[Region, int]], streams: dict[str, bytes]) -> list[RegionMoves]:
    """Flipped bits of each region, checked: what needs no weights."""
    unit = lookup(regions[0][0].tensor.dtype).unit
    units, size = sum(region.units for region, _ in regions), np.dtype(unit).itemsize
    check_names(coded, [_stream(i) for i in range(size)])
    planes = [exactly(coded, streams, _stream(i), (units, units)) for i in range(size)]
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
