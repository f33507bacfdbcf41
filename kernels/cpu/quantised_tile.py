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
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.isa import MULTIPLIES_PAIRS
from pagemill.kernels.cpu.matmul import PANEL, TILE_VECTORS, multiply_floats, multiply_pairs
from pagemill.kernels.cpu.simd import LANES, pair_halves, splat

VECTORS = TILE_VECTORS
"""Vectors of 16 features that one tile takes: all 3 of a panel, or one where registers are few."""
MOST_PAIR_ROWS, MOST_FLOAT_ROWS = 8 if MULTIPLIES_PAIRS else 4, 4
"""Rows of a tile, for bfloat16 and for float32, which takes two registers for a pair of weights."""
STEP = 8
"""in_features of a step of codes."""
_PAIRS = STEP // 2

_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_VI8 = ir.VectorType(ir.IntType(8), LANES)
_VI16 = ir.VectorType(_I16, LANES)
_VI32 = ir.VectorType(_I32, LANES)
_VF32 = ir.VectorType(_F32, LANES)

_OFFSET = 16.0  # the mantissa of bfloat16 16.0 has the nibble's four bits at 3 .. 6, its ulp being 1/8
_MANTISSA, _SIXTEENS = 0x00780078, 0x41804180


def _ints(value: int) -> Any:
    return ir.Constant(_VI32, [value] * LANES)


def _floats(value: float) -> Any:
    return ir.Constant(_VF32, [value] * LANES)


def _load(builder: Any, address: Any, kind: Any) -> Any:
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = 1
    return loaded


def _plus(builder: Any, value: Any, constant: int) -> Any:
    return builder.add(value, ir.Constant(_I64, constant))


def _nibble_pair(builder: Any, words: Any, pair: int) -> Any:
    """The bfloat16 pairs 16 + q of pair `pair` of a step."""
    shift = 4 * pair - 3
    moved = builder.lshr(words, _ints(shift)) if shift > 0 else builder.shl(words, _ints(-shift))
    return builder.or_(builder.and_(moved, _ints(_MANTISSA)), _ints(_SIXTEENS))


def _byte_halves(builder: Any, address: Any) -> list[Any]:
    """The first and second codes of 16 features as float32."""
    found = []
    for half in range(2):
        codes = _load(builder, _plus(builder, address, half * LANES), _VI8)
        found.append(builder.sitofp(builder.sext(codes, _VI32), _VF32))
    return found


def _as_pair(builder: Any, low: Any, high: Any) -> Any:
    """Small integers in float32 as bfloat16 pairs, which hold them exactly: their lower half is all zeros."""
    return builder.or_(
        builder.bitcast(high, _VI32), builder.lshr(builder.bitcast(low, _VI32), ir.Constant(_VI32, [16] * LANES))
    )


def _scales(builder: Any, address: Any, half: bool) -> Any:
    """16 scales as float32. float16 is widened with integers, subnormal numbers too: where the processor does not
    convert it LLVM would call a library routine that is not there and abort."""
    if not half:
        return _load(builder, address, _VF32)
    bits = builder.zext(_load(builder, address, _VI16), _VI32)
    sign = builder.shl(builder.and_(bits, _ints(0x8000)), _ints(16))
    magnitude = builder.bitcast(builder.shl(builder.and_(bits, _ints(0x7FFF)), _ints(13)), _VF32)
    value = builder.bitcast(builder.fmul(magnitude, _floats(2.0**112)), _VI32)
    return builder.bitcast(builder.or_(value, sign), _VF32)


@dataclass(frozen=True, slots=True)
class Form:
    """What a tile is compiled for. nibbles: codes of 4 bits, else 8. half: scales and minima are float16, else float32.
    stored_pairs: activations are bfloat16, else float32."""

    nibbles: bool
    half: bool
    has_minimum: bool
    stored_pairs: bool

    @property
    def scale_bytes(self) -> int:
        return 2 if self.half else 4

    @property
    def step_bytes(self) -> int:
        """Of the codes of one step of a panel."""
        return PANEL * STEP // 2 if self.nibbles else PANEL * STEP

    @property
    def needs_sums(self) -> bool:
        """Whether the tile takes the sums of activations."""
        return self.nibbles or self.has_minimum


def make_tile(rows: int, form: Form) -> Callable[..., Any]:
    """c[r, n] = bias[n] + sum over k of x[r, k] * weight[n, k], for `rows` rows and VECTORS * 16 features of a panel.

    The intrinsic's arguments, int64: address of x, bytes from row to row; address of the sums of x over each group
    (float32), bytes from row to row; address of the panel, first of its features; groups, steps of a group, bytes of a
    block; address of c (float32, rows of 48) and of the bias.
    """
    nibbles, half = form.nibbles, form.half
    pairs = form.stored_pairs and MULTIPLIES_PAIRS
    width = 2 if form.stored_pairs else 4

    @intrinsic
    def tile(
        typingctx: Any,
        x: Any,
        xstr: Any,
        sums: Any,
        sstr: Any,
        w: Any,
        column: Any,
        groups: Any,
        steps: Any,
        block: Any,
        c: Any,
        bias: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            x_at, x_stride, s_at, s_stride, w_at, first, n, per_group, size, c_at, bias_at = args

            def times(value: Any, constant: int) -> Any:
                return builder.mul(value, ir.Constant(_I64, constant))

            totals = [cgutils.alloca_once(builder, _VF32) for _ in range(rows * VECTORS)]
            partial = [cgutils.alloca_once(builder, _VF32) for _ in range(rows * VECTORS)]
            for vector in range(VECTORS):
                begin = _load(builder, _plus(builder, bias_at, vector * 4 * LANES), _VF32)
                for row in range(rows):
                    builder.store(begin, totals[row * VECTORS + vector])
            x_starts = [builder.add(x_at, times(x_stride, row)) for row in range(rows)]
            s_starts = [builder.add(s_at, times(s_stride, row)) for row in range(rows)]

            def factors(row: int, at: Any) -> Any:
                """Two neighbouring activations in all lanes: as a pair, or apart as float32."""
                place = builder.add(x_starts[row], at)
                if form.stored_pairs:
                    word = splat(builder, _load(builder, place, _I32))
                    return word if pairs else pair_halves(builder, word)
                return tuple(
                    splat(builder, _load(builder, _plus(builder, place, index * 4), _F32)) for index in range(2)
                )

            def multiply_add(left: Any, right: Any, pointer: Any) -> None:
                total = builder.load(pointer)
                if pairs:
                    total = multiply_pairs(builder, left, right, total)
                else:
                    for one, other in zip(left, right, strict=True):
                        total = multiply_floats(builder, one, other, total)
                builder.store(total, pointer)

            def unpacked(base: Any, words: list[Any], pair: int, vector: int) -> Any:
                if nibbles:
                    word = _nibble_pair(builder, words[vector], pair)
                    return word if pairs else pair_halves(builder, word)
                low, high = _byte_halves(builder, _plus(builder, base, (pair * 3 + vector) * 2 * LANES))
                return _as_pair(builder, low, high) if pairs else (low, high)

            codes_first, scales_first = times(first, 4 if nibbles else 2), times(first, form.scale_bytes)
            with cgutils.for_range(builder, n) as group:
                start = builder.add(w_at, builder.mul(group.index, size))
                group_sums = []
                for row in range(rows):
                    begin = _floats(0.0)
                    if form.needs_sums:
                        value = _load(builder, builder.add(s_starts[row], times(group.index, 4)), _F32)
                        group_sums.append(splat(builder, value))
                    if nibbles:
                        offset = -_OFFSET if form.has_minimum else -_OFFSET - 8
                        begin = builder.fmul(group_sums[row], _floats(offset))
                    for vector in range(VECTORS):
                        builder.store(begin, partial[row * VECTORS + vector])
                with cgutils.for_range(builder, per_group) as step:
                    base = builder.add(builder.add(start, times(step.index, form.step_bytes)), codes_first)
                    words = []
                    if nibbles:
                        places = [_plus(builder, base, vector * 4 * LANES) for vector in range(VECTORS)]
                        words = [_load(builder, place, _VI32) for place in places]
                    k = times(builder.add(builder.mul(group.index, per_group), step.index), STEP * width)
                    for pair in range(_PAIRS):
                        weights = [unpacked(base, words, pair, vector) for vector in range(VECTORS)]
                        for row in range(rows):
                            left = factors(row, _plus(builder, k, 2 * pair * width))
                            for vector in range(VECTORS):
                                multiply_add(left, weights[vector], partial[row * VECTORS + vector])
                scales_at = builder.add(builder.add(start, times(per_group, form.step_bytes)), scales_first)
                for vector in range(VECTORS):
                    place = _plus(builder, scales_at, vector * LANES * form.scale_bytes)
                    scales = _scales(builder, place, half)
                    if form.has_minimum:
                        minima = _scales(builder, _plus(builder, place, PANEL * form.scale_bytes), half)
                    for row in range(rows):
                        pointer = totals[row * VECTORS + vector]
                        total = builder.load(pointer)
                        if form.has_minimum:
                            total = multiply_floats(builder, minima, group_sums[row], total)
                        total = multiply_floats(builder, scales, builder.load(partial[row * VECTORS + vector]), total)
                        builder.store(total, pointer)
            for row in range(rows):
                for vector in range(VECTORS):
                    place = _plus(builder, c_at, 4 * (row * PANEL + vector * LANES))
                    total = builder.load(totals[row * VECTORS + vector])
                    builder.store(total, builder.inttoptr(place, _VF32.as_pointer())).align = 4
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 11), codegen

    return tile


def make_scale_at(half: bool) -> Callable[..., Any]:
    """The scale at an address, as float32."""

    @intrinsic
    def scale_at(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            if not half:
                return _load(builder, args[0], _F32)
            bits = builder.zext(_load(builder, args[0], _I16), _I32)
            sign = builder.shl(builder.and_(bits, ir.Constant(_I32, 0x8000)), ir.Constant(_I32, 16))
            magnitude = builder.shl(builder.and_(bits, ir.Constant(_I32, 0x7FFF)), ir.Constant(_I32, 13))
            value = builder.fmul(builder.bitcast(magnitude, _F32), ir.Constant(_F32, 2.0**112))
            return builder.bitcast(builder.or_(builder.bitcast(value, _I32), sign), _F32)

        return types.float32(types.int64), codegen

    return scale_at
