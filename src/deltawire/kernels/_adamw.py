"""Triton kernel of one AdamW step that notes, as it writes, the old bits of what it changes in bf16."""

from __future__ import annotations

import triton
import triton.language as tl

from ._change import bit_count, round_to_bf16


@triton.jit
def element_pointer(pointers, tensor, which, offset, BF16: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a tile of one of a tensor's four arrays begins."""
    address = tl.load(pointers + tensor * 4 + which)
    if BF16:
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    else:
        pointer = address.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
        offset = tl.multiple_of(offset, 16)
    return pointer + offset


@triton.jit
def wire_bits(value, BF16: tl.constexpr):
    """The bits a parameter travels as."""
    if BF16:
        bits = value.to(tl.uint16, bitcast=True)
    else:
        bits = round_to_bf16(value.to(tl.uint32, bitcast=True))
    return bits


@triton.jit
def adamw_kernel(
    tiles, places, pointers, scalars, grad_scale, found_inf, seen, entries, used, late, room,
    BF16: tl.constexpr, LOG: tl.constexpr, SCALED: tl.constexpr, SKIPS: tl.constexpr, AGAIN: tl.constexpr,
    ALIGNED: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """WORDS · 32 elements of a tile. With AGAIN, only if they found no room in the log before."""
    per_tile: tl.constexpr = TILE // (32 * WORDS)
    tile = tl.load(tiles + tl.program_id(0) // per_tile)
    block = tl.program_id(0) % per_tile
    tensor = tl.load(places + 3 * tile)
    start = tl.load(places + 3 * tile + 1)
    width = tl.load(places + 3 * tile + 2).to(tl.int32)
    word = tl.arange(0, WORDS)
    lane = tl.arange(0, 32)
    at = block * (32 * WORDS) + word[:, None] * 32 + lane[None, :]
    go = tl.load(pointers + tensor * 4 + 1) != 0
    if SKIPS:
        go &= tl.load(found_inf) == 0
    if AGAIN:
        go &= tl.load(late + tile * per_tile + block) != 0
    # a bound and not `& go`: Triton's interpreter (3.9) cannot combine a vector and a scalar of one bit
    width = tl.where(go, width, 0)
    valid = at < width
    if ALIGNED:
        at = tl.multiple_of(tl.max_contiguous(at, [1, 8]), [1, 8])
        valid = tl.max_constancy(valid, [1, 8])
    p_start = element_pointer(pointers, tensor, 0, start, BF16, ALIGNED)
    p_at = p_start + at
    g_at = element_pointer(pointers, tensor, 1, start, BF16, ALIGNED) + at
    m_at = element_pointer(pointers, tensor, 2, start, BF16, ALIGNED) + at
    v_at = element_pointer(pointers, tensor, 3, start, BF16, ALIGNED) + at
    was = tl.load(p_at, mask=valid, other=0.0)
    g = tl.load(g_at, mask=valid, other=0.0).to(tl.float32)
    m = tl.load(m_at, mask=valid, other=0.0).to(tl.float32)
    v = tl.load(v_at, mask=valid, other=0.0).to(tl.float32)
    own = scalars + tensor * 7
    if SCALED:
        g = tl.div_rn(g, tl.load(grad_scale))
    g_out = g
    g = g * tl.load(own + 6)
    beta1, beta2 = tl.load(own + 1), tl.load(own + 2)
    # in the order and precision of torch's own kernel
    p = was.to(tl.float32)
    p = tl.fma(p, -tl.load(own), p)
    m = tl.fma(m, beta1, tl.fma(g, -beta1, g))
    square = g * g
    v = tl.fma(v, beta2, tl.fma(square, -beta2, square))
    denominator = tl.div_rn(tl.sqrt_rn(v), tl.load(own + 3)) + tl.load(own + 4)
    p = p - tl.div_rn(tl.load(own + 5) * m, denominator)

    if LOG:
        new = round_to_bf16(p.to(tl.uint32, bitcast=True))
        bit = (1 << lane).to(tl.uint32)[None, :]
        changed = tl.sum(tl.where((wire_bits(was, BF16) != new) & valid, bit, 0), 1)
        seen += tile.to(tl.int64) * (TILE // 32) + block * WORDS + word
        known = tl.load(seen)
        fresh = changed & ~known
        count = bit_count(fresh)
        total = tl.sum(count, 0)
        base = tl.atomic_add(used, total.to(tl.int64))
        fits = base + total <= room
        if fits:
            tl.store(seen, known | fresh, mask=fresh != 0)
            # few of 32 elements changed: walked bit by bit they cost little
            to = base + tl.cumsum(count, 0) - count
            rest = fresh
            first = block * (32 * WORDS) + word * 32
            for _ in range(tl.max(count, 0)):
                here = rest != 0
                position = first + bit_count((rest ^ (rest - 1)) >> 1)
                value = tl.load(p_start + position, mask=here, other=0.0)
                entry = (tile.to(tl.int64) << 32) | (position.to(tl.int64) << 16) | wire_bits(value, BF16).to(tl.int64)
                tl.store(entries + to, entry, mask=here)
                rest &= rest - 1
                to += 1
            # what was just read is overwritten next, by other threads
            tl.debug_barrier()
            if AGAIN:
                tl.store(late + tile * per_tile + block, 0)
        else:
            # nothing of it was written: the block is done once there is room
            tl.atomic_min(used + 1, base)
            tl.store(late + tile * per_tile + block, 1)
        valid = at < tl.where(fits, width, 0)
        if ALIGNED:
            valid = tl.max_constancy(valid, [1, 8])

    if BF16:
        tl.store(p_at, round_to_bf16(p.to(tl.uint32, bitcast=True)).to(tl.bfloat16, bitcast=True), mask=valid)
        tl.store(m_at, m.to(tl.bfloat16), mask=valid)
        tl.store(v_at, v.to(tl.bfloat16), mask=valid)
        if SCALED:
            tl.store(g_at, g_out.to(tl.bfloat16), mask=valid)
    else:
        tl.store(p_at, p, mask=valid)
        tl.store(m_at, m, mask=valid)
        tl.store(v_at, v, mask=valid)
        if SCALED:
            tl.store(g_at, g_out, mask=valid)


# a log of another length must not be compiled for
@triton.jit(do_not_specialize=["count"])
def gather_kernel(places, pointers, entries, count, out, BF16: tl.constexpr, BLOCK: tl.constexpr):
    """The bits, in bf16, that the elements of log entries have now."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < count
    entry = tl.load(entries + i, mask=here, other=0)
    tile = entry >> 32
    tensor = tl.load(places + 3 * tile)
    start = tl.load(places + 3 * tile + 1)
    at = element_pointer(pointers, tensor, 0, start + ((entry >> 16) & 0xFFFF), BF16, False)
    value = tl.load(at, mask=here, other=0.0)
    tl.store(out + i, wire_bits(value, BF16), mask=here)
