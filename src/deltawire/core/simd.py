"""Vector and bit idioms that numba has no name for, written as LLVM IR so that they run on any CPU LLVM knows.

Left to the auto-vectoriser the same loops ran four to eight times slower: numba widens bytes to 64 bits and must check
for overlap. With AVX-512 a mask is a compare and a move; on older machines LLVM lowers it to what there is.

Most take addresses and not arrays (an array argument costs two atomic reference counts a call). None checks bounds:
callers see to it that LANES elements lie behind every address. An address does not keep its array: numba frees one that
a kernel made itself after the last line that names it, so read by address only what came as an argument.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as _intrinsic

LANES = 64

intrinsic: Any = _intrinsic

LEAN: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "_nrt": False}
"""Options of `njit` for kernels that allocate nothing and hand arrays to functions of their own.

Numba counts references to every array such a function is given, two atomic operations each, and sees through that only
where there is no loop. Kernels that code changes one by one ran three times slower with it.
"""

_BIT, _BYTE, _WORD = ir.IntType(1), ir.IntType(8), ir.IntType(32)
_BYTES = ir.VectorType(_BYTE, LANES)


def _load(builder: Any, pointer: Any, element: Any) -> Any:
    """LANES elements from anywhere: rows of a tile begin where they begin."""
    value = builder.load(builder.bitcast(pointer, ir.VectorType(element, LANES).as_pointer()))
    value.align = 1
    return value


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _BYTE.as_pointer())


def _splat(builder: Any, scalar: Any, kind: Any) -> Any:
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, scalar, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(_WORD, LANES), [0] * LANES))


@intrinsic
def difference_mask(typingctx: Any, a: Any, b: Any, start: Any) -> Any:
    """Bit j is set where a[start + j] != b[start + j], for LANES elements of two arrays."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = []
        for kind, value in zip(signature.args[:2], args[:2], strict=True):
            proxy: Any = cgutils.create_struct_proxy
            array = proxy(kind)(context, builder, value=value)
            element = context.get_value_type(kind.dtype)
            vectors.append(_load(builder, builder.gep(array.data, [args[2]]), element))
        return builder.bitcast(builder.icmp_unsigned("!=", *vectors), ir.IntType(LANES))

    return types.uint64(a, b, types.intp), generate


@intrinsic
def equal_mask(typingctx: Any, address: Any, value: Any) -> Any:
    """Bit j is set where byte j at an address equals a value, for LANES bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = _load(builder, _pointer(builder, args[0]), _BYTE)
        equal = builder.icmp_unsigned("==", found, _splat(builder, args[1], _BYTES))
        return builder.bitcast(equal, ir.IntType(LANES))

    return types.uint64(types.uintp, types.uint8), generate


@intrinsic
def classify(
    typingctx: Any, source: Any, levels: Any, out: Any, shift: Any, mask: Any, low: Any, top: Any, offset: Any,
    row_level: Any, limit: Any,
) -> Any:  # fmt: skip
    """out[j] = min(limit, offset − clamp(source[j] >> shift & mask, low, top) + row_level + levels[j]), modulo 256.

    source, levels and out are addresses. `shift` has the type of source's elements; levels and out are bytes.
    """
    byte = types.uint8
    signature = types.void(types.uintp, types.uintp, types.uintp, shift, byte, byte, byte, byte, byte, byte)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from_, levels_, out_, shift_, *scalars = args
        mask_, low_, top_, offset_, level_, limit_ = (_splat(builder, scalar, _BYTES) for scalar in scalars)
        x = _load(builder, _pointer(builder, from_), shift_.type)
        x = builder.lshr(x, _splat(builder, shift_, x.type))
        x = builder.trunc(x, _BYTES) if shift_.type.width > 8 else x
        x = builder.and_(x, mask_)
        x = builder.select(builder.icmp_unsigned(">", x, low_), x, low_)
        x = builder.select(builder.icmp_unsigned("<", x, top_), x, top_)
        levels_ = _load(builder, _pointer(builder, levels_), _BYTE)
        x = builder.add(builder.sub(offset_, x), builder.add(level_, levels_))
        x = builder.select(builder.icmp_unsigned("<", x, limit_), x, limit_)
        stored = builder.store(x, builder.inttoptr(out_, _BYTES.as_pointer()))
        stored.align = 1
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at an address; harmless for any address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _WORD, _WORD, _WORD])
        function = builder.module.declare_intrinsic("llvm.prefetch", [_BYTE.as_pointer()], kind)
        hints = (ir.Constant(_WORD, value) for value in (0, 3, 1))
        builder.call(function, [_pointer(builder, args[0]), *hints])
        return context.get_dummy_value()

    return types.void(types.uintp), generate


@intrinsic
def popcount(typingctx: Any, mask: Any) -> Any:
    """How many bits of a uint64 are set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.intp(types.uint64), generate


@intrinsic
def trailing_zeros(typingctx: Any, mask: Any) -> Any:
    """The number of the lowest set bit of a uint64; 64 for zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(_BIT, 0))

    return types.intp(types.uint64), generate


@intrinsic
def leading_zeros(typingctx: Any, mask: Any) -> Any:
    """How many zero bits stand above the highest set one of a uint64; 64 for zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(_BIT, 0))

    return types.intp(types.uint64), generate
