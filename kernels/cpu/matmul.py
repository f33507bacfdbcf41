"""Matrix products with weights repacked once, for one row of activations as for hundreds.

Weights lie in panels of 48 output features: [panel][depth][48] words of 32 bits. A word is a float32, or two bfloat16
that follow one another along in_features. A tile keeps rows x 48 sums in registers and streams a panel past them, so
that with few rows the speed is the memory's and with many the arithmetic's. Where the processor multiplies bfloat16
pairs itself (AVX512_BF16) it does; elsewhere they are widened to float32.

Where rows need several tiles, the first would read its panel at the memory's speed and the others at the arithmetic's,
one after the other. So each tile also fetches a share of the panel that is likely to be next.

A row is summed in the same order whatever rows are beside it: its result has the same bits alone, in a batch of any
size and in a prefill. (torch's has not: it chooses other algorithms for other sizes.)

A product is a worker of the team, called by address with a *task*, int64 words that say what to multiply (`TASK_*`).
The task names a *record*, words that describe a weight (`RECORD_*`). So whoever has tasks can run products of any kind
of weight without knowing its code.
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

from pagemill.kernels.cpu.isa import LANES, MULTIPLIES_PAIRS, WIDE_REGISTERS, call, dot_pairs, to_bfloat
from pagemill.kernels.cpu.jit import exact_helper, helper, kernel
from pagemill.kernels.cpu.simd import exp32, narrow, next_item, pair_halves, splat
from pagemill.kernels.cpu.team import address_of, run_at
from pagemill.kernels.cpu.tiny_numbers import count_as_before, count_as_zero
from pagemill.kernels.cpu.views import vector

PANEL = 3 * LANES
"""Output features of a panel."""

TASK_X, TASK_X_STRIDE, TASK_ROWS, TASK_OUT, TASK_OUT_STRIDE, TASK_RECORD, TASK_RESULT = range(7)
TASK_COUNTER = 8
TASK_WORDS = 16
"""A product to compute: x [rows, in_features] and out by address, the distances of their rows in elements, the record
of the weight, what is to become of the sums (`PLAIN`, ...), and a counter that is 0 before the call."""

PLAIN, GATED, FLOAT32 = range(3)
"""Results: of the activations' type; silu(first half) * second half of the features, so rounded; or float32."""

(
    RECORD_PANELS,
    RECORD_DEPTH,
    RECORD_FEATURES,
    RECORD_SECTIONS,
    RECORD_BIAS,
    RECORD_BIAS_STEP,
) = range(6)
RECORD_WORDS = 6
"""A weight in panels: their address, words along in_features, then features of a section and sections: 2 where gate and
up begin on a panel of their own. The bias, by address, is float32 [panels, 48], or [48] zeros with step 0."""


# Sums that fit the registers beside a panel's vectors: 32 registers of 16 lanes, or 16 of 8. Widening takes registers.
TILE_VECTORS = 3 if WIDE_REGISTERS else 1
_PAIR_ROWS = 8 if MULTIPLIES_PAIRS else 6
_FLOAT_ROWS = 8 if WIDE_REGISTERS else 6
# Rows that go past a panel before the next panel's turn: with it, their activations stay in the second level cache.
ROWS_AT_ONCE = 128
# Items of work for each thread, so that the last one to finish holds up little.
_ITEMS_PER_THREAD = 16
# Words of a packed weight that one thread takes at a time: enough to make the taking cheap, little enough to share out.
_WORDS_AT_ONCE = 16384

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_I8 = ir.IntType(8)
_I32 = ir.IntType(32)
_F32 = ir.FloatType()
_VI32 = ir.VectorType(_I32, LANES)
_VF32 = ir.VectorType(_F32, LANES)


def _place(builder: Any, address: Any, offset: int, element: Any) -> Any:
    """A pointer to an element so many bytes behind an address."""
    return builder.inttoptr(builder.add(address, ir.Constant(address.type, offset)), element.as_pointer())


def _make_tile(rows: int, packed: bool) -> Callable[..., Any]:
    """c[r, n] = bias[n] + sum over k of x[r, k] * panel[k, n], for `rows` rows and TILE_VECTORS * 16 columns.

    The intrinsic's arguments, int64: address of x, bytes from row to row, address of the panel's columns, depth in
    words, address of c (float32, rows of 48), of the bias, and of what to fetch meanwhile, with bytes of it a word.
    """

    @intrinsic
    def tile(typingctx: Any, x: Any, xstr: Any, w: Any, depth: Any, c: Any, bias: Any, ahead: Any, step: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            x_at, x_stride, w_at, n, c_at, bias_at, ahead_at, ahead_step = args
            vector_type = _VI32 if packed else _VF32

            sums = [cgutils.alloca_once(builder, _VF32) for _ in range(rows * TILE_VECTORS)]
            for vector_index in range(TILE_VECTORS):
                start = builder.load(_place(builder, bias_at, vector_index * 4 * LANES, _VF32))
                start.align = 4
                for row in range(rows):
                    builder.store(start, sums[row * TILE_VECTORS + vector_index])
            starts = [builder.add(x_at, builder.mul(x_stride, ir.Constant(x_stride.type, r))) for r in range(rows)]
            with cgutils.for_range(builder, n) as loop:
                four = ir.Constant(loop.index.type, 4)
                base = builder.add(w_at, builder.mul(loop.index, ir.Constant(loop.index.type, 4 * PANEL)))
                fetch(builder, builder.add(ahead_at, builder.mul(loop.index, ahead_step)))
                fetch(
                    builder,
                    builder.add(
                        ahead_at,
                        builder.add(
                            builder.mul(loop.index, ahead_step),
                            builder.lshr(ahead_step, ir.Constant(ahead_step.type, 1)),
                        ),
                    ),
                )
                weights = []
                for vector_index in range(TILE_VECTORS):
                    loaded = builder.load(_place(builder, base, vector_index * 4 * LANES, vector_type))
                    loaded.align = 4
                    weights.append(loaded)
                for row in range(rows):
                    at = builder.add(starts[row], builder.mul(loop.index, four))
                    factor = builder.load(_place(builder, at, 0, _I32 if packed else _F32))
                    factor.align = 2 if packed else 4
                    multiply_add = multiply_pairs if packed else multiply_floats
                    for vector_index, loaded in enumerate(weights):
                        pointer = sums[row * TILE_VECTORS + vector_index]
                        total = multiply_add(builder, splat(builder, factor), loaded, builder.load(pointer))
                        builder.store(total, pointer)
            for row in range(rows):
                for vector_index in range(TILE_VECTORS):
                    target = _place(builder, c_at, 4 * (row * PANEL + vector_index * LANES), _VF32)
                    builder.store(builder.load(sums[row * TILE_VECTORS + vector_index]), target).align = 4
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 8), codegen

    return tile


def fetch(builder: Any, address: Any) -> None:
    """Ask for a cache line, into the second level: a panel is larger than the first."""
    pointer = builder.inttoptr(address, _I8.as_pointer())
    signature = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    builder.call(function, [pointer, *(ir.Constant(_I32, value) for value in (0, 2, 1))])


def multiply_floats(builder: Any, factors: Any, weights: Any, total: Any) -> Any:
    return call(builder, f"llvm.fma.v{LANES}f32", _VF32, [factors, weights, total])


def multiply_pairs(builder: Any, pairs: Any, weights: Any, total: Any) -> Any:
    """total + the sum of products of the bfloat16 pairs in each lane."""
    if MULTIPLIES_PAIRS:
        return dot_pairs(builder, pairs, weights, total)
    for left, right in zip(pair_halves(builder, pairs), pair_halves(builder, weights), strict=True):
        total = multiply_floats(builder, left, right, total)
    return total


def _make_writer(narrows: bool) -> Callable[..., Any]:
    """Write `rows` x 48 sums, float32 in rows of 48, as bfloat16 or as they are.

    The intrinsic's arguments, int64: rows, address of the sums, address of the result, bytes from row to row of it.
    """

    @intrinsic
    def write(typingctx: Any, rows: Any, sums: Any, out: Any, stride: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            count, sums_at, out_at, out_stride = args
            size = 2 if narrows else 4
            with cgutils.for_range(builder, count) as loop:
                source = builder.add(sums_at, builder.mul(loop.index, ir.Constant(loop.index.type, 4 * PANEL)))
                target = builder.add(out_at, builder.mul(loop.index, out_stride))
                for first in range(0, PANEL, LANES):
                    values = builder.load(_place(builder, source, 4 * first, _VF32))
                    values.align = 4
                    kept = to_bfloat(builder, values) if narrows else values
                    builder.store(kept, _place(builder, target, size * first, kept.type)).align = size
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 4), codegen

    return write


write_pair_sums, write_float_sums = _make_writer(True), _make_writer(False)


@helper
def write_partial(sums: Any, rows: int, out: int, stride: int, width: int, like: Any) -> None:
    """The first columns of a panel only."""
    for row in range(rows):
        target = vector(out + row * stride, width, like)
        for i in range(width):
            target[i] = narrow(sums[row, i], like)


@exact_helper
def gate_sums(gates: Any, ups: Any, rows: int) -> None:
    """silu(gate) * up, in place of the gates."""
    flat, beside = gates.reshape(-1)[: rows * PANEL], ups.reshape(-1)[: rows * PANEL]
    for i in range(rows * PANEL):
        flat[i] = flat[i] / (_ONE + exp32(-flat[i])) * beside[i]


def _make_columns(packed: bool) -> Any:
    """columns(rows, x, distance of its rows, weights, depth, sums, bias, whether it is not 0, what to fetch meanwhile,
    bytes of it a word): a panel's sums for some rows."""
    tile1, tile2, tile3, tile4, tile5, tile6, tile7, tile8 = (_make_tile(rows, packed) for rows in range(1, 9))

    @helper
    def tiles(rows: int, x: int, xstr: int, w: int, depth: int, c: int, bias: int, ahead: int, step: int) -> None:
        if rows == 8:
            tile8(x, xstr, w, depth, c, bias, ahead, step)
        elif rows == 7:
            tile7(x, xstr, w, depth, c, bias, ahead, step)
        elif rows == 6:
            tile6(x, xstr, w, depth, c, bias, ahead, step)
        elif rows == 5:
            tile5(x, xstr, w, depth, c, bias, ahead, step)
        elif rows == 4:
            tile4(x, xstr, w, depth, c, bias, ahead, step)
        elif rows == 3:
            tile3(x, xstr, w, depth, c, bias, ahead, step)
        elif rows == 2:
            tile2(x, xstr, w, depth, c, bias, ahead, step)
        else:
            tile1(x, xstr, w, depth, c, bias, ahead, step)

    @helper
    def columns(
        rows: int, x: int, xstr: int, w: int, depth: int, c: int, bias: int, biased: int, ahead: int, step: int
    ) -> None:
        for column in range(0, PANEL, TILE_VECTORS * LANES):
            offset = 4 * column
            tiles(rows, x, xstr, w + offset, depth, c + offset, bias + offset, ahead + offset, step)

    return columns


@helper
def _as_before(rows: int, before: int) -> int:
    return before


@helper
def _nothing() -> None:
    pass


def make_worker(packed: bool, most_rows: int, columns: Any, prepare: Any = _as_before, finish: Any = _nothing) -> Any:
    """A worker for the products of up to most_rows rows at a time by `columns`, which see in `_make_columns`.

    prepare(rows, rows before) -> rows: called as the number of rows changes, at first from 0; finish(): at the end.
    """
    like = np.uint16(0) if packed else _ZERO
    size = 2 if packed else 4

    @helper
    def write(rows: int, sums: Any, scratch: int, out: int, start: int, stride: int, column: int, width: int) -> None:
        target = out + (start * stride + column) * size
        if width < PANEL:
            write_partial(sums, rows, target, stride * size, width, like)
        elif packed:
            write_pair_sums(rows, scratch, target, stride * size)
        else:
            write_float_sums(rows, scratch, target, stride * size)

    @helper
    def write_floats(
        rows: int, sums: Any, scratch: int, out: int, start: int, stride: int, column: int, width: int
    ) -> None:
        target = out + (start * stride + column) * 4
        if width < PANEL:
            write_partial(sums, rows, target, stride * 4, width, _ZERO)
        else:
            write_float_sums(rows, scratch, target, stride * 4)

    @helper
    def worker(part: int, parts: int, task_at: int) -> None:
        task = vector(task_at, TASK_WORDS, np.int64(0))
        counter = task[TASK_COUNTER : TASK_COUNTER + 1]
        rows, result = task[TASK_ROWS], task[TASK_RESULT]
        x, x_stride = task[TASK_X], task[TASK_X_STRIDE] * size
        out, out_stride = task[TASK_OUT], task[TASK_OUT_STRIDE]
        record = vector(task[TASK_RECORD], RECORD_WORDS, np.int64(0))
        depth, features = record[RECORD_DEPTH], record[RECORD_FEATURES]
        section = (features + PANEL - 1) // PANEL
        panels = section if result == GATED else section * record[RECORD_SECTIONS]
        panel_bytes = depth * 4 * PANEL
        bias_step = record[RECORD_BIAS_STEP]

        wanted = (_ITEMS_PER_THREAD * parts + panels - 1) // panels
        rows_at_once = min(ROWS_AT_ONCE, max(4 * most_rows, (rows + wanted - 1) // wanted))
        rows_at_once = (rows_at_once + most_rows - 1) // most_rows * most_rows
        blocks = (rows + rows_at_once - 1) // rows_at_once
        panels_at_once = max(1, min(_WORDS_AT_ONCE // (depth * PANEL), panels // (2 * parts)))
        groups = (panels + panels_at_once - 1) // panels_at_once
        sums = np.empty((2, most_rows, PANEL), np.float32)
        scratch = sums.ctypes.data
        ready = 0
        before = count_as_zero()
        while True:
            item = next_item(counter)
            if item >= groups * blocks:
                break
            first_row = item // groups * rows_at_once
            here = min(rows_at_once, rows - first_row)
            first = item % groups * panels_at_once
            tile_count = (here + most_rows - 1) // most_rows
            # A single tile is as fast as the memory anyway; what it asks for is what it is about to read.
            step = 4 * PANEL // tile_count if tile_count > 1 else 0
            for panel in range(first, min(first + panels_at_once, panels)):
                weights = record[RECORD_PANELS] + panel * panel_bytes
                bias = record[RECORD_BIAS] + panel * bias_step
                inside = panel % section
                width = min(PANEL, features - inside * PANEL)
                column = inside * PANEL + panel // section * features
                for tile in range(tile_count):
                    start = first_row + here * tile // tile_count
                    count = first_row + here * (tile + 1) // tile_count - start
                    ready = prepare(count, ready)
                    at = x + start * x_stride
                    ahead = weights
                    if step > 0:
                        # May lie behind the last panel: to ask for what is not there does no harm.
                        ahead += parts * panels_at_once * panel_bytes + tile * (panel_bytes // tile_count)
                    columns(count, at, x_stride, weights, depth, scratch, bias, bias_step, ahead, step)
                    if result == GATED:
                        beside = section * panel_bytes
                        columns(
                            count,
                            at,
                            x_stride,
                            weights + beside,
                            depth,
                            scratch + 4 * most_rows * PANEL,
                            bias + section * bias_step,
                            bias_step,
                            ahead + beside,
                            step,
                        )
                        gate_sums(sums[0], sums[1], count)
                    if result == FLOAT32:
                        write_floats(count, sums[0], scratch, out, start, out_stride, column, width)
                    else:
                        write(count, sums[0], scratch, out, start, out_stride, column, width)
        finish()
        count_as_before(before)

    return worker


_pair_worker = make_worker(True, _PAIR_ROWS, _make_columns(True))
_float_worker = make_worker(False, _FLOAT_ROWS, _make_columns(False))


@kernel
def pair_worker() -> int:
    """The address of the worker for bfloat16, to be called with a task."""
    return address_of(_pair_worker)


@kernel
def float_worker() -> int:
    """The address of the worker for float32."""
    return address_of(_float_worker)


@kernel
def multiply(board: int, worker: int, task: int) -> None:
    """Run a task, by address, on a board with the worker at an address."""
    run_at(board, 1, worker, task)
