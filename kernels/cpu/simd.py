"""Building blocks that numba cannot express: bfloat16, a vectorising exponential and whole vectors, as LLVM IR.

numba has no bfloat16 and promotes small integers to 64 bits, which keeps LLVM from vectorising conversions written by
hand; so they are emitted here. bfloat16 travels as uint16. All lanes past the end are masked: memory behind an array is
never touched, whatever it holds.
"""

# llvmlite and numba ship no types, and `intrinsic` returns what numba makes of a function.
# mypy: disable-error-code="untyped-decorator, import-untyped, no-any-return"

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.rng import PHILOX_M0, PHILOX_M1, PHILOX_ROUNDS, PHILOX_W0, PHILOX_W1

PHILOX_LANES = 8  # of 64 bits
LANES = 16  # of 32 bits: one AVX-512 register, two of AVX2, four of NEON

_I1 = ir.IntType(1)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_VI32 = ir.VectorType(_I32, LANES)
_VF32 = ir.VectorType(_F32, LANES)
_VI1 = ir.VectorType(_I1, LANES)
_PHILOX_VECTOR = ir.VectorType(_I64, PHILOX_LANES)
_PHILOX_WORD = ir.VectorType(_I32, PHILOX_LANES)


@intrinsic
def widen(typingctx: Any, x: Any) -> Any:
    """A stored element (bfloat16 as uint16, or float32) as float32."""
    if x == types.float32:
        return types.float32(x), lambda context, builder, sig, args: args[0]
    if x != types.uint16:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16)), _F32)

    return types.float32(x), codegen


@intrinsic
def narrow(typingctx: Any, x: Any, like: Any) -> Any:
    """float32 x in the type of the stored element `like`: bfloat16 rounds to nearest even, NaN stays NaN.

    Rounded with integers: without hardware support LLVM would call a library routine that is not there and abort.
    """
    if x != types.float32:
        return None
    if like == types.float32:
        return types.float32(x, like), lambda context, builder, sig, args: args[0]
    if like != types.uint16:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _I32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF)))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        quiet = builder.or_(bits, ir.Constant(_I32, 0x400000))
        return builder.trunc(builder.lshr(builder.select(is_nan, quiet, rounded), ir.Constant(_I32, 16)), _I16)

    return types.uint16(x, like), codegen


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


@intrinsic
def exp32(typingctx: Any, x: Any) -> Any:
    """exp of a float32, about one unit in the last place, without a branch; 0 below -87.3, infinite above 88.

    Cody-Waite reduction to [-ln 2 / 2, ln 2 / 2] and the polynomial of Cephes' expf.
    """
    if x != types.float32:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def constant(value: float) -> Any:
            return ir.Constant(_F32, value)

        def fma(a: Any, b: Any, c: Any) -> Any:
            return _call(builder, "llvm.fma.f32", _F32, [a, b, c])

        value = args[0]
        clamped = _call(builder, "llvm.minnum.f32", _F32, [value, constant(88.0)])
        clamped = _call(builder, "llvm.maxnum.f32", _F32, [clamped, constant(-87.3125)])
        power = _call(builder, "llvm.rint.f32", _F32, [builder.fmul(clamped, constant(1.4426950216293335))])
        rest = fma(power, constant(-0.693359375), clamped)
        rest = fma(power, constant(2.1219444170128554e-4), rest)
        poly = constant(1.98756910860538e-4)
        for coefficient in (
            1.39819993637501e-3,
            8.33345204591751e-3,
            4.16657887399197e-2,
            1.66666641831398e-1,
            5.00000119209290e-1,
        ):
            poly = fma(poly, rest, constant(coefficient))
        poly = fma(poly, builder.fmul(rest, rest), builder.fadd(rest, constant(1.0)))
        exponent = builder.shl(builder.fptosi(power, _I32), ir.Constant(_I32, 23))
        result = builder.bitcast(builder.add(builder.bitcast(poly, _I32), exponent), _F32)
        result = builder.select(builder.fcmp_ordered("<", value, constant(-87.3125)), constant(0.0), result)
        result = builder.select(builder.fcmp_ordered(">", value, constant(88.0)), constant(float("inf")), result)
        return builder.select(builder.fcmp_unordered("uno", value, value), value, result)

    return types.float32(x), codegen


def _data(context: Any, builder: Any, array_type: Any, value: Any, element: Any) -> Any:
    data = context.make_array(array_type)(context, builder, value).data
    return builder.bitcast(data, element.as_pointer())


def splat(builder: Any, scalar: Any) -> Any:
    """A scalar in all 16 lanes."""
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(_VI32, [0] * LANES))


def _lane_mask(builder: Any, count: Any) -> Any:
    """Lanes below count."""
    counts = splat(builder, builder.trunc(count, _I32))
    return builder.icmp_signed("<", ir.Constant(_VI32, list(range(LANES))), counts)


def _load(builder: Any, pointer: Any, vector: Any, mask: Any | None) -> Any:
    pointer = builder.bitcast(pointer, vector.as_pointer())
    if mask is None:
        loaded = builder.load(pointer)
        loaded.align = 4
        return loaded
    name = f"llvm.masked.load.v{LANES}{'f32' if vector.element is _F32 else 'i32'}.p0"
    zero = ir.Constant(vector, [0] * LANES)
    return _call(builder, name, vector, [pointer, ir.Constant(_I32, 4), mask, zero])


def _store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer())).align = 4


def pair_halves(builder: Any, words: Any) -> tuple[Any, Any]:
    """The two bfloat16 of each 32-bit word as float32: the low one, which lies first in memory, and the high one."""
    low = builder.shl(words, ir.Constant(_VI32, [16] * LANES))
    high = builder.and_(words, ir.Constant(_VI32, [0xFFFF0000] * LANES))
    return builder.bitcast(low, _VF32), builder.bitcast(high, _VF32)


@intrinsic
def row_max(typingctx: Any, a: Any, offset: Any, count: Any) -> Any:
    """The largest of count > 0 float32 from an offset of an array; NaN where any of them is."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = _data(context, builder, sig.args[0], args[0], _F32)
        lowest = ir.Constant(_VF32, [float("-inf")] * LANES)
        best = cgutils.alloca_once_value(builder, lowest)
        bad = cgutils.alloca_once_value(builder, ir.Constant(_VI1, [False] * LANES))
        lanes = ir.Constant(args[2].type, LANES)
        with cgutils.for_range(builder, builder.sdiv(args[2], lanes)) as loop:
            place = builder.add(args[1], builder.mul(loop.index, lanes))
            _take_max(builder, _load(builder, builder.gep(data, [place]), _VF32, None), best, bad)
        rest = builder.srem(args[2], lanes)
        mask = _lane_mask(builder, rest)
        place = builder.add(args[1], builder.sub(args[2], rest))
        tail = builder.select(mask, _load(builder, builder.gep(data, [place]), _VF32, mask), lowest)
        _take_max(builder, tail, best, bad)
        largest = _call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", _F32, [builder.load(best)])
        any_bad = _call(builder, f"llvm.vector.reduce.or.v{LANES}i1", _I1, [builder.load(bad)])
        return builder.select(any_bad, ir.Constant(_F32, float("nan")), largest)

    return types.float32(a, offset, count), codegen


def _take_max(builder: Any, values: Any, best: Any, bad: Any) -> None:
    builder.store(_call(builder, f"llvm.maxnum.v{LANES}f32", _VF32, [builder.load(best), values]), best)
    builder.store(builder.or_(builder.load(bad), builder.fcmp_unordered("uno", values, values)), bad)


@intrinsic
def keep_between(typingctx: Any, a: Any, offset: Any, count: Any, low: Any, high: Any, out: Any, kept: Any) -> Any:
    """Append the values of a[offset : offset + count] with low <= value < high to out, of which `kept` are used.

    Arrays of float32; returns how many of out are used then. Up to 15 entries behind them are overwritten.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = _data(context, builder, sig.args[0], args[0], _F32)
        target = _data(context, builder, sig.args[5], args[5], _F32)
        lows, highs = splat(builder, args[3]), splat(builder, args[4])
        end = cgutils.alloca_once_value(builder, args[6])
        lanes = ir.Constant(_I64, LANES)

        def append(place: Any, mask: Any | None) -> None:
            values = _load(builder, builder.gep(data, [place]), _VF32, mask)
            keep = builder.and_(builder.fcmp_ordered(">=", values, lows), builder.fcmp_ordered("<", values, highs))
            if mask is not None:
                keep = builder.and_(keep, mask)
            name = f"llvm.experimental.vector.compress.v{LANES}f32"
            packed = _call(builder, name, _VF32, [values, keep, ir.Constant(_VF32, ir.Undefined)])
            at = builder.load(end)
            _store(builder, packed, builder.gep(target, [at]))
            number = _call(builder, f"llvm.ctpop.i{LANES}", _I16, [builder.bitcast(keep, _I16)])
            builder.store(builder.add(at, builder.zext(number, _I64)), end)

        with cgutils.for_range(builder, builder.sdiv(args[2], lanes)) as loop:
            append(builder.add(args[1], builder.mul(loop.index, lanes)), None)
        rest = builder.srem(args[2], lanes)
        append(builder.add(args[1], builder.sub(args[2], rest)), _lane_mask(builder, rest))
        return builder.load(end)

    return types.int64(a, types.int64, types.int64, types.float32, types.float32, out, types.int64), codegen


@intrinsic
def float_of_rank(typingctx: Any, rank: Any) -> Any:
    """The float32 at a place of their order: an int64 in [-2^31, 2^31) that grows with the float. NaN at both ends."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        low = builder.trunc(args[0], _I32)
        flip = builder.and_(builder.ashr(low, ir.Constant(_I32, 31)), ir.Constant(_I32, 0x7FFFFFFF))
        return builder.bitcast(builder.xor(low, flip), _F32)

    return types.float32(types.int64), codegen


@intrinsic
def rank_of_float(typingctx: Any, x: Any) -> Any:
    """The inverse of `float_of_rank`, but that -0 has the place of 0, since it is no less in comparisons."""
    if x != types.float32:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        is_zero = builder.fcmp_ordered("==", args[0], ir.Constant(_F32, 0.0))
        bits = builder.select(is_zero, ir.Constant(_I32, 0), builder.bitcast(args[0], _I32))
        flip = builder.and_(builder.ashr(bits, ir.Constant(_I32, 31)), ir.Constant(_I32, 0x7FFFFFFF))
        return builder.sext(builder.xor(bits, flip), _I64)

    return types.int64(x), codegen


def _spread(builder: Any, scalar: Any) -> Any:
    """A 64-bit scalar in all lanes of Philox."""
    undefined = ir.Constant(_PHILOX_VECTOR, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(_I32, PHILOX_LANES), [0] * PHILOX_LANES))


def _philox(builder: Any, first: Any, key: Sequence[Any]) -> list[Any]:
    """Philox4x32-10 of the 8 counters (first + i, c1, c2, c3) under (k0, k1), key = (c1, c2, c3, k0, k1), 64-bit each.

    Returns its four words, <8 x i32>; the twin of `kernels.rng.philox`.
    """

    def constant(value: int) -> Any:
        return ir.Constant(_PHILOX_VECTOR, [value] * PHILOX_LANES)

    low, shift = constant(0xFFFFFFFF), constant(32)
    x0 = builder.add(_spread(builder, first), ir.Constant(_PHILOX_VECTOR, list(range(PHILOX_LANES))))
    x1, x2, x3 = (_spread(builder, word) for word in key[:3])
    key0, key1 = key[3:]
    for _ in range(PHILOX_ROUNDS):
        product0 = builder.mul(builder.and_(x0, low), constant(PHILOX_M0))
        product1 = builder.mul(builder.and_(x2, low), constant(PHILOX_M1))
        x0 = builder.xor(builder.xor(builder.lshr(product1, shift), x1), _spread(builder, key0))
        x2 = builder.xor(builder.xor(builder.lshr(product0, shift), x3), _spread(builder, key1))
        x1, x3 = product1, product0  # their high halves are dropped by the next `and`, or at the end
        key0 = builder.and_(builder.add(key0, ir.Constant(_I64, PHILOX_W0)), ir.Constant(_I64, 0xFFFFFFFF))
        key1 = builder.and_(builder.add(key1, ir.Constant(_I64, PHILOX_W1)), ir.Constant(_I64, 0xFFFFFFFF))
    return [builder.trunc(word, _PHILOX_WORD) for word in (x0, x1, x2, x3)]


@intrinsic
def philox_block(typingctx: Any, out: Any, offset: Any, first: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """The words of the 8 counters from (first, c1, c2, c3) under (k0, k1), one counter's after the other's.

    They go to out[offset : offset + 32], uint32. All arguments but out are 64-bit.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = _data(context, builder, sig.args[0], args[0], _I32)
        words = _philox(builder, args[2], args[3:])
        pairs = [builder.shuffle_vector(*words[i : i + 2], _lanes(range(2 * PHILOX_LANES))) for i in (0, 2)]
        order = [word * PHILOX_LANES + lane for lane in range(PHILOX_LANES) for word in range(4)]
        _store(builder, builder.shuffle_vector(*pairs, _lanes(order)), builder.gep(data, [args[1]]))
        return context.get_dummy_value()

    return types.void(out, offset, first, c1, c2, c3, k0, k1), codegen


@intrinsic
def philox_max(typingctx: Any, first: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """The largest word, uint32, of the 16 counters from (first, c1, c2, c3) under (k0, k1). Nothing is stored."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        second = builder.add(args[0], ir.Constant(_I64, PHILOX_LANES))
        best, *words = [word for start in (args[0], second) for word in _philox(builder, start, args[1:])]
        for word in words:
            best = _call(builder, f"llvm.umax.v{PHILOX_LANES}i32", _PHILOX_WORD, [best, word])
        return _call(builder, f"llvm.vector.reduce.umax.v{PHILOX_LANES}i32", _I32, [best])

    return types.uint32(first, c1, c2, c3, k0, k1), codegen


def _lanes(order: Iterable[int]) -> Any:
    indices = list(order)
    return ir.Constant(ir.VectorType(_I32, len(indices)), indices)


@intrinsic
def next_item(typingctx: Any, counter: Any) -> Any:
    """Take the next number from a shared int64 counter array of one entry, atomically."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", data, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), codegen


@intrinsic
def fetch_to_write(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at an address, to be written."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        signature = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
        builder.call(function, [pointer, *(ir.Constant(_I32, value) for value in (1, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.int64), codegen
