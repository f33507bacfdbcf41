"""Register tiles over quantised weights: integers become factors in registers, so that memory sees only few bits.

The sum over a group is of the activations times the codes as they are, which bfloat16 holds exactly; the scale comes
once for each group. A nibble q, put into the mantissa of bfloat16 16.0, is 16 + q. What is added so, and the minimum,
are factors of the group's sum of activations.
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
from pagemill.kernels.cpu.matmul import PANEL, TILE_VECTORS, multiply_floats, multiply_pairs
from pagemill.kernels.cpu.quantised_form import OFFSET, PAIRS, STEP, Form, factors, floats, load, plus, read_scales
from pagemill.kernels.cpu.quantised_open import LINE_BYTES, VECTOR_BYTES, fetch_share
from pagemill.kernels.cpu.simd import LANES, pair_halves, splat

VECTORS = TILE_VECTORS
"""Vectors of 16 features that one tile takes: all 3 of a panel, or one where registers are few."""
MOST_PAIR_ROWS, MOST_FLOAT_ROWS = 8 if MULTIPLIES_PAIRS else 4, 4
"""Rows of a tile, for bfloat16 and for float32, which takes two registers for a pair of weights."""

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_VI32 = ir.VectorType(_I32, LANES)
_VF32 = ir.VectorType(_F32, LANES)


def make_tile(rows: int, form: Form, opened: bool = False) -> Callable[..., Any]:
    """c[r, n] = begin[n] + sum over k of x[r, k] * weight[n, k], for `rows` rows and VECTORS * 16 features of a panel.

    The intrinsic's arguments, int64: address of x, bytes from row to row; address of the sums of x over each group
    (float32), bytes from row to row; address of the panel, first of its features; groups, steps of a group, bytes of a
    block; address of c (float32, rows of 48) and of what the sums begin with, which is the same for every row; 0, 0.

    opened: the address is of opened groups (see `quantised_open`), with the bytes of one. Each row of c is added to. In
    place of the last three: the block to fetch of meanwhile for the first group, bytes of a block, and how many of each
    to fetch.
    """
    pairs, half = form.pairs, form.half and not opened
    width = 2 if form.stored_pairs else 4
    step_bytes = (PAIRS if pairs else STEP) * LINE_BYTES if opened else form.step_bytes
    code_bytes = 4 if form.nibbles or opened else 2
    scale_bytes = 4 if opened else form.scale_bytes

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
        begin: Any,
        apart: Any,
        share: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            (
                x_at,
                x_stride,
                s_at,
                s_stride,
                w_at,
                first,
                n,
                per_group,
                size,
                c_at,
                begin_at,
                apart_bytes,
                share_bytes,
            ) = args

            def times(value: Any, constant: int) -> Any:
                return builder.mul(value, ir.Constant(_I64, constant))

            def place_of(row: int, vector: int) -> Any:
                return plus(builder, c_at, 4 * (row * PANEL + vector * LANES))

            totals = [cgutils.alloca_once(builder, _VF32) for _ in range(rows * VECTORS)]
            partial = [cgutils.alloca_once(builder, _VF32) for _ in range(rows * VECTORS)]
            for vector in range(VECTORS):
                for row in range(rows):
                    at = place_of(row, vector) if opened else plus(builder, begin_at, vector * VECTOR_BYTES)
                    builder.store(load(builder, at, _VF32), totals[row * VECTORS + vector])
            x_starts = [builder.add(x_at, times(x_stride, row)) for row in range(rows)]
            s_starts = [builder.add(s_at, times(s_stride, row)) for row in range(rows)]

            def activations(row: int, at: Any) -> Any:
                """Two neighbouring activations in all lanes: as a pair, or apart as float32."""
                place = builder.add(x_starts[row], at)
                if form.stored_pairs:
                    word = splat(builder, load(builder, place, _I32))
                    return word if pairs else pair_halves(builder, word)
                return tuple(splat(builder, load(builder, plus(builder, place, index * 4), _F32)) for index in range(2))

            def multiply_add(left: Any, right: Any, pointer: Any) -> None:
                total = builder.load(pointer)
                if pairs:
                    total = multiply_pairs(builder, left, right, total)
                else:
                    for one, other in zip(left, right, strict=True):
                        total = multiply_floats(builder, one, other, total)
                builder.store(total, pointer)

            def weights_of(base: Any, words: list[Any], pair: int, vector: int) -> Any:
                if not opened:
                    return factors(builder, form, base, words[vector], pair, vector)
                if pairs:
                    return load(builder, plus(builder, base, pair * LINE_BYTES + vector * VECTOR_BYTES), _VI32)
                lines = range(2 * pair, 2 * pair + 2)
                return tuple(
                    load(builder, plus(builder, base, line * LINE_BYTES + vector * VECTOR_BYTES), _VF32)
                    for line in lines
                )

            codes_first, scales_first = times(first, code_bytes), times(first, scale_bytes)
            with cgutils.for_range(builder, n) as group:
                start = builder.add(w_at, builder.mul(group.index, size))
                if opened:
                    fetch_share(builder, builder.add(begin_at, builder.mul(group.index, apart_bytes)), share_bytes)
                group_sums = []
                for row in range(rows):
                    zero = floats(0.0)
                    if form.needs_sums:
                        value = load(builder, builder.add(s_starts[row], times(group.index, 4)), _F32)
                        group_sums.append(splat(builder, value))
                    if form.nibbles:
                        offset = -OFFSET if form.has_minimum else -OFFSET - 8
                        zero = builder.fmul(group_sums[row], floats(offset))
                    for vector in range(VECTORS):
                        builder.store(zero, partial[row * VECTORS + vector])
                with cgutils.for_range(builder, per_group) as step:
                    base = builder.add(builder.add(start, times(step.index, step_bytes)), codes_first)
                    words: list[Any] = [None] * VECTORS
                    if form.nibbles and not opened:
                        places = [plus(builder, base, vector * VECTOR_BYTES) for vector in range(VECTORS)]
                        words = [load(builder, place, _VI32) for place in places]
                    k = times(builder.add(builder.mul(group.index, per_group), step.index), STEP * width)
                    for pair in range(PAIRS):
                        weights = [weights_of(base, words, pair, vector) for vector in range(VECTORS)]
                        for row in range(rows):
                            left = activations(row, plus(builder, k, 2 * pair * width))
                            for vector in range(VECTORS):
                                multiply_add(left, weights[vector], partial[row * VECTORS + vector])
                scales_at = builder.add(builder.add(start, times(per_group, step_bytes)), scales_first)
                for vector in range(VECTORS):
                    place = plus(builder, scales_at, vector * LANES * scale_bytes)
                    scales = read_scales(builder, place, half)
                    if form.has_minimum:
                        minima = read_scales(builder, plus(builder, place, PANEL * scale_bytes), half)
                    for row in range(rows):
                        pointer = totals[row * VECTORS + vector]
                        total = builder.load(pointer)
                        if form.has_minimum:
                            total = multiply_floats(builder, minima, group_sums[row], total)
                        total = multiply_floats(builder, scales, builder.load(partial[row * VECTORS + vector]), total)
                        builder.store(total, pointer)
            for row in range(rows):
                for vector in range(VECTORS):
                    total = builder.load(totals[row * VECTORS + vector])
                    builder.store(total, builder.inttoptr(place_of(row, vector), _VF32.as_pointer())).align = 4
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 13), codegen

    return tile
