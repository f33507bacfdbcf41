"""Matrix products with weights repacked once, for one row of activations as for hundreds.

Weights lie in panels of 48 output features: [panel][depth][48] words of 32 bits. A word is a float32, or two bfloat16
that follow one another along in_features. A tile keeps rows x 48 sums in registers and streams a panel past them, so
that with few rows the speed is the memory's and with many the arithmetic's. Where the processor multiplies bfloat16
pairs itself (AVX512_BF16) it does; elsewhere they are widened to float32.

A row is summed in the same order whatever rows are beside it: its result has the same bits alone, in a batch of any
size and in a prefill. (torch's has not: it chooses other algorithms for other sizes.)
"""

# llvmlite and numba ship no types, and `intrinsic` returns what numba makes of a function.
# mypy: disable-error-code="untyped-decorator, import-untyped, no-any-return"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.simd import LANES, narrow, next_item, pair_halves, splat, widen
from pagemill.kernels.cpu.team import run
from pagemill.kernels.cpu.views import matrix

PANEL = 3 * LANES
"""Output features of a panel."""


def _has(feature: str) -> bool:
    features: str = cpu_target.target_context.codegen().magic_tuple()[2]
    return f"+{feature}" in features.split(",")


_MULTIPLIES_PAIRS = _has("avx512bf16") and llvmlite.binding.llvm_version_info[0] >= 18
# Sums that fit the registers beside a panel's vectors: 32 registers of 16 lanes, or 16 of 8. Widening takes registers.
_VECTORS = 3 if _has("avx512f") else 1
_MOST_ROWS = 8
MOST_ROWS = {np.uint32: 8 if _MULTIPLIES_PAIRS else 4, np.float32: 8 if _has("avx512f") else 4}
"""Rows of a tile, by the type of the panels' words."""

_ZERO = np.float32(0.0)
_I32 = ir.IntType(32)
_F32 = ir.FloatType()
_VI32 = ir.VectorType(_I32, LANES)
_VF32 = ir.VectorType(_F32, LANES)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"


_VBF16 = ir.VectorType(_BFloat(), 2 * LANES)


def _make_tile(rows: int) -> Callable[..., Any]:
    """c[r, n] = sum over k of x[r, k] * panel[k, n], for `rows` rows and _VECTORS * 16 columns.

    The intrinsic's arguments: x as stored, offset and row stride in words; the panels, offset in words; depth in words;
    c float32, offset, row stride.
    """

    @intrinsic
    def tile(
        typingctx: Any, x: Any, xo: Any, xstr: Any, w: Any, wo: Any, depth: Any, c: Any, co: Any, cstr: Any
    ) -> Any:
        packed = w.dtype == types.uint32

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            x_off, x_stride, w_off, n, c_off, c_stride = (args[i] for i in (1, 2, 4, 5, 7, 8))

            def data(index: int, element: Any) -> Any:
                array = context.make_array(sig.args[index])(context, builder, args[index])
                return builder.bitcast(array.data, element.as_pointer())

            word, vector_type = (_I32, _VI32) if packed else (_F32, _VF32)
            x_data, w_data, c_data = data(0, word), data(3, word), data(6, _F32)
            sums = [cgutils.alloca_once(builder, _VF32) for _ in range(rows * _VECTORS)]
            for pointer in sums:
                builder.store(ir.Constant(_VF32, [0.0] * LANES), pointer)
            starts = [builder.add(x_off, builder.mul(x_stride, ir.Constant(x_stride.type, r))) for r in range(rows)]
            with cgutils.for_range(builder, n) as loop:
                base = builder.add(w_off, builder.mul(loop.index, ir.Constant(loop.index.type, PANEL)))
                weights = []
                for vector in range(_VECTORS):
                    place = builder.gep(w_data, [builder.add(base, ir.Constant(base.type, vector * LANES))])
                    loaded = builder.load(builder.bitcast(place, vector_type.as_pointer()))
                    loaded.align = 4
                    weights.append(loaded)
                for row in range(rows):
                    factor = builder.load(builder.gep(x_data, [builder.add(starts[row], loop.index)]))
                    factor.align = 2 if packed else 4
                    multiply_add = _multiply_pairs if packed else _multiply_floats
                    for vector, loaded in enumerate(weights):
                        pointer = sums[row * _VECTORS + vector]
                        total = multiply_add(builder, splat(builder, factor), loaded, builder.load(pointer))
                        builder.store(total, pointer)
            for row in range(rows):
                at = builder.add(c_off, builder.mul(c_stride, ir.Constant(c_stride.type, row)))
                for vector in range(_VECTORS):
                    place = builder.gep(c_data, [builder.add(at, ir.Constant(at.type, vector * LANES))])
                    total = builder.load(sums[row * _VECTORS + vector])
                    builder.store(total, builder.bitcast(place, _VF32.as_pointer())).align = 4
            return context.get_dummy_value()

        return types.void(x, xo, xstr, w, wo, depth, c, co, cstr), codegen

    return tile


def _multiply_floats(builder: Any, factors: Any, weights: Any, total: Any) -> Any:
    signature = ir.FunctionType(_VF32, [_VF32] * 3)
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.fma.v{LANES}f32")
    return builder.call(function, [factors, weights, total])


def _multiply_pairs(builder: Any, pairs: Any, weights: Any, total: Any) -> Any:
    """total + the sum of products of the bfloat16 pairs in each lane."""
    if _MULTIPLIES_PAIRS:
        signature = ir.FunctionType(_VF32, [_VF32, _VBF16, _VBF16])
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * LANES}"
        function = cgutils.get_or_insert_function(builder.module, signature, name)
        return builder.call(function, [total, builder.bitcast(pairs, _VBF16), builder.bitcast(weights, _VBF16)])
    for left, right in zip(pair_halves(builder, pairs), pair_halves(builder, weights), strict=True):
        total = _multiply_floats(builder, left, right, total)
    return total


_tile1, _tile2, _tile4, _tile8 = (_make_tile(rows) for rows in (1, 2, 4, 8))


@helper
def _tile_rows(rows: int, x: Any, xo: int, xstr: int, w: Any, wo: int, depth: int, c: Any, co: int) -> int:
    """One tile of at most `rows` rows; returns how many it did."""
    if rows >= 8:
        _tile8(x, xo, xstr, w, wo, depth, c, co, PANEL)
        return 8
    if rows >= 4:
        _tile4(x, xo, xstr, w, wo, depth, c, co, PANEL)
        return 4
    if rows >= 2:
        _tile2(x, xo, xstr, w, wo, depth, c, co, PANEL)
        return 2
    _tile1(x, xo, xstr, w, wo, depth, c, co, PANEL)
    return 1


@helper
def _multiply_panels(
    part: int, parts: int, counter: Any, panels_at_once: int, most_rows: int, x: Any, panels: Any, bias: Any, out: Any
) -> None:
    rows, depth = x.shape[0], panels.shape[1]
    features = out.shape[1]
    sums = np.empty((_MOST_ROWS, PANEL), np.float32)
    flat = sums.reshape(-1)
    while True:
        first = next_item(counter) * panels_at_once
        if first >= panels.shape[0]:
            break
        for panel in range(first, min(first + panels_at_once, panels.shape[0])):
            start = panel * PANEL
            width = min(PANEL, features - start)
            row = 0
            while row < rows:
                done = 0
                for column in range(0, PANEL, _VECTORS * LANES):
                    done = _tile_rows(
                        min(most_rows, rows - row),
                        x,
                        row * depth,
                        depth,
                        panels,
                        panel * depth * PANEL + column,
                        depth,
                        flat,
                        column,
                    )
                for r in range(done):
                    target = out[row + r, start : start + width]
                    source = sums[r]
                    if bias.shape[0] > 0:
                        added = bias[start : start + width]
                        for i in range(width):
                            target[i] = narrow(source[i] + widen(added[i]), target[i])
                    else:
                        for i in range(width):
                            target[i] = narrow(source[i], target[i])
                row += done


@kernel
def multiply(
    board: int,
    panels_at_once: int,
    most_rows: int,
    x: int,
    rows: int,
    width: int,
    panels: Any,
    bias: Any,
    out: int,
    features: int,
) -> None:
    """out [rows, features] = x [rows, width] times panels [P, depth, 48], plus bias [features] or [0].

    x and out by address. All float32 with depth `width`; or bfloat16 as uint16, panels uint32 with depth `width` / 2.
    """
    like = bias.dtype.type(0)
    counter = np.zeros(1, np.int64)
    inputs, results = matrix(x, rows, width, like), matrix(out, rows, features, like)
    arrays = (counter, panels_at_once, most_rows, inputs, panels, bias, results)
    run(board, 1, _multiply_panels, arrays)
