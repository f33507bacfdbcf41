"""Register tiles over quantised weights: integers become factors in registers, so that memory sees only few bits.

A panel holds 48 output features, group after group of in_features. A group is one block of bytes: the codes, then 48
scales, then 48 minima where the form has them. Codes come in steps of 8 in_features, that is 4 pairs:

* 4 bits: a step is 48 words of 32 bits, one for each feature. Bits 4 s of its halves hold the two codes of pair s.
* 8 bits: a step is 4 pairs x 3 vectors of 32 bytes: the first codes of 16 features, then their second ones.

The sum over a group is of the activations times the codes as they are, which bfloat16 holds exactly; the scale comes
once for each group. A nibble q, put into the mantissa of bfloat16 16.0, is 16 + q, at the price of a shift and a
logical operation for 32 weights. What is added so, and the minimum, are factors of the group's sum of activations.
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

from pagemill.kernels.cpu.isa import MULTIPLIES_PAIRS
from pagemill.kernels.cpu.matmul import _VECTORS, _multiply_floats, _multiply_pairs
from pagemill.kernels.cpu.simd import LANES, pair_halves, splat

VECTORS = _VECTORS
"""Vectors of 16 features that one tile takes: all 3 of a panel, or one where registers are few."""
MOST_PAIR_ROWS, MOST_FLOAT_ROWS = 8 if MULTIPLIES_PAIRS else 4, 4
"""Rows of a tile, for bfloat16 and for float32, which takes two registers for a pair of weights."""
PANEL = 3 * LANES
STEP = 8
"""in_features of a step of codes."""
_PAIRS = STEP // 2

_I8 = ir.IntType(8)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_VI8 = ir.VectorType(_I8, LANES)
_VI16 = ir.VectorType(_I16, LANES)
_VI32 = ir.VectorType(_I32, LANES)
_VF32 = ir.VectorType(_F32, LANES)

_OFFSET = 16.0  # the mantissa of bfloat16 16.0 has the nibble's four bits at 3 .. 6, its ulp being 1/8
_MANTISSA, _SIXTEENS = 0x00780078, 0x41804180


def step_bytes(bits: int) -> int:
    """Bytes of the codes of one step of a panel."""
    return PANEL * STEP * bits // 8


def _ints(value: int) -> Any:
    return ir.Constant(_VI32, [value] * LANES)


def _floats(value: float) -> Any:
    return ir.Constant(_VF32, [value] * LANES)


def _load(builder: Any, data: Any, place: Any, vector: Any) -> Any:
    pointer = builder.bitcast(builder.gep(data, [place]), vector.as_pointer())
    loaded = builder.load(pointer)
    loaded.align = 1
    return loaded


def _plus(builder: Any, value: Any, constant: int) -> Any:
    return builder.add(value, ir.Constant(_I64, constant))


def _nibble_pair(builder: Any, words: Any, pair: int) -> Any:
    """The bfloat16 pairs 16 + q of pair `pair` of a step."""
    shift = 4 * pair - 3
    moved = builder.lshr(words, _ints(shift)) if shift > 0 else builder.shl(words, _ints(-shift))
    return builder.or_(builder.and_(moved, _ints(_MANTISSA)), _ints(_SIXTEENS))


def _byte_halves(builder: Any, data: Any, place: Any) -> list[Any]:
    """The first and second codes of 16 features as float32."""
    found = []
    for half in range(2):
        codes = _load(builder, data, _plus(builder, place, half * LANES), _VI8)
        found.append(builder.sitofp(builder.sext(codes, _VI32), _VF32))
    return found


def _as_pair(builder: Any, low: Any, high: Any) -> Any:
    """Small integers in float32 as bfloat16 pairs, which hold them exactly: their lower half is all zeros."""
    return builder.or_(
        builder.bitcast(high, _VI32), builder.lshr(builder.bitcast(low, _VI32), ir.Constant(_VI32, [16] * LANES))
    )


def read_scales(builder: Any, data: Any, place: Any, half: bool) -> Any:
    """16 scales as float32. float16 is widened with integers, subnormal numbers too: where the processor does not
    convert it LLVM would call a library routine that is not there and abort."""
    if not half:
        return _load(builder, data, place, _VF32)
    bits = builder.zext(_load(builder, data, place, _VI16), _VI32)
    sign = builder.shl(builder.and_(bits, _ints(0x8000)), _ints(16))
    magnitude = builder.bitcast(builder.shl(builder.and_(bits, _ints(0x7FFF)), _ints(13)), _VF32)
    value = builder.bitcast(builder.fmul(magnitude, _floats(2.0**112)), _VI32)
    return builder.bitcast(builder.or_(value, sign), _VF32)


def _make_tile(rows: int) -> Callable[..., Any]:
    """c[r, n] = sum over k of x[r, k] * weight[n, k], for `rows` rows and VECTORS * 16 features of a panel.

    The intrinsic's arguments: x as stored, offset, row stride; the sums of x over each group float32, offset, row
    stride; bytes of the panels, offset of the panel's first block, first feature; groups, steps of a group, bytes of a
    block; a value of the form's types: int8 (8 bits) or uint8 (4 bits), uint16 (float16) or float32, and the latter
    again or a boolean for no minimum; c float32, offset, row stride.
    """

    @intrinsic
    def tile(
        typingctx: Any,
        x: Any,
        xo: Any,
        xstr: Any,
        sums: Any,
        so: Any,
        sstr: Any,
        w: Any,
        wo: Any,
        column: Any,
        groups: Any,
        steps: Any,
        block: Any,
        code: Any,
        scale: Any,
        minimum: Any,
        c: Any,
        co: Any,
        cstr: Any,
    ) -> Any:
        nibbles, half, has_minimum = code == types.uint8, scale == types.uint16, minimum != types.boolean
        stored_pairs = x.dtype == types.uint16
        pairs = stored_pairs and MULTIPLIES_PAIRS

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            x_off, x_stride, s_off, s_stride, w_off, first, n, per_group, size, c_off, c_stride = (
                args[i] for i in (1, 2, 4, 5, 7, 8, 9, 10, 11, 16, 17)
            )

            def data(index: int, element: Any) -> Any:
                array = context.make_array(sig.args[index])(context, builder, args[index])
                return builder.bitcast(array.data, element.as_pointer())

            def times(value: Any, constant: int) -> Any:
                return builder.mul(value, ir.Constant(_I64, constant))

            def row_start(offset: Any, stride: Any, row: int) -> Any:
                return builder.add(offset, times(stride, row))

            x_data = data(0, _I16 if stored_pairs else _F32)
            s_data, w_data, c_data = data(3, _F32), data(6, _I8), data(15, _F32)
            totals = [cgutils.alloca_once(builder, _VF32) for _ in range(rows * VECTORS)]
            partial = [cgutils.alloca_once(builder, _VF32) for _ in range(rows * VECTORS)]
            for pointer in totals:
                builder.store(_floats(0.0), pointer)
            x_starts = [row_start(x_off, x_stride, row) for row in range(rows)]
            s_starts = [row_start(s_off, s_stride, row) for row in range(rows)]

            def factors(row: int, at: Any) -> Any:
                """Two neighbouring activations in all lanes: as a pair, or apart as float32."""
                place = builder.gep(x_data, [builder.add(x_starts[row], at)])
                if stored_pairs:
                    word = builder.load(builder.bitcast(place, _I32.as_pointer()))
                    word.align = 2
                    return splat(builder, word) if pairs else pair_halves(builder, splat(builder, word))
                second = builder.gep(place, [ir.Constant(_I64, 1)])
                return tuple(splat(builder, builder.load(one)) for one in (place, second))

            def multiply_add(left: Any, right: Any, pointer: Any) -> None:
                total = builder.load(pointer)
                if pairs:
                    total = _multiply_pairs(builder, left, right, total)
                else:
                    for one, other in zip(left, right, strict=True):
                        total = _multiply_floats(builder, one, other, total)
                builder.store(total, pointer)

            def unpacked(base: Any, words: list[Any], pair: int, vector: int) -> Any:
                if nibbles:
                    word = _nibble_pair(builder, words[vector], pair)
                    return word if pairs else pair_halves(builder, word)
                place = _plus(builder, base, (pair * (PANEL // LANES) + vector) * 2 * LANES)
                low, high = _byte_halves(builder, w_data, builder.add(place, times(first, 2)))
                return _as_pair(builder, low, high) if pairs else (low, high)

            with cgutils.for_range(builder, n) as group:
                start = builder.add(w_off, builder.mul(group.index, size))
                group_sums = []
                for row in range(rows):
                    if nibbles or has_minimum:
                        value = builder.load(builder.gep(s_data, [builder.add(s_starts[row], group.index)]))
                        group_sums.append(splat(builder, value))
                    begin = _floats(0.0)
                    if nibbles:
                        begin = builder.fmul(group_sums[row], _floats(-_OFFSET if has_minimum else -_OFFSET - 8))
                    for vector in range(VECTORS):
                        builder.store(begin, partial[row * VECTORS + vector])
                with cgutils.for_range(builder, per_group) as step:
                    base = builder.add(start, times(step.index, step_bytes(4 if nibbles else 8)))
                    words = []
                    if nibbles:
                        for vector in range(VECTORS):
                            place = _plus(builder, builder.add(base, times(first, 4)), vector * 4 * LANES)
                            words.append(_load(builder, w_data, place, _VI32))
                    k = times(builder.add(builder.mul(group.index, per_group), step.index), STEP)
                    for pair in range(_PAIRS):
                        weights = [unpacked(base, words, pair, vector) for vector in range(VECTORS)]
                        for row in range(rows):
                            left = factors(row, _plus(builder, k, 2 * pair))
                            for vector in range(VECTORS):
                                multiply_add(left, weights[vector], partial[row * VECTORS + vector])
                width = 2 if half else 4
                scales_at = builder.add(start, times(per_group, step_bytes(4 if nibbles else 8)))
                scales_at = builder.add(scales_at, times(first, width))
                for vector in range(VECTORS):
                    place = _plus(builder, scales_at, vector * LANES * width)
                    scales = read_scales(builder, w_data, place, half)
                    if has_minimum:
                        minima = read_scales(builder, w_data, _plus(builder, place, PANEL * width), half)
                    for row in range(rows):
                        pointer = totals[row * VECTORS + vector]
                        total = builder.load(pointer)
                        if has_minimum:
                            total = _multiply_floats(builder, minima, group_sums[row], total)
                        total = _multiply_floats(builder, scales, builder.load(partial[row * VECTORS + vector]), total)
                        builder.store(total, pointer)
            for row in range(rows):
                at = row_start(c_off, c_stride, row)
                for vector in range(VECTORS):
                    place = builder.gep(c_data, [_plus(builder, at, vector * LANES)])
                    total = builder.load(totals[row * VECTORS + vector])
                    builder.store(total, builder.bitcast(place, _VF32.as_pointer())).align = 4
            return context.get_dummy_value()

        arguments = (
            x,
            xo,
            xstr,
            sums,
            so,
            sstr,
            w,
            wo,
            column,
            groups,
            steps,
            block,
            code,
            scale,
            minimum,
            c,
            co,
            cstr,
        )
        return types.void(*arguments), codegen

    return tile


tile1, tile2, tile4, tile8 = (_make_tile(rows) for rows in (1, 2, 4, 8))


@intrinsic
def scale_at(typingctx: Any, data: Any, place: Any, like: Any) -> Any:
    """One scale, at a byte of an array, as float32; of the type of `like`: uint16 (float16) or float32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array = context.make_array(sig.args[0])(context, builder, args[0]).data
        pointer = builder.gep(builder.bitcast(array, _I8.as_pointer()), [args[1]])
        if like != types.uint16:
            loaded = builder.load(builder.bitcast(pointer, _F32.as_pointer()))
            loaded.align = 1
            return loaded
        stored = builder.load(builder.bitcast(pointer, _I16.as_pointer()))
        stored.align = 1
        bits = builder.zext(stored, _I32)
        sign = builder.shl(builder.and_(bits, ir.Constant(_I32, 0x8000)), ir.Constant(_I32, 16))
        magnitude = builder.shl(builder.and_(bits, ir.Constant(_I32, 0x7FFF)), ir.Constant(_I32, 13))
        value = builder.fmul(builder.bitcast(magnitude, _F32), ir.Constant(_F32, 2.0**112))
        return builder.bitcast(builder.or_(builder.bitcast(value, _I32), sign), _F32)

    return types.float32(data, types.int64, like), codegen
