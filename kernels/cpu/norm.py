"""The RMS norm of a row, summed in an order that is written down.

The same norm runs in several kernels, and wherever it is compiled into a row has to come out with the same bits. Loops
over a sum are vectorised in an order that depends on what surrounds them, so this one is spelled out.
"""

# llvmlite and numba ship no types, and `intrinsic` returns what numba makes of a function.
# mypy: disable-error-code="untyped-decorator, import-untyped, no-any-return"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.isa import LANES, call
from pagemill.kernels.cpu.jit import exact_helper
from pagemill.kernels.cpu.simd import narrow, splat, widen
from pagemill.kernels.cpu.stored import StoredArray

_CHAINS = 4  # of sums, to cover the latency of a fused multiply-add
_ONE = np.float32(1.0)
_I32 = ir.IntType(32)
_F32 = ir.FloatType()
_VF32 = ir.VectorType(_F32, LANES)


def _squares(builder: Any, size: Any, values: Callable[[Any], Any]) -> Any:
    """The sum of squares of values(0), values(16), ... as far as whole vectors go below size."""
    zeros = ir.Constant(_VF32, [0.0] * LANES)
    sums = [cgutils.alloca_once(builder, _VF32) for _ in range(_CHAINS)]
    for pointer in sums:  # not once for the function: it may stand in a loop
        builder.store(zeros, pointer)

    def add(index: Any, chain: int) -> None:
        value = values(index)
        total = call(builder, f"llvm.fma.v{LANES}f32", _VF32, [value, value, builder.load(sums[chain])])
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
        order = ir.Constant(ir.VectorType(_I32, LANES), [lane ^ width for lane in range(LANES)])
        total = builder.fadd(total, builder.shuffle_vector(total, total, order))
        width //= 2
    return builder.extract_element(total, ir.Constant(_I32, 0))


@intrinsic
def _sum_of_squares(typingctx: Any, x: Any) -> Any:
    """float32 sum over the whole vectors of 16 of an array [size] of stored elements; what is left is the caller's."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array = StoredArray(context, builder, sig.args[0], args[0])
        size = cgutils.unpack_tuple(builder, context.make_array(sig.args[0])(context, builder, args[0]).shape, 1)[0]
        return _squares(builder, size, array.load)

    return types.float32(x), codegen


@intrinsic
def _add_and_square(typingctx: Any, x: Any, residual: Any, total: Any) -> Any:
    """total = x + residual, and the sum of squares of total as stored; whole vectors only, as `_sum_of_squares`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        left, right, out = (StoredArray(context, builder, *pair) for pair in zip(sig.args, args, strict=True))
        size = cgutils.unpack_tuple(builder, context.make_array(sig.args[0])(context, builder, args[0]).shape, 1)[0]

        def add(index: Any) -> Any:
            value = builder.fadd(left.load(index), right.load(index))
            out.store(value, index)
            return value if sig.args[2].dtype == types.float32 else out.load(index)

        return _squares(builder, size, add)

    return types.float32(x, residual, total), codegen


@intrinsic
def _scale(typingctx: Any, x: Any, inverse: Any, weight: Any, out: Any) -> Any:
    """out = x * inverse * weight, whole vectors only."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kinds, values = [sig.args[i] for i in (0, 2, 3)], [args[i] for i in (0, 2, 3)]
        source, factors, target = (StoredArray(context, builder, *pair) for pair in zip(kinds, values, strict=True))
        size = cgutils.unpack_tuple(builder, context.make_array(kinds[0])(context, builder, args[0]).shape, 1)[0]
        lanes = ir.Constant(size.type, LANES)
        spread = splat(builder, args[1])
        with cgutils.for_range(builder, builder.sdiv(size, lanes)) as loop:
            index = builder.mul(loop.index, lanes)
            scaled = builder.fmul(source.load(index), spread)
            target.store(builder.fmul(scaled, factors.load(index)), index)
        return context.get_dummy_value()

    return types.void(x, types.float32, weight, out), codegen


@exact_helper
def _finish(x: Any, squares: Any, weight: Any, eps: Any, out: Any) -> None:
    size = x.shape[0]
    rest = size // LANES * LANES
    for i in range(rest, size):
        value = widen(x[i])
        squares += value * value
    inverse = _ONE / np.sqrt(squares / np.float32(size) + eps)
    _scale(x, inverse, weight, out)
    for i in range(rest, size):
        out[i] = narrow(widen(x[i]) * inverse * widen(weight[i]), out[i])


@exact_helper
def norm_row(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """x / sqrt(mean(x^2) + eps) * weight of a row [size] of stored elements; out may be x."""
    _finish(x, _sum_of_squares(x), weight, eps, out)


@exact_helper
def norm_sum_row(x: Any, residual: Any, weight: Any, eps: Any, out: Any, total: Any) -> None:
    """The same of x + residual as it is stored in total, whose elements and residual's may be of another type than
    those of x."""
    for i in range(x.shape[0] // LANES * LANES, x.shape[0]):
        total[i] = narrow(widen(x[i]) + widen(residual[i]), total[i])
    _finish(total, _add_and_square(x, residual, total), weight, eps, out)
