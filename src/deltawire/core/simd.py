"""Two vector idioms that numba has no name for, written as LLVM IR so that they run on any CPU LLVM knows.

With AVX-512 `difference_mask` is two compares and a move; on older machines LLVM lowers it to what there is.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as _intrinsic

LANES = 64

intrinsic: Any = _intrinsic


@intrinsic
def difference_mask(typingctx: Any, a: Any, b: Any, start: Any) -> Any:
    """Bit j is set where a[start + j] != b[start + j], for 64 elements. Bounds are the caller's care."""
    signature = types.uint64(a, b, types.intp)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = []
        for kind, value in zip(signature.args[:2], args[:2], strict=True):
            proxy: Any = cgutils.create_struct_proxy
            array = proxy(kind)(context, builder, value=value)
            element = context.get_value_type(kind.dtype)
            pointer = builder.gep(array.data, [args[2]])
            vector = ir.VectorType(element, LANES)
            loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()))
            loaded.align = kind.dtype.bitwidth // 8
            vectors.append(loaded)
        unequal = builder.icmp_unsigned("!=", *vectors)
        return builder.bitcast(unequal, ir.IntType(LANES))

    return signature, codegen


@intrinsic
def trailing_zeros(typingctx: Any, mask: Any) -> Any:
    """The number of the lowest set bit of a mask that is not zero."""
    signature = types.intp(types.uint64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return signature, codegen
