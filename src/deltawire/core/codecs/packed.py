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

from ..change import BIT_STEPS, NUMBER_STEPS, Change, RegionMoves, Units, joined
from ..compiled import njit
from ..dtypes import lookup, read_only
from ..errors import CorruptStream, CountMismatch, PositionError
from ..simd import LANES, equal_mask, trailing_zeros
from ..ulps import zigzags_of
from .base import Before, BlockRecord, Coded, CountedRegions, check_names, exactly

name = "packed"

_ESCAPE = 15
_OK, _RAN_OUT, _OUT_OF_RANGE, _LEFT_OVER, _BAD_STEP = range(5)


def encode(changes: Sequence[Change], before: Before, units: Units | None = None) -> Coded:
    """`units` are those of the changes, where they are joined already."""
    positions, old, new = units or joined(changes)
    counts = np.array([c.count for c in changes], np.int64)
    covered = sum(c.region.units for c in changes)
    # leave the mean gap below 128: most gaps then fit a byte. The bits below are noise and cost what they carry
    shift = min(max((covered // max(positions.size, 1)).bit_length() - 7, 0), 24)
    gaps = np.empty(positions.size + (covered >> shift) // 255 + 1, np.uint8)
    low = np.empty(_words(positions.size, shift), np.uint32)
    steps = np.empty((positions.size + 1) // 2, np.uint8)
    wide = np.empty(positions.size, old.dtype)
    signed = lookup(changes[0].region.tensor.dtype).steps_are_signed
    used, n_wide = _write(positions, old, new, counts, shift, signed, gaps, low, steps, wide)
    return Coded(
        {
            "gaps": gaps[:used].tobytes(),
            "low": low.tobytes(),
            "steps": steps.tobytes(),
            "wide": wide[:n_wide].view(np.uint8).reshape(n_wide, wide.itemsize).T.tobytes(),
        },
        {"shift": shift},
    )


def moves(record: BlockRecord, regions: CountedRegions, streams: dict[str, bytes]) -> list[RegionMoves]:
    """Positions and steps of each region, checked."""
    counts = np.array([count for _, count in regions], np.int64)
    sizes = np.array([region.units for region, _ in regions], np.int64)
    total = int(counts.sum())
    check_names(record, ("gaps", "low", "steps", "wide"), ("shift",))
    shift = record.parameters.get("shift", -1)
    if not 0 <= shift <= 24:
        raise CorruptStream(f"a gap shift of {shift} makes no sense")
    gaps = exactly(record, streams, "gaps", (total, total + int(sizes.sum() >> shift) // 255 + 1))
    low_size = 4 * _words(total, shift)
    low = exactly(record, streams, "low", (low_size, low_size)).view("<u4")
    steps = exactly(record, streams, "steps", ((total + 1) // 2, (total + 1) // 2))
    dtype = lookup(regions[0][0].tensor.dtype)
    planes, size = exactly(record, streams, "wide", (0, total * dtype.unit_size)), dtype.unit_size
    if planes.size % size:
        raise CountMismatch(f"stream 'wide' holds {planes.size} bytes, not a whole number of {size}-byte steps")
    wide = np.ascontiguousarray(planes.reshape(size, -1).T).view(dtype.unit).reshape(-1)
    # of the unit's width: a step that does not fit was refused
    zigzags, nibbles = np.empty(total, dtype.unit), np.zeros(2 * steps.size + LANES, np.uint8)
    _raise_for(_read_zigzags(steps, read_only(wide), 8 * dtype.unit_size, nibbles, zigzags))
    positions = np.empty(total, np.uint32)
    _raise_for(_read_gaps(gaps, low, counts, sizes, shift, positions))
    kind = NUMBER_STEPS if dtype.steps_are_signed else BIT_STEPS
    ends = np.cumsum(counts).tolist()
    return [
        RegionMoves(region, positions[end - count : end], zigzags[end - count : end], kind)
        for (region, count), end in zip(regions, ends, strict=True)
    ]


def _words(count: int, shift: int) -> int:
    """32-bit words that hold `count` fields of `shift` bits, and one more, so that a reader may always take two."""
    return (count * shift + 31) // 32 + 1 if shift else 0


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
def _write(
    positions: Any, old: Any, new: Any, counts: Any, shift: int, signed: bool, gaps: Any, low: Any, steps: Any,
    wide: Any,
) -> Any:  # fmt: skip
    """All streams, and how much of `gaps` and `wide` is used. One call: each releases the interpreter's lock."""
    return _write_gaps(positions, counts, shift, gaps, low), _write_steps(old, new, signed, steps, wide)


@njit(cache=True, nogil=True)
def _write_gaps(positions: Any, counts: Any, shift: int, gaps: Any, low: Any) -> int:
    gaps[:] = 255
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
            # all gaps are 255 already; to skip them takes no branch
            high = np.uint64(gap >> shift)
            over = high // np.uint64(255)
            n += np.int64(over)
            gaps[n] = high - np.uint64(255) * over
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
    """A byte at a time, without a branch: where a gap ends is noise, and guessing it wrong costs more than the rest."""
    n = 0
    k = 0
    mask = (np.uint64(1) << np.uint64(shift)) - np.uint64(1)
    for region in range(counts.size):
        position = np.int64(-1)
        end = k + counts[region]
        while k < end:
            # so many bytes end at most so many gaps: no bounds to look at in between
            piece = min(end - k, gaps.size - n)
            if piece == 0:
                return _RAN_OUT
            for byte in gaps[n : n + piece]:
                ends = np.int64(byte != 255)
                rest = np.int64(0)
                if shift:
                    bit = np.uint64(k * shift)
                    word = bit >> np.uint64(5)
                    pair = np.uint64(low[word]) | (np.uint64(low[word + np.uint64(1)]) << np.uint64(32))
                    rest = np.int64((pair >> (bit & np.uint64(31))) & mask)
                position += (np.int64(byte) << shift) + ((rest + 1) & -ends)
                positions[np.uint64(k)] = position
                k += ends
            n += piece
        # they ascend: where the last is inside, all are
        if position >= sizes[region]:
            return _OUT_OF_RANGE
    return _OK if n == gaps.size else _LEFT_OVER


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
def _read_zigzags(steps: Any, wide: Any, width: int, nibbles: Any, zigzags: Any) -> int:
    """`nibbles` is given, not made here: it is read by its address (see simd)."""
    for i in range(steps.size):
        nibbles[2 * i] = steps[i] & 15
        nibbles[2 * i + 1] = steps[i] >> 4
    if nibbles[zigzags.size] != 0:
        return _LEFT_OVER
    for i in range(zigzags.size):
        zigzags[i] = nibbles[i]
    used = 0
    most = (np.int64(1) << width) - 2 - _ESCAPE
    start = np.int64(nibbles.ctypes.data)
    for i in range(0, zigzags.size, LANES):
        mask: Any = equal_mask(start + i, np.uint8(_ESCAPE))
        while mask != 0:
            if used == wide.size:
                return _RAN_OUT
            if wide[used] > most:
                return _BAD_STEP
            zigzags[i + trailing_zeros(mask)] += wide[used]
            used += 1
            mask &= mask - np.uint64(1)
    return _OK if used == wide.size else _LEFT_OVER
