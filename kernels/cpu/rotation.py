"""The rotary embedding of a token's heads, in place (Su et al., arXiv 2104.09864; halves paired as in Llama)."""

# llvmlite and numba ship no types, and `intrinsic` returns what numba makes of a function.
# mypy: disable-error-code="untyped-decorator, import-untyped, no-any-return"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.isa import LANES
from pagemill.kernels.cpu.jit import exact_helper
from pagemill.kernels.cpu.simd import narrow, widen
from pagemill.kernels.cpu.stored import StoredArray


@intrinsic
def _rotate_vectors(typingctx: Any, heads: Any, start: Any, count: Any, cos: Any, sin: Any) -> Any:
    """Rotate the whole vectors of 16 of `count` heads, whose halves are as long as cos and sin, from an element on."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        rows, *factors = (StoredArray(context, builder, sig.args[i], args[i]) for i in (0, 3, 4))
        half = cgutils.unpack_tuple(builder, context.make_array(sig.args[3])(context, builder, args[3]).shape, 1)[0]
        lanes = ir.Constant(half.type, LANES)
        with cgutils.for_range(builder, builder.sdiv(half, lanes)) as vector:
            column = builder.mul(vector.index, lanes)
            cosines, sines = (array.load(column) for array in factors)
            with cgutils.for_range(builder, args[2]) as head:
                width = builder.mul(half, ir.Constant(half.type, 2))
                place = builder.add(builder.add(args[1], builder.mul(head.index, width)), column)
                beside = builder.add(place, half)
                left, right = rows.load(place), rows.load(beside)
                first = builder.fsub(builder.fmul(left, cosines), builder.fmul(right, sines))
                second = builder.fadd(builder.fmul(right, cosines), builder.fmul(left, sines))
                rows.store(first, place)
                rows.store(second, beside)
        return context.get_dummy_value()

    return types.void(heads, types.int64, types.int64, cos, sin), codegen


@exact_helper
def rotate(heads: Any, start: int, count: int, cos_sin: Any, position: int) -> None:
    """Rotate `count` heads that lie one after the other from an element of heads on, by cos_sin [longest, dim]."""
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[position, :half], cos_sin[position, half:]
    _rotate_vectors(heads, start, count, cos, sin)
    for head in range(count):
        base = start + head * 2 * half
        for i in range(half // LANES * LANES, half):
            first, second = widen(heads[base + i]), widen(heads[base + half + i])
            heads[base + i] = narrow(first * cos[i] - second * sin[i], heads[base])
            heads[base + half + i] = narrow(second * cos[i] + first * sin[i], heads[base])
