"""The state digest: 128 bits that say which version a set of weights is.

    digest = Σ over tensors, units   A(tensor, position >> 10) · B[position & 1023] · bits   (two lanes, mod 2^64)

A unit is 8 bits of a 1-byte dtype, 16 bits of any other; `position` is its index in the flattened tensor. A is a mixed
hash of the tensor's name and the block number, B a fixed table of 1024 random words.

* A sum does not care about order, so blocks, shards and threads add up in any layout.
* It is linear in the bits, so a delta moves it in O(changed): add A·B·(new − old) for each change.
* A and B depend on the position, so two swapped weights, rows or tensors change it.
* One multiply-add per unit and lane: recomputing it runs at about memory speed.

Collisions: an accident (a lost, doubled or misplaced update, a flipped bit) is a difference vector chosen independently
of the keys; it goes unseen only if its sum vanishes in both lanes. Differences divisible by 2^k lose k bits of a lane,
at worst 15 (all of them sign flips), so the chance is at most about 2^-98. It is a checksum, not a signature: a
writer to the bucket can make weights with a digest of its choice. So a digest says that there was no error, and a
signature (signing.py) who made the weights. With words that were drawn at random just now (`Words.drawn`), nobody can
make such weights: `verify` compares by these too.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from .compiled import njit
from .dtypes import Bits, read_only
from .scatter import place

BLOCK = 1024
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class StateDigest:
    """Identifies a set of weights by a sum over all their bits.

    A change of weights changes it by the change's own digest:

        after = before + change.digest()
        str(after) == run.manifest(41).digest
    """

    lane0: int = 0
    lane1: int = 0

    def __add__(self, other: StateDigest) -> StateDigest:
        return StateDigest((self.lane0 + other.lane0) & _MASK, (self.lane1 + other.lane1) & _MASK)

    def __sub__(self, other: StateDigest) -> StateDigest:
        return StateDigest((self.lane0 - other.lane0) & _MASK, (self.lane1 - other.lane1) & _MASK)

    def __str__(self) -> str:
        return f"{self.lane1:016x}{self.lane0:016x}"

    @classmethod
    def of_lanes(cls, lanes: Iterable[int]) -> StateDigest:
        """The digest of two sums, which may be signed."""
        lane0, lane1 = lanes
        return cls(int(lane0) & _MASK, int(lane1) & _MASK)

    @classmethod
    def parse(cls, text: str) -> StateDigest:
        """Return the digest that `str` wrote as 32 hex digits."""
        value = int(text, 16)
        return cls(value & _MASK, value >> 64)


class Words:
    """The factors of the sum: A and B, from a seed."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        found = np.frombuffer(blake3(seed + b" table").digest(length=BLOCK * 16), dtype="<u8")
        self.table: npt.NDArray[np.uint64] = found.astype(np.uint64).reshape(2, BLOCK)
        """B, for both lanes."""

    @classmethod
    def drawn(cls) -> Words:
        """Words that nobody could know before."""
        return cls(secrets.token_bytes(32))

    def keys(self, name: str) -> npt.NDArray[np.uint64]:
        """The two seeds from which a tensor's block keys A are mixed."""
        return np.frombuffer(blake3(self._seed + b"/" + name.encode()).digest(length=16), dtype="<u8").astype(np.uint64)


PUBLIC = Words(b"deltawire state digest")
"""The words of the state digest."""

TABLE, tensor_keys = PUBLIC.table, PUBLIC.keys


@njit(cache=True, nogil=True, inline="always")
def _mix(x: Any) -> Any:
    # splitmix64's finaliser: neighbouring block numbers get unrelated keys
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True)
def _dense(units: Any, start: int, keys: Any, table: Any, out: Any) -> None:
    n = units.size
    total0 = np.uint64(0)
    total1 = np.uint64(0)
    i = 0
    while i < n:
        block = (start + i) >> 10
        offset = (start + i) & 1023
        length = min(1024 - offset, n - i)
        # slices from zero: LLVM then sees plain loops and vectorises them
        here = units[i : i + length]
        b0 = table[0, offset : offset + length]
        b1 = table[1, offset : offset + length]
        sum0 = np.uint64(0)
        sum1 = np.uint64(0)
        for j in range(length):
            bits = np.uint64(here[j])
            sum0 += b0[j] * bits
            sum1 += b1[j] * bits
        total0 += _mix(keys[0] + np.uint64(block)) * sum0
        total1 += _mix(keys[1] + np.uint64(block)) * sum1
        i += length
    out[0] = total0
    out[1] = total1


@njit(cache=True, nogil=True)
def _rows(units: Any, start: int, stride: int, keys: Any, table: Any, out: Any) -> None:
    one = np.zeros(2, np.uint64)
    for row in range(units.shape[0]):
        _dense(units[row], start + row * stride, keys, table, one)
        out += one


@njit(cache=True, nogil=True)
def _sparse(
    positions: Any, old: Any, new: Any, base: int, width: int, stride: int, halves: bool, keys: Any, table: Any,
    out: Any,
) -> None:  # fmt: skip
    total0 = np.uint64(0)
    total1 = np.uint64(0)
    sum0 = np.uint64(0)
    sum1 = np.uint64(0)
    here = np.int64(0)
    for i in range(positions.size):
        flat = place(positions[i], base, width, stride)
        # a 4-byte unit is two 16-bit ones
        for half in range(2 if halves else 1):
            p = 2 * flat + half if halves else flat
            if p >> 10 != here:
                total0 += _mix(keys[0] + np.uint64(here)) * sum0
                total1 += _mix(keys[1] + np.uint64(here)) * sum1
                sum0 = sum1 = np.uint64(0)
                here = p >> 10
            if halves:
                difference = np.uint64((new[i] >> (16 * half)) & 0xFFFF) - np.uint64((old[i] >> (16 * half)) & 0xFFFF)
            else:
                difference = np.uint64(new[i]) - np.uint64(old[i])
            sum0 += table[0, p & 1023] * difference
            sum1 += table[1, p & 1023] * difference
    out[0] = total0 + _mix(keys[0] + np.uint64(here)) * sum0
    out[1] = total1 + _mix(keys[1] + np.uint64(here)) * sum1


def of_bits(name: str, bits: Bits, start: int = 0, words: Words = PUBLIC) -> StateDigest:
    """The digest of a run of a tensor's units; `start` is the position of its first unit in the flattened tensor."""
    out = np.zeros(2, np.uint64)
    if bits.itemsize == 4:
        bits, start = bits.view(np.uint16), 2 * start
    _dense(read_only(bits), start, words.keys(name), words.table, out)
    return StateDigest.of_lanes(out)


def of_rows(name: str, matrix: Bits, start: int, stride: int, words: Words = PUBLIC) -> StateDigest:
    """The digest of a rectangle: `start` is the position of its first unit, `stride` the tensor's columns."""
    if matrix.ndim == 2 and matrix.shape[1] == stride and matrix.flags.c_contiguous:
        return of_bits(name, matrix.reshape(-1), start, words)
    out = np.zeros(2, np.uint64)
    if matrix.itemsize == 4:
        matrix, start, stride = matrix.view(np.uint16), 2 * start, 2 * stride
    _rows(read_only(matrix), start, stride, words.keys(name), words.table, out)
    return StateDigest.of_lanes(out)


def of_change(
    name: str,
    positions: npt.NDArray[np.uint32],
    old: Bits,
    new: Bits,
    base: int,
    width: int,
    stride: int,
    words: Words = PUBLIC,
) -> StateDigest:
    """How the digest moves when `old` becomes `new` at these positions of a region with this `Region.geometry`."""
    out = np.zeros(2, np.uint64)
    _sparse(positions, old, new, base, width, stride, old.itemsize == 4, words.keys(name), words.table, out)
    return StateDigest.of_lanes(out)
