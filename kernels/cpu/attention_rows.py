"""What attention does to one row at a time: weights from scores, and joining what a row got from several segments.

A segment's part of a row is (m, l, o): the largest score, the sum of the weights 2^(s - m), and the sum of weighted
values. Parts join by the rule of the online softmax (Milakov and Gimelshein, arXiv 1805.02867). Scores come in units of
log 2, so that a weight is a power of two: an exponent and a short polynomial, on whole vectors.

All is written out as vector instructions, for callers that give no licence to reorder (`jit.exact_helper`), so that the
same row has the same bits from any of them.
"""

# llvmlite and numba ship no types, and `intrinsic` returns what numba makes of a function.
# mypy: disable-error-code="untyped-decorator, import-untyped, no-any-return"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.attention_tiles import SPAN, at, load, store
from pagemill.kernels.cpu.isa import LANES, MULTIPLIES_PAIRS, WIDE_REGISTERS, call, scale_by_power, to_bfloat
from pagemill.kernels.cpu.simd import splat

_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_VI32 = ir.VectorType(_I32, LANES)
_VF32 = ir.VectorType(_F32, LANES)
_LOWEST = ir.Constant(_VF32, [float("-inf")] * LANES)
_ZEROS = ir.Constant(_VF32, [0.0] * LANES)

# 2^r = 1 + r * polynomial, -0.5 <= r <= 0.5, least largest relative error: 8e-8 where weights stay float32, 3e-6 where
# they are rounded to bfloat16 (4e-3) or meet values that were.
_POWER = (
    0.6931472028550815,
    0.2402264791362654,
    0.055503324711003894,
    0.009618437357833149,
    0.0013398874422122667,
    0.00015353361883864737,
)
_SHORT_POWER = (0.6931241933916187, 0.24024098612932748, 0.05590642474190019, 0.009582852993826493)

# Adding it to a float32 below 2^22 rounds to an integer, which stands in the low bits then.
_ROUNDING = 12582912.0
_SMALLEST = -256.0 if WIDE_REGISTERS else -127.0  # a power that comes out as 0, as all below must


def _constant(value: float) -> Any:
    return ir.Constant(_VF32, [value] * LANES)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call(builder, f"llvm.fma.v{LANES}f32", _VF32, [a, b, c])


def _exp2(builder: Any, x: Any, coefficients: tuple[float, ...]) -> Any:
    """2^x of <16 x float> x <= 0; 0 far below -127, and NaN of NaN."""
    smallest = _constant(_SMALLEST)
    # The comparison is false for NaN, which so survives.
    clamped = builder.select(builder.fcmp_ordered("<", x, smallest), smallest, x)
    if WIDE_REGISTERS:
        whole = call(builder, f"llvm.roundeven.v{LANES}f32", _VF32, [clamped])
        return scale_by_power(builder, _power(builder, builder.fsub(clamped, whole), coefficients), whole)
    shifted = builder.fadd(clamped, _constant(_ROUNDING))
    rest = builder.fsub(clamped, builder.fsub(shifted, _constant(_ROUNDING)))
    exponent = builder.shl(builder.bitcast(shifted, _VI32), ir.Constant(_VI32, [23] * LANES))
    poly = _power(builder, rest, coefficients)
    power = builder.bitcast(builder.add(builder.bitcast(poly, _VI32), exponent), _VF32)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, power)


def _power(builder: Any, rest: Any, coefficients: tuple[float, ...]) -> Any:
    poly = _constant(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        poly = _fma(builder, poly, rest, _constant(coefficient))
    return _fma(builder, poly, rest, _constant(1.0))


def _take_larger(builder: Any, best: Any, value: Any) -> Any:
    """The larger of each lane; NaN in value is passed over."""
    return builder.select(builder.fcmp_ordered("<", best, value), value, best)


def _across(builder: Any, value: Any, join: Callable[[Any, Any], Any]) -> Any:
    """All 16 lanes joined, in every lane, always in the same order."""
    width = LANES // 2
    while width:
        order = ir.Constant(_VI32, [lane ^ width for lane in range(LANES)])
        value = join(value, builder.shuffle_vector(value, value, order))
        width //= 2
    return value


def _reference(builder: Any, largest: Any) -> Any:
    """What to subtract from scores: nothing where all are -inf, since -inf less -inf is no number."""
    return builder.select(builder.fcmp_ordered("==", largest, _LOWEST), _ZEROS, largest)


def _shift(builder: Any, value: Any, bits: int) -> Any:
    return builder.shl(value, ir.Constant(_I64, bits))


def _vectors(builder: Any, begin: Any, end: Any) -> tuple[Any, Any]:
    """The first vector of 16 with any of the tokens begin <= token < end, and the one behind the last."""
    four = ir.Constant(_I64, 4)
    return builder.lshr(begin, four), builder.lshr(builder.add(end, ir.Constant(_I64, 15)), four)


@intrinsic
def largest_score(typingctx: Any, scores: Any, begin: Any, end: Any, scale: Any, part: Any) -> Any:
    """Note the largest of a row's scores that it sees, begin <= token < end, at `part`, float32, times `scale`; both by
    address.

    The other scores of the vectors at both ends become -inf.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        row, low, high, factor, target = args
        first, last = _vectors(builder, low, high)
        best = cgutils.alloca_once_value(builder, _LOWEST)
        builder.store(_LOWEST, best)
        with builder.if_then(builder.icmp_signed("<", low, high)):
            for edge in (first, builder.sub(last, ir.Constant(_I64, 1))):
                place = at(builder, row, _shift(builder, edge, 6))
                start = splat(builder, builder.trunc(_shift(builder, edge, 4), _I32))
                token = builder.add(start, ir.Constant(_VI32, list(range(LANES))))
                seen = builder.and_(
                    builder.icmp_signed(">=", token, splat(builder, builder.trunc(low, _I32))),
                    builder.icmp_signed("<", token, splat(builder, builder.trunc(high, _I32))),
                )
                store(builder, builder.select(seen, load(builder, place, _VF32), _LOWEST), place)
            with cgutils.for_range(builder, builder.sub(last, first)) as loop:
                place = at(builder, row, _shift(builder, builder.add(first, loop.index), 6))
                builder.store(_take_larger(builder, builder.load(best), load(builder, place, _VF32)), best)
        largest = _across(builder, builder.load(best), lambda a, b: _take_larger(builder, a, b))
        store(builder, builder.fmul(builder.extract_element(largest, ir.Constant(_I32, 0)), factor), target)
        return context.get_dummy_value()

    return types.void(scores, begin, end, scale, part), codegen


@intrinsic
def weigh_row(typingctx: Any, scores: Any, begin: Any, end: Any, upto: Any, scale: Any, part: Any, like: Any) -> Any:
    """Turn a row's scores, times `scale`, into weights, in place, and note their sum l behind m at `part`. Memory by
    address.

    `largest_score` has been there. Weights of the other tokens below `upto`, rounded up to 16, are 0. They
    are bfloat16, half as long as the scores, where the processor multiplies these; the sum l is of the unrounded ones.
    """
    packed = like == types.uint16
    narrow = packed and MULTIPLIES_PAIRS
    coefficients = _SHORT_POWER if packed else _POWER

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        row, low, high, limit, factor, target, _ = args
        first, last = _vectors(builder, low, high)
        filled = _vectors(builder, low, limit)[1]
        size = 2 if narrow else 4
        empty = ir.Constant(ir.VectorType(_I16 if narrow else _I32, LANES), [0] * LANES)

        def clear(start: Any, stop: Any) -> None:
            with cgutils.for_range(builder, builder.sub(stop, start)) as loop:
                index = builder.mul(builder.add(start, loop.index), ir.Constant(_I64, size * LANES))
                store(builder, empty, at(builder, row, index))

        total = cgutils.alloca_once_value(builder, _ZEROS)
        builder.store(_ZEROS, total)
        reference = _reference(builder, splat(builder, load(builder, target, _F32)))
        against, factors = builder.fneg(reference), splat(builder, factor)
        sees = builder.icmp_signed("<", low, high)
        with builder.if_then(sees), cgutils.for_range(builder, builder.sub(last, first)) as loop:
            index = builder.add(first, loop.index)
            score = load(builder, at(builder, row, _shift(builder, index, 6)), _VF32)
            weight = _exp2(builder, _fma(builder, score, factors, against), coefficients)
            builder.store(builder.fadd(builder.load(total), weight), total)
            place = at(builder, row, builder.mul(index, ir.Constant(_I64, size * LANES)))
            store(builder, to_bfloat(builder, weight) if narrow else weight, place)
        # Only now: short weights lie over the scores of other tokens.
        clear(ir.Constant(_I64, 0), first)
        clear(last, filled)
        whole = _across(builder, builder.load(total), lambda a, b: builder.fadd(a, b))
        store(builder, builder.extract_element(whole, ir.Constant(_I32, 0)), at(builder, target, 4))
        return context.get_dummy_value()

    return types.void(scores, begin, end, upto, scale, part, like), codegen


@intrinsic
def join_row(typingctx: Any, into: Any, sums: Any, part: Any, more: Any, columns: Any) -> Any:
    """Join the part (m, l at `part`, o at `more`) to the one with m, l at `into` and o at `sums`, by address.

    columns: a multiple of 16. The parts of a row are joined in the order of their tokens.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        into_at, sums_at, part_at, more_at, count = args

        def spread(address: Any, offset: int) -> Any:
            return splat(builder, load(builder, at(builder, address, offset), _F32))

        before, other = spread(into_at, 0), spread(part_at, 0)
        largest = _take_larger(builder, before, other)
        reference = _reference(builder, largest)
        keep = _exp2(builder, builder.fsub(before, reference), _POWER)
        take = _exp2(builder, builder.fsub(other, reference), _POWER)

        def join(old: Any, new: Any) -> Any:
            return _fma(builder, new, take, builder.fmul(old, keep))

        total = join(spread(into_at, 4), spread(part_at, 4))
        zero = ir.Constant(_I32, 0)
        store(builder, builder.extract_element(largest, zero), into_at)
        store(builder, builder.extract_element(total, zero), at(builder, into_at, 4))
        with cgutils.for_range(builder, builder.lshr(count, ir.Constant(_I64, 4))) as loop:
            offset = _shift(builder, loop.index, 6)
            place = at(builder, sums_at, offset)
            added = load(builder, at(builder, more_at, offset), _VF32)
            store(builder, join(load(builder, place, _VF32), added), place)
        return context.get_dummy_value()

    return types.void(into, sums, part, more, columns), codegen


# Two vectors of woven columns back in order: of every 128 bits first the lower half, then the upper.
_UNWOVEN = [4 * part + i + half * LANES for part in range(4) for half in range(2) for i in range(4)]


@intrinsic
def finish_row(typingctx: Any, part: Any, sums: Any, dim: Any, out: Any, like: Any) -> Any:
    """Write o / l as `dim` stored elements at `out`; 0 where l is 0. m, l at `part`, o at `sums`; all by address."""
    packed = like == types.uint16

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        part_at, sums_at, count, target, _ = args
        total = splat(builder, load(builder, at(builder, part_at, 4), _F32))
        ratio = builder.fdiv(_constant(1.0), total)
        inverse = builder.select(builder.fcmp_ordered("==", total, _ZEROS), _ZEROS, ratio)
        size = 2 if packed else 4
        spans = builder.udiv(count, ir.Constant(_I64, SPAN))
        spill = cgutils.alloca_once(builder, ir.ArrayType(_I32, SPAN))
        spill_at = builder.ptrtoint(spill, _I64)

        def write(span: Any, place: Any) -> None:
            halves = []
            for vector in range(2):
                offset = builder.add(_shift(builder, span, 7), ir.Constant(_I64, 4 * LANES * vector))
                halves.append(builder.fmul(load(builder, at(builder, sums_at, offset), _VF32), inverse))
            if packed:
                orders = (_UNWOVEN[:LANES], _UNWOVEN[LANES:])
                halves = [builder.shuffle_vector(*halves, ir.Constant(_VI32, order)) for order in orders]
            for vector, value in enumerate(halves):
                stored = to_bfloat(builder, value) if packed else value
                store(builder, stored, at(builder, place, size * LANES * vector), 2 if packed else 4)

        with cgutils.for_range(builder, spans) as loop:
            write(loop.index, at(builder, target, builder.mul(loop.index, ir.Constant(_I64, size * SPAN))))
        rest = builder.sub(count, builder.mul(spans, ir.Constant(_I64, SPAN)))
        with builder.if_then(builder.icmp_signed(">", rest, ir.Constant(_I64, 0))):
            write(spans, spill_at)
            end = at(builder, target, builder.mul(spans, ir.Constant(_I64, size * SPAN)))
            pointers = [builder.inttoptr(end, _I16.as_pointer()), builder.bitcast(spill, _I16.as_pointer())]
            cgutils.raw_memcpy(builder, *pointers, rest, size)
        return context.get_dummy_value()

    return types.void(part, sums, dim, out, like), codegen


@intrinsic
def count_down(typingctx: Any, numbers: Any, index: Any) -> Any:
    """Take 1 from an entry of an int32 array, atomically; returns what is left. What was written before is seen by
    whoever sees the count."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        one = ir.Constant(_I32, 1)
        before = builder.atomic_rmw("sub", builder.gep(data, [args[1]]), one, "acq_rel")
        return builder.sub(before, one)

    return types.int32(numbers, types.int64), codegen
