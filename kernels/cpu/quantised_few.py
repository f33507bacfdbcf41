"""Products of few rows with quantised weights in vectors that make the very sums of tiles, and store nothing opened.

For one row, tiles do a sixteenth of what they could, and the opening of groups for them takes longer than reading the
weights from memory. But a row must have the same bits alone and beside any others, so vectors have to do what TDPBF16PS
does. For a row, a column and a step of 32 along in_features that is, by Intel's manual (volume 2, TDPBF16PS) and on the
processor where this was written:

* two sums in float32 that begin with 0, of the products of even in_features and of those of odd ones, in order, each
  product added by a fused multiplication and addition that rounds to nearest even;
* then the two are added, and that is added to what the tile held.

Numbers below 2^-126, of bfloat16 or float32, count as 0, going in and coming out: vectors do the same while the mode of
their thread says so (`tiny_numbers`). A sum that is so small is exact before that, since activations are multiples of
2^-133 and codes are whole, so it is no matter whether it is rounded first.

With that model, written in NumPy, 65 million sums of a tile were equal bit by bit: of normal numbers, codes of both
sizes, numbers of any exponent, next to the smallest and the largest, sums that cancel, infinities, any 16 bits at all.
`tests/kernels/test_amx.py` compares some again.
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

from pagemill.kernels.cpu.amx import TILE
from pagemill.kernels.cpu.isa import call
from pagemill.kernels.cpu.jit import exact_helper
from pagemill.kernels.cpu.matmul import PANEL, fetch, multiply_floats
from pagemill.kernels.cpu.quantised_form import PAIRS, STEP, Form, byte_halves, floats, ints, load, plus
from pagemill.kernels.cpu.quantised_open import VECTOR_BYTES, convert_scales, make_sizes, store
from pagemill.kernels.cpu.simd import LANES, splat, widen
from pagemill.kernels.cpu.views import vector

MOST_ROWS = 3
"""Rows from which tiles are quicker, less one."""

TILE_GROUP = 2 * TILE
"""in_features of a step of a tile, of which a group must be a multiple."""

_VECTORS = PANEL // LANES
_STEPS = TILE_GROUP // STEP  # of codes in a step of a tile
_AHEAD = 8192  # bytes: what the processor asks for by itself comes too late for so short a time between reads
_CACHE_LINE = 64
_PAIR = np.uint16(0)
_ZERO = np.float32(0.0)
_F32 = ir.FloatType()
_I64 = ir.IntType(64)
_VI32 = ir.VectorType(ir.IntType(32), LANES)
_VF32 = ir.VectorType(_F32, LANES)


def _codes(builder: Any, form: Form, base: Any, words: Any, pair: int, column: int) -> list[Any]:
    """The first and second codes of 16 features' pair as float32."""
    if not form.nibbles:
        return byte_halves(builder, plus(builder, base, (pair * _VECTORS + column) * 2 * LANES))
    # The instruction looks at the lowest four bits of each index.
    lowest = 0 if form.has_minimum else -8
    table = ir.Constant(_VF32, [float(code + lowest) for code in range(LANES)])
    found = []
    for half in range(2):
        shift = 4 * pair + 16 * half
        index = builder.lshr(words, ints(shift)) if shift else words
        found.append(call(builder, f"llvm.x86.avx512.permvar.sf.{32 * LANES}", _VF32, [table, index]))
    return found


def _make_block(rows: int, form: Form) -> Callable[..., Any]:
    """c[r, n] += sum over k of x[r, k] * weight[n, k] for `rows` rows and a panel's features, as tiles would.

    int64: address of x in float32, bytes from row to row; of the sums of its groups, bytes from row to row; address of
    the first group's block; groups, steps of a tile in one, bytes of a block; address of c (float32, rows of 48); the
    block to fetch meanwhile for the first group, from where the others follow.
    """

    @intrinsic
    def block(
        typingctx: Any,
        x: Any,
        xstr: Any,
        sums: Any,
        sstr: Any,
        w: Any,
        groups: Any,
        steps: Any,
        size: Any,
        c: Any,
        ahead: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            x_at, x_stride, s_at, s_stride, w_at, n, per_group, block_bytes, c_at, ahead_at = args

            def times(value: Any, constant: int) -> Any:
                return builder.mul(value, ir.Constant(_I64, constant))

            def variables() -> dict[tuple[int, int], Any]:
                return {cell: cgutils.alloca_once(builder, _VF32) for cell in cells}

            def place_of(row: int, column: int) -> Any:
                return plus(builder, c_at, 4 * (row * PANEL + column * LANES))

            cells = [(row, column) for row in range(rows) for column in range(_VECTORS)]
            totals, group_sums, even, odd = variables(), variables(), variables(), variables()
            x_starts = [builder.add(x_at, times(x_stride, row)) for row in range(rows)]
            s_starts = [builder.add(s_at, times(s_stride, row)) for row in range(rows)]
            step_bytes = _STEPS * form.step_bytes
            lines, parts = step_bytes // _CACHE_LINE, _STEPS * PAIRS
            for cell in cells:
                builder.store(load(builder, place_of(*cell), _VF32), totals[cell])
            with cgutils.for_range(builder, n) as group:
                start = builder.add(w_at, builder.mul(group.index, block_bytes))
                fetched = builder.add(ahead_at, builder.mul(group.index, block_bytes))
                for cell in cells:
                    builder.store(floats(0.0), group_sums[cell])
                with cgutils.for_range(builder, per_group) as step:
                    base = builder.add(start, times(step.index, step_bytes))
                    following = builder.add(fetched, times(step.index, step_bytes))
                    k = times(builder.add(builder.mul(group.index, per_group), step.index), 4 * TILE_GROUP)
                    for kept in (even, odd):
                        for cell in cells:
                            builder.store(floats(0.0), kept[cell])
                    for inner in range(_STEPS):
                        codes_at = plus(builder, base, inner * form.step_bytes)
                        words = {}
                        if form.nibbles:
                            for column in range(_VECTORS):
                                words[column] = load(builder, plus(builder, codes_at, column * VECTOR_BYTES), _VI32)
                        for pair in range(PAIRS):
                            # A few at a time: the processor has room for a dozen or so that it waits for.
                            part = inner * PAIRS + pair
                            for line in range(lines * part // parts, lines * (part + 1) // parts):
                                fetch(builder, plus(builder, following, line * _CACHE_LINE))
                            codes = {
                                column: _codes(builder, form, codes_at, words.get(column), pair, column)
                                for column in range(_VECTORS)
                            }
                            for row in range(rows):
                                for half, kept in enumerate((even, odd)):
                                    place = plus(builder, k, 4 * (inner * STEP + 2 * pair + half))
                                    factor = load(builder, builder.add(x_starts[row], place), _F32)
                                    for column in range(_VECTORS):
                                        total = builder.load(kept[row, column])
                                        total = multiply_floats(
                                            builder, splat(builder, factor), codes[column][half], total
                                        )
                                        builder.store(total, kept[row, column])
                    for cell in cells:
                        joined = builder.fadd(builder.load(even[cell]), builder.load(odd[cell]))
                        total = builder.fadd(builder.load(group_sums[cell]), joined)
                        builder.store(total, group_sums[cell])
                after_codes = times(per_group, step_bytes)
                scales_at, fetched = builder.add(start, after_codes), builder.add(fetched, after_codes)
                for at in range(0, PANEL * form.scale_bytes * (1 + form.has_minimum), _CACHE_LINE):
                    fetch(builder, plus(builder, fetched, at))

                def scales(index: int) -> list[Any]:
                    first = plus(builder, scales_at, index * PANEL * form.scale_bytes)
                    places = [plus(builder, first, column * LANES * form.scale_bytes) for column in range(_VECTORS)]
                    return [convert_scales(builder, place, form.half) for place in places]

                factors = scales(0)
                minima = scales(1) if form.has_minimum else []
                for row in range(rows):
                    if form.has_minimum:
                        at = builder.add(s_starts[row], times(group.index, 4))
                        x_sum = splat(builder, load(builder, at, _F32))
                    for column in range(_VECTORS):
                        total = builder.load(totals[row, column])
                        if form.has_minimum:
                            total = multiply_floats(builder, minima[column], x_sum, total)
                        total = multiply_floats(builder, factors[column], builder.load(group_sums[row, column]), total)
                        builder.store(total, totals[row, column])
            for cell in cells:
                store(builder, builder.load(totals[cell]), place_of(*cell))
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 10), codegen

    return block


def make_few(form: Form) -> Any:
    """few(rows, x, distance of its rows, sums of its groups, distance of theirs, panel, groups, steps of a group, bytes
    of a block, c, memory for opened groups, which panel comes next): add a panel's sums for 1 to MOST_ROWS rows to c.
    """
    block1, block2, block3 = (_make_block(rows, form) for rows in range(1, MOST_ROWS + 1))
    _, groups_at_once = make_sizes(form)

    @exact_helper
    def few(
        rows: int,
        x: int,
        xstr: int,
        sums: int,
        sstr: int,
        w: int,
        groups: int,
        steps: int,
        block: int,
        c: int,
        room: int,
        after: int,
    ) -> None:
        group = steps * STEP
        ahead = min(groups, max(1, _AHEAD // block))
        # A row of a group in float32 takes a twenty-fourth of what the opened group would.
        most = groups_at_once(steps) * (PANEL // 2) // rows
        first = 0
        while first < groups:
            inside = first + ahead < groups
            count = min(most, groups - ahead - first if inside else groups - first)
            fetched = w + (first + ahead) * block if inside else after + (first + ahead - groups) * block
            length = count * group
            for row in range(rows):
                stored = vector(x + row * xstr + 2 * first * group, length, _PAIR)
                wide = vector(room + 4 * row * length, length, _ZERO)
                for index in range(length):
                    wide[index] = widen(stored[index])
            place, at, each = sums + 4 * first, w + first * block, group // TILE_GROUP
            if rows == 1:
                block1(room, 4 * length, place, sstr, at, count, each, block, c, fetched)
            elif rows == 2:
                block2(room, 4 * length, place, sstr, at, count, each, block, c, fetched)
            else:
                block3(room, 4 * length, place, sstr, at, count, each, block, c, fetched)
            first += count

    return few
