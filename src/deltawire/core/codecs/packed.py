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
from .base import BaseBits, Before, Coded, CodedBlock, check_names, exactly
from .ulps import take_steps, zigzags_of

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
    low = np.empty(_words(positions.size, shift), np.uint32)
    used = _write_gaps(positions, counts, shift, gaps, low)
    steps = np.empty((positions.size + 1) // 2, np.uint8)
    wide = np.empty(positions.size, old.dtype)
    n_wide = _write_steps(old, new, _is_signed(changes[0].region), steps, wide)
    return Coded(
        {
            "gaps": gaps[:used].tobytes(),
            "low": low.tobytes(),
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
    check_names(coded, ("gaps", "low", "steps", "wide"), ("shift",))
    shift = coded.parameters.get("shift", -1)
    if not 0 <= shift <= 24:
        raise CorruptStream(f"a gap shift of {shift} makes no sense")
    gaps = exactly(coded, streams, "gaps", (total, total + int(sizes.sum() >> shift) // 255 + 1))
    low_size = 4 * _words(total, shift)
    low = exactly(coded, streams, "low", (low_size, low_size)).view("<u4")
    zigzags = _zigzag_stream(coded, regions, streams)
    positions = np.empty(total, np.uint32)
    _raise_for(_read_gaps(gaps, low, counts, sizes, shift, positions))
    result, start = [], 0
    signed = _is_signed(regions[0][0])
    for region, count in regions:
        here = positions[start : start + count]
        old = gather(region, here, base(region.tensor.name))
        new = np.empty_like(old)
        take_steps(zigzags[start : start + count], old, signed, new)
        result.append(Change(region, here, old, new))
        start += count
    return result


def steps(coded: CodedBlock, regions: Sequence[tuple[Region, int]], streams: dict[str, bytes]) -> npt.NDArray[np.int64]:
    """How far each changed element moves, in ulps. In this encoding that can be read without the base version."""
    zigzags = _zigzag_stream(coded, regions, streams)[: sum(count for _, count in regions)].astype(np.int64)
    return np.where(zigzags & 1, -((zigzags + 1) >> 1), (zigzags >> 1) + 1)


def _zigzag_stream(
    coded: CodedBlock, regions: Sequence[tuple[Region, int]], streams: dict[str, bytes]
) -> npt.NDArray[np.uint32]:
    total = sum(count for _, count in regions)
    steps = exactly(coded, streams, "steps", ((total + 1) // 2, (total + 1) // 2))
    unit = lookup(regions[0][0].tensor.dtype).unit
    wide_size = np.dtype(unit).itemsize
    wide = _unplanes(exactly(coded, streams, "wide", (0, total * wide_size)), unit)
    zigzags = np.empty(steps.size * 2, np.uint32)
    _raise_for(_read_zigzags(steps, wide, total, 8 * wide_size, zigzags))
    return zigzags


def _shift(covered: int, changed: int) -> int:
    """Leave the mean gap below 128: most gaps then fit a byte. The bits below are noise and cost what they carry."""
    mean = covered // max(changed, 1)
    return min(max(mean.bit_length() - 7, 0), 24)


def _words(count: int, shift: int) -> int:
    """32-bit words that hold `count` fields of `shift` bits, and one more, so that a reader may always take two."""
    return (count * shift + 31) // 32 + 1 if shift else 0


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
    word = 0
    held = np.uint64(0)
    bits = 0
    mask = (np.int64(1) << shift) - 1
    for count in counts:
        previous = np.int64(-1)
        for position in positions[i : i + count]:
            gap = np.int64(position) - previous - 1
            previous = np.int64(position)
            high = gap >> shift
            while high >= 255:
                gaps[n] = 255
                n += 1
                high -= 255
            gaps[n] = high
            n += 1
            if shift:
                held |= np.uint64(gap & mask) << np.uint64(bits)
                bits += shift
                if bits >= 32:
                    low[word] = np.uint32(held & np.uint64(0xFFFFFFFF))
                    word += 1
                    held >>= np.uint64(32)
                    bits -= 32
        i += count
    while word < low.size:
        low[word] = np.uint32(held & np.uint64(0xFFFFFFFF))
        held = np.uint64(0)
        word += 1
    return n


@njit(cache=True, nogil=True)
def _read_gaps(gaps: Any, low: Any, counts: Any, sizes: Any, shift: int, positions: Any) -> int:
    n = 0
    i = 0
    bit = 0
    mask = (np.int64(1) << shift) - 1
    end = gaps.size
    for region in range(counts.size):
        position = np.int64(-1)
        size = sizes[region]
        for k in range(i, i + counts[region]):
            high = np.int64(0)
            byte = np.int64(255)
            while byte == 255:
                if n == end:
                    return _RAN_OUT
                byte = np.int64(gaps[n])
                n += 1
                high += byte
            gap = high << shift
            if shift:
                pair = np.uint64(low[bit >> 5]) | (np.uint64(low[(bit >> 5) + 1]) << np.uint64(32))
                gap |= np.int64(pair >> np.uint64(bit & 31)) & mask
                bit += shift
            position += gap + 1
            if position >= size:
                return _OUT_OF_RANGE
            positions[k] = position
        i += counts[region]
    return _OK if n == end else _LEFT_OVER


@njit(cache=True, nogil=True)
def _write_steps(old: Any, new: Any, signed: bool, steps: Any, wide: Any) -> int:
    n_wide = 0
    zigzags = np.empty(old.size + 1, np.uint32)
    zigzags_of(old, new, signed, zigzags)
    zigzags[old.size] = 0
    for i in range(old.size):
        if zigzags[i] >= _ESCAPE:
            wide[n_wide] = zigzags[i] - _ESCAPE
            n_wide += 1
            zigzags[i] = _ESCAPE
    for i in range(steps.size):
        steps[i] = zigzags[2 * i] | (zigzags[2 * i + 1] << 4)
    return n_wide


@njit(cache=True, nogil=True)
def _read_zigzags(steps: Any, wide: Any, count: int, width: int, zigzags: Any) -> int:
    for i in range(steps.size):
        zigzags[2 * i] = steps[i] & 15
        zigzags[2 * i + 1] = steps[i] >> 4
    used = 0
    most = (np.int64(1) << width) - 2
    for i in range(count):
        if zigzags[i] == _ESCAPE:
            if used == wide.size:
                return _RAN_OUT
            zigzag = np.int64(wide[used]) + _ESCAPE
            if zigzag > most:
                return _BAD_STEP
            zigzags[i] = zigzag
            used += 1
    if count < zigzags.size and zigzags[count] != 0:
        return _LEFT_OVER
    return _OK if used == wide.size else _LEFT_OVER
