"""`packed`: gaps between changed positions and steps in ulps, as byte streams for an entropy coder.

gap    position − previous position − 1, counted within a region. Its low `shift` bits go to `low` as they are (they are
       noise); the rest goes to `gaps` as one byte, 255 meaning "255 and more follows".
step   the distance in ulps, by a key that orders bit patterns as the numbers they stand for (and is a bijection, so ±0
       and NaN payloads survive). Zigzagged without zero (+1 → 0, −1 → 1, +2 → 2 …) and stored two to a byte in `steps`;
       15 means "15 more than the next value of `wide`".
wide   the large steps, as byte planes, lowest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from ..change import Change, Region, gather
from ..dtypes import Bits, lookup
from ..errors import CorruptStream, CountMismatch, PositionError
from .base import BaseBits, Before, Coded, CodedBlock, exactly

name = "packed"

_ESCAPE = 15
_OK, _RAN_OUT, _OUT_OF_RANGE, _LEFT_OVER, _BAD_STEP = range(5)


def encode(changes: Sequence[Change], before: Before) -> Coded:
    positions = np.concatenate([c.positions for c in changes])
    old = np.concatenate([c.old for c in changes])
    new = np.concatenate([c.new for c in changes])
    counts = np.array([c.count for c in changes], np.int64)
    covered = sum(c.region.units for c in changes)
    shift = _shift(covered, positions.size)
    gaps = np.empty(positions.size + (covered >> shift) // 255 + 1, np.uint8)
    low = np.zeros((positions.size * shift + 7) // 8 + 8, np.uint8)
    used = _write_gaps(positions, counts, shift, gaps, low)
    steps = np.zeros((positions.size + 1) // 2, np.uint8)
    wide = np.empty(positions.size, old.dtype)
    n_wide = _write_steps(old, new, _is_signed(changes[0].region), steps, wide)
    return Coded(
        {
            "gaps": gaps[:used].tobytes(),
            "low": low[: (positions.size * shift + 7) // 8].tobytes(),
            "steps": steps.tobytes(),
            "wide": _planes(wide[:n_wide]),
        },
        {"shift": shift},
    )


def decode(
    coded: CodedBlock, regions: Sequence[tuple[Region, int]], streams: dict[str, bytes], base: BaseBits
) -> list[Change]:
    counts = np.array([count for _, count in regions], np.int64)
    sizes = np.array([region.units for region, _ in regions], np.int64)
    total = int(counts.sum())
    shift = coded.parameters.get("shift", -1)
    if not 0 <= shift <= 24:
        raise CorruptStream(f"a gap shift of {shift} makes no sense")
    gaps = exactly(coded, streams, "gaps", (total, total + int(sizes.sum() >> shift) // 255 + 1))
    low_size = (total * shift + 7) // 8
    low = exactly(coded, streams, "low", (low_size, low_size))
    steps = exactly(coded, streams, "steps", ((total + 1) // 2, (total + 1) // 2))
    unit = lookup(regions[0][0].tensor.dtype).unit
    wide_size = np.dtype(unit).itemsize
    wide = _unplanes(exactly(coded, streams, "wide", (0, total * wide_size)), unit)

    positions = np.empty(total, np.uint32)
    _raise_for(_read_gaps(gaps, low, counts, sizes, shift, positions))
    result, start, used = [], 0, 0
    signed = _is_signed(regions[0][0])
    for region, count in regions:
        here = positions[start : start + count]
        old = gather(region, here, base(region.tensor.name))
        new = np.empty_like(old)
        status, used = _read_steps(steps, start, wide, used, old, signed, new)
        _raise_for(status)
        result.append(Change(region, here, old, new))
        start += count
    if used != wide.size:
        raise CountMismatch(f"stream 'wide' holds {wide.size} steps, {used} were used")
    return result


def _shift(covered: int, changed: int) -> int:
    """Leave the mean gap at about 32: below a byte, so few gaps escape; above noise, so little is left raw."""
    mean = covered // max(changed, 1)
    return min(max(mean.bit_length() - 6, 0), 24)


def _is_signed(region: Region) -> bool:
    return lookup(region.tensor.dtype).steps_are_signed


def _planes(values: Bits) -> bytes:
    planes: npt.NDArray[np.uint8] = values.view(np.uint8).reshape(values.size, values.itemsize).T
    return planes.tobytes()


def _unplanes(data: npt.NDArray[np.uint8], unit: type[np.unsignedinteger[Any]]) -> Bits:
    size = np.dtype(unit).itemsize
    if data.size % size:
        raise CountMismatch(f"stream 'wide' holds {data.size} bytes, not a whole number of {size}-byte steps")
    return np.ascontiguousarray(data.reshape(size, -1).T).view(unit).reshape(-1)


def _raise_for(status: int) -> None:
    if status == _RAN_OUT:
        raise CountMismatch("a packed stream ends before its count of changes")
    if status == _LEFT_OVER:
        raise CountMismatch("a packed stream goes on after its count of changes")
    if status == _OUT_OF_RANGE:
        raise PositionError("a changed position lies outside its region")
    if status == _BAD_STEP:
        raise CorruptStream("a step is wider than its dtype")


@njit(cache=True, nogil=True)
def _write_gaps(positions: Any, counts: Any, shift: int, gaps: Any, low: Any) -> int:
    n = 0
    i = 0
    bit = 0
    mask = (np.uint64(1) << np.uint64(shift)) - np.uint64(1)
    for count in counts:
        previous = np.int64(-1)
        for _ in range(count):
            position = np.int64(positions[i])
            gap = np.uint64(position - previous - 1)
            previous = position
            i += 1
            if shift:
                value = (gap & mask) << np.uint64(bit & 7)
                at = bit >> 3
                while value:
                    low[at] |= np.uint8(value & np.uint64(255))
                    value >>= np.uint64(8)
                    at += 1
                bit += shift
            high = gap >> np.uint64(shift)
            while high >= np.uint64(255):
                gaps[n] = 255
                n += 1
                high -= np.uint64(255)
            gaps[n] = np.uint8(high)
            n += 1
    return n


@njit(cache=True, nogil=True)
def _read_gaps(gaps: Any, low: Any, counts: Any, sizes: Any, shift: int, positions: Any) -> int:
    n = 0
    i = 0
    bit = 0
    mask = (np.uint64(1) << np.uint64(shift)) - np.uint64(1)
    for region in range(counts.size):
        position = np.int64(-1)
        size = sizes[region]
        for _ in range(counts[region]):
            high = np.int64(0)
            while True:
                if n >= gaps.size:
                    return _RAN_OUT
                byte = gaps[n]
                n += 1
                high += byte
                if byte != 255:
                    break
            gap = high << shift
            if shift:
                value = np.uint64(0)
                at = bit >> 3
                # a field of up to 24 bits spans at most 4 bytes
                for k in range(4):
                    if at + k < low.size:
                        value |= np.uint64(low[at + k]) << np.uint64(8 * k)
                gap |= np.int64((value >> np.uint64(bit & 7)) & mask)
                bit += shift
            position += gap + 1
            if position >= size:
                return _OUT_OF_RANGE
            positions[i] = position
            i += 1
    return _OK if n == gaps.size else _LEFT_OVER


@njit(cache=True, nogil=True)
def _write_steps(old: Any, new: Any, signed: bool, steps: Any, wide: Any) -> int:
    n_wide = 0
    width = old.itemsize * 8
    top = np.int64(1) << (width - 1)
    whole = np.int64(1) << width
    for i in range(old.size):
        a = np.int64(old[i])
        b = np.int64(new[i])
        if signed:
            a = whole - 1 - a if a >= top else a + top
            b = whole - 1 - b if b >= top else b + top
        step = b - a
        # the shorter way round: every step fits the dtype's width
        if step > top:
            step -= whole
        elif step <= -top:
            step += whole
        zigzag = 2 * step - 2 if step > 0 else -2 * step - 1
        if zigzag >= _ESCAPE:
            wide[n_wide] = zigzag - _ESCAPE
            n_wide += 1
            zigzag = np.int64(_ESCAPE)
        steps[i >> 1] |= np.uint8(zigzag << (4 * (i & 1)))
    return n_wide


@njit(cache=True, nogil=True)
def _read_steps(steps: Any, start: int, wide: Any, used: int, old: Any, signed: bool, new: Any) -> tuple[int, int]:
    width = old.itemsize * 8
    top = np.int64(1) << (width - 1)
    whole = np.int64(1) << width
    for i in range(old.size):
        k = start + i
        zigzag = np.int64((steps[k >> 1] >> (4 * (k & 1))) & 15)
        if zigzag == _ESCAPE:
            if used >= wide.size:
                return _RAN_OUT, used
            zigzag += np.int64(wide[used])
            used += 1
            if zigzag > whole - 2:
                return _BAD_STEP, used
        step = -((zigzag + 1) >> 1) if zigzag & 1 else (zigzag >> 1) + 1
        a = np.int64(old[i])
        if signed:
            a = whole - 1 - a if a >= top else a + top
        b = (a + step) & (whole - 1)
        if signed:
            b = b - top if b >= top else whole - 1 - b
        new[i] = b
    return _OK, used
