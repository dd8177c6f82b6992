"""Triton helpers for steps: distances between bit patterns in the order of the numbers they stand for."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_key(bits, is_float, UNIT: tl.constexpr):
    """Bits of a float as an integer that orders as the float does; the bits themselves where there is no float."""
    sign: tl.constexpr = 1 << (8 * UNIT - 1)
    every: tl.constexpr = (1 << (8 * UNIT)) - 1
    return tl.where(is_float, tl.where((bits & sign) != 0, bits ^ every, bits | sign), bits)


@triton.jit
def from_key(key, is_float, UNIT: tl.constexpr):
    sign: tl.constexpr = 1 << (8 * UNIT - 1)
    every: tl.constexpr = (1 << (8 * UNIT)) - 1
    return tl.where(is_float, tl.where((key & sign) != 0, key ^ sign, key ^ every), key)


@triton.jit
def step_between(old, new, is_float, UNIT: tl.constexpr):
    """The (wrapped) step from old to new as the core zigzags it: +1 → 0, −1 → 1, +2 → 2 …

    That is the usual zigzag, less one, of the way back; half the range counts as a step up in both.
    """
    sign: tl.constexpr = 1 << (8 * UNIT - 1)
    every: tl.constexpr = (1 << (8 * UNIT)) - 1
    step = to_key(old, is_float, UNIT) - to_key(new, is_float, UNIT)
    return (((step << 1) ^ tl.where((step & sign) != 0, every, 0)) & every) - 1


@triton.jit
def take_step(old, step, is_float, UNIT: tl.constexpr):
    every: tl.constexpr = (1 << (8 * UNIT)) - 1
    zigzag = step + 1
    step = (zigzag >> 1) ^ tl.where((zigzag & 1) != 0, every, 0)
    return from_key((to_key(old, is_float, UNIT) - step) & every, is_float, UNIT)
