"""The RMS norm of a row, summed in an order that is written down.

The same norm runs in several kernels, and wherever it is compiled into a row has to come out with the same bits. Loops
over a sum are vectorised in an order that depends on what surrounds them, so this one is spelled out.
"""

# llvmlite and numba ship no types, and `intrinsic` returns what numba makes of a function.
# mypy: disable-error-code="untyped-decorator, import-untyped, no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.isa import LANES, call
from pagemill.kernels.cpu.jit import exact_helper
from pagemill.kernels.cpu.simd import narrow, widen

_CHAINS = 4  # of sums, to cover the latency of a fused multiply-add
_ONE = np.float32(1.0)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_F32 = ir.FloatType()
_VF32 = ir.VectorType(_F32, LANES)
_VI32 = ir.VectorType(_I32, LANES)


@intrinsic
def _sum_of_squares(typingctx: Any, x: Any) -> Any:
    """float32 sum over the whole vectors of 16 of an array [size] of stored elements; what is left is the caller's."""
    packed = x.dtype == types.uint16
    element = _I16 if packed else _F32

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array = context.make_array(sig.args[0])(context, builder, args[0])
        data = builder.bitcast(array.data, element.as_pointer())
        size = cgutils.unpack_tuple(builder, array.shape, 1)[0]
        zeros = ir.Constant(_VF32, [0.0] * LANES)
        sums = [cgutils.alloca_once(builder, _VF32) for _ in range(_CHAINS)]
        for pointer in sums:  # not once for the function: it may stand in a loop
            builder.store(zeros, pointer)

        def add(index: Any, chain: int) -> None:
            place = builder.bitcast(builder.gep(data, [index]), ir.VectorType(element, LANES).as_pointer())
            values = builder.load(place)
            values.align = 2 if packed else 4
            if packed:
                wide = builder.shl(builder.zext(values, _VI32), ir.Constant(_VI32, [16] * LANES))
                values = builder.bitcast(wide, _VF32)
            total = call(builder, f"llvm.fma.v{LANES}f32", _VF32, [values, values, builder.load(sums[chain])])
            builder.store(total, sums[chain])

        at_once = ir.Constant(size.type, _CHAINS * LANES)
        with cgutils.for_range(builder, builder.sdiv(size, at_once)) as loop:
            start = builder.mul(loop.index, at_once)
            for chain in range(_CHAINS):
                add(builder.add(start, ir.Constant(size.type, chain * LANES)), chain)
        lanes = ir.Constant(size.type, LANES)
        rest = builder.srem(size, at_once)
        with cgutils.for_range(builder, builder.sdiv(rest, lanes)) as loop:
            add(builder.add(builder.sub(size, rest), builder.mul(loop.index, lanes)), 0)
        first, second, third, fourth = (builder.load(pointer) for pointer in sums)
        total = builder.fadd(builder.fadd(first, second), builder.fadd(third, fourth))
        width = LANES // 2
        while width:
            order = ir.Constant(_VI32, [lane ^ width for lane in range(LANES)])
            total = builder.fadd(total, builder.shuffle_vector(total, total, order))
            width //= 2
        return builder.extract_element(total, ir.Constant(_I32, 0))

    return types.float32(x), codegen


@exact_helper
def norm_row(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """x / sqrt(mean(x^2) + eps) * weight of a row [size] of stored elements; out may be x."""
    size = x.shape[0]
    squares = _sum_of_squares(x)
    for i in range(size // LANES * LANES, size):
        value = widen(x[i])
        squares += value * value
    inverse = _ONE / np.sqrt(squares / np.float32(size) + eps)
    for i in range(size):
        out[i] = narrow(widen(x[i]) * inverse * widen(weight[i]), out[i])


@exact_helper
def norm_sum_row(x: Any, residual: Any, weight: Any, eps: Any, out: Any, total: Any) -> None:
    """The same of x + residual as it is stored in total, whose elements and residual's may be of another type than
    those of x."""
    for i in range(x.shape[0]):
        total[i] = narrow(widen(x[i]) + widen(residual[i]), total[i])
    size = x.shape[0]
    squares = _sum_of_squares(total)
    for i in range(size // LANES * LANES, size):
        value = widen(total[i])
        squares += value * value
    inverse = _ONE / np.sqrt(squares / np.float32(size) + eps)
    for i in range(size):
        out[i] = narrow(widen(total[i]) * inverse * widen(weight[i]), out[i])
