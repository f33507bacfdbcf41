"""Workers for products with quantised weights, and for single rows of them; see `quantised_tile` for the layout.

They take the same tasks as the workers of `matmul`, with a record of their own. A row is summed in the same order
whatever rows are beside it, as there.
"""

# numba ships no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.matmul import (
    FLOAT32,
    GATED,
    PANEL,
    ROWS_AT_ONCE,
    TASK_COUNTER,
    TASK_OUT,
    TASK_OUT_STRIDE,
    TASK_RECORD,
    TASK_RESULT,
    TASK_ROWS,
    TASK_WORDS,
    TASK_X,
    TASK_X_STRIDE,
    gate_sums,
    write_float_sums,
    write_pair_sums,
    write_partial,
)
from pagemill.kernels.cpu.quantised_tile import (
    MOST_FLOAT_ROWS,
    MOST_PAIR_ROWS,
    STEP,
    VECTORS,
    Form,
    make_scale_at,
    make_tile,
)
from pagemill.kernels.cpu.simd import LANES, narrow, next_item, widen
from pagemill.kernels.cpu.team import address_of, run
from pagemill.kernels.cpu.views import matrix, vector

(
    RECORD_PANELS,
    RECORD_WIDTH,
    RECORD_GROUPS,
    RECORD_BLOCK,
    RECORD_FEATURES,
    RECORD_SECTIONS,
    RECORD_BIAS,
    RECORD_BIAS_STEP,
) = range(8)
RECORD_WORDS = 8
"""A quantised weight: address of its panels, in_features, groups and bytes of a block; the rest as in `matmul`."""

_MOST_ROWS = 8
_ZERO = np.float32(0.0)
# Items of work for each thread, so that the last one to finish holds up little.
_ITEMS_PER_THREAD = 16
# Bytes of a packed weight that one thread takes at a time: enough to make the taking cheap, little enough to share out.
_BYTES_AT_ONCE = 32768
_GATHER_PARTS = 4


def _make_worker(form: Form) -> Any:
    tile1, tile2, tile4, tile8 = (make_tile(rows, form) for rows in (1, 2, 4, 8))
    like = np.uint16(0) if form.stored_pairs else _ZERO
    size = 2 if form.stored_pairs else 4
    most_rows = MOST_PAIR_ROWS if form.stored_pairs else MOST_FLOAT_ROWS
    packed, needs_sums = form.stored_pairs, form.needs_sums

    @helper
    def sum_groups(x: int, stride: int, rows: int, width: int, sums: Any) -> None:
        """sums[r, g] = sum of row r over group g, in float32."""
        group = width // sums.shape[1]
        for row in range(rows):
            values = vector(x + row * stride, width, like)
            for index in range(sums.shape[1]):
                total = _ZERO
                for value in values[index * group : (index + 1) * group]:
                    total += widen(value)
                sums[row, index] = total

    @helper
    def tiles(
        rows: int,
        x: int,
        xstr: int,
        sums: int,
        sstr: int,
        w: int,
        column: int,
        groups: int,
        steps: int,
        block: int,
        c: int,
        bias: int,
    ) -> int:
        """One tile of at most `rows` rows; returns how many it did."""
        if rows >= 8:
            tile8(x, xstr, sums, sstr, w, column, groups, steps, block, c, bias)
            return 8
        if rows >= 4:
            tile4(x, xstr, sums, sstr, w, column, groups, steps, block, c, bias)
            return 4
        if rows >= 2:
            tile2(x, xstr, sums, sstr, w, column, groups, steps, block, c, bias)
            return 2
        tile1(x, xstr, sums, sstr, w, column, groups, steps, block, c, bias)
        return 1

    @helper
    def columns(
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
        bias: int,
    ) -> int:
        done = 0
        for column in range(0, PANEL, VECTORS * LANES):
            at = 4 * column
            done = tiles(rows, x, xstr, sums, sstr, w, column, groups, steps, block, c + at, bias + at)
        return done

    @helper
    def write(rows: int, sums: Any, scratch: int, out: int, stride: int, width: int) -> None:
        if width < PANEL:
            write_partial(sums, rows, out, stride, width, like)
        elif packed:
            write_pair_sums(rows, scratch, out, stride)
        else:
            write_float_sums(rows, scratch, out, stride)

    @helper
    def write_floats(rows: int, sums: Any, scratch: int, out: int, stride: int, width: int) -> None:
        if width < PANEL:
            write_partial(sums, rows, out, stride, width, _ZERO)
        else:
            write_float_sums(rows, scratch, out, stride)

    @helper
    def worker(part: int, parts: int, task_at: int) -> None:
        task = vector(task_at, TASK_WORDS, np.int64(0))
        counter = task[TASK_COUNTER : TASK_COUNTER + 1]
        rows, result = task[TASK_ROWS], task[TASK_RESULT]
        x, x_stride = task[TASK_X], task[TASK_X_STRIDE] * size
        out, out_stride = task[TASK_OUT], task[TASK_OUT_STRIDE]
        record = vector(task[TASK_RECORD], RECORD_WORDS, np.int64(0))
        width, groups, block = record[RECORD_WIDTH], record[RECORD_GROUPS], record[RECORD_BLOCK]
        features, bias_step = record[RECORD_FEATURES], record[RECORD_BIAS_STEP]
        steps, panel_bytes = width // groups // STEP, groups * block
        section = (features + PANEL - 1) // PANEL
        panels = section if result == GATED else section * record[RECORD_SECTIONS]

        wanted = (_ITEMS_PER_THREAD * parts + panels - 1) // panels
        rows_at_once = min(ROWS_AT_ONCE, max(4 * most_rows, (rows + wanted - 1) // wanted))
        rows_at_once = (rows_at_once + most_rows - 1) // most_rows * most_rows
        shares = (rows + rows_at_once - 1) // rows_at_once
        panels_at_once = max(1, min(_BYTES_AT_ONCE // panel_bytes, panels // (2 * parts)))
        bundles = (panels + panels_at_once - 1) // panels_at_once
        x_sums = np.empty((rows if needs_sums else 0, groups), np.float32)
        if needs_sums:
            # Every thread for itself: cheaper than waiting for each other.
            sum_groups(x, x_stride, rows, width, x_sums)
        scratch = np.empty((2, _MOST_ROWS, PANEL), np.float32)
        at = scratch.ctypes.data
        while True:
            item = next_item(counter)
            if item >= bundles * shares:
                break
            first_row = item // bundles * rows_at_once
            end_row = min(first_row + rows_at_once, rows)
            first = item % bundles * panels_at_once
            for panel in range(first, min(first + panels_at_once, panels)):
                weights = record[RECORD_PANELS] + panel * panel_bytes
                bias = record[RECORD_BIAS] + panel * bias_step
                inside = panel % section
                shown = min(PANEL, features - inside * PANEL)
                column = inside * PANEL + panel // section * features
                row = first_row
                while row < end_row:
                    here = min(most_rows, end_row - row)
                    place, sums = x + row * x_stride, x_sums.ctypes.data + row * groups * 4
                    done = columns(here, place, x_stride, sums, groups * 4, weights, groups, steps, block, at, bias)
                    if result == GATED:
                        beside = weights + section * panel_bytes
                        columns(
                            here,
                            place,
                            x_stride,
                            sums,
                            groups * 4,
                            beside,
                            groups,
                            steps,
                            block,
                            at + 4 * _MOST_ROWS * PANEL,
                            bias + section * bias_step,
                        )
                        gate_sums(scratch[0], scratch[1], done)
                    if result == FLOAT32:
                        target = out + (row * out_stride + column) * 4
                        write_floats(done, scratch[0], at, target, out_stride * 4, shown)
                    else:
                        target = out + (row * out_stride + column) * size
                        write(done, scratch[0], at, target, out_stride * size, shown)
                    row += done

    return worker


def _make_gather(form: Form) -> Any:
    scale_at = make_scale_at(form.half)
    nibbles, has_minimum, scale_bytes, step_bytes = form.nibbles, form.has_minimum, form.scale_bytes, form.step_bytes
    like = np.uint16(0) if form.stored_pairs else _ZERO

    @helper
    def gather(part: int, parts: int, record_at: int, ids: Any, out: int) -> None:
        record = vector(record_at, RECORD_WORDS, np.int64(0))
        width, groups, block = record[RECORD_WIDTH], record[RECORD_GROUPS], record[RECORD_BLOCK]
        count, group = ids.shape[0], width // groups
        results = matrix(out, count, width, like)
        for row in range(count * part // parts, count * (part + 1) // parts):
            panel, feature = ids[row] // PANEL, ids[row] % PANEL
            for index in range(groups):
                start = record[RECORD_PANELS] + (panel * groups + index) * block
                scales = start + group // STEP * step_bytes
                codes = vector(start, group // STEP * step_bytes, np.uint8(0))
                factor, base = scale_at(scales + feature * scale_bytes), _ZERO
                if has_minimum:
                    base = scale_at(scales + (PANEL + feature) * scale_bytes)
                for k in range(group):
                    pair, half = k % STEP // 2, k % 2
                    if nibbles:
                        byte = codes[(k // STEP * PANEL + feature) * 4 + 2 * half + pair // 2]
                        code = (np.int64(byte) >> (4 * (pair % 2))) & 15
                        if not has_minimum:
                            code -= 8
                    else:
                        lane = (k // STEP * 4 + pair) * (PANEL // LANES) + feature // LANES
                        code = np.int64(np.int8(codes[(2 * lane + half) * LANES + feature % LANES]))
                    results[row, index * group + k] = narrow(factor * np.float32(code) + base, like)

    return gather


def _named(form: Form, what: str) -> str:
    """Names tell compiled code apart where it is kept."""
    parts = ("4" if form.nibbles else "8", "half" if form.half else "float")
    ends = ("minimum" if form.has_minimum else "symmetric", "pairs" if form.stored_pairs else "floats")
    return "_".join((what, *parts, *ends))


def _make_address(form: Form) -> Callable[[], int]:
    worker = _make_worker(form)

    def address() -> int:
        found: int = address_of(worker)
        return found

    address.__qualname__ = _named(form, "worker")
    return kernel(address)


def _make_look_up(form: Form) -> Callable[[int, int, int, int, int], None]:
    gather = _make_gather(form)

    def look_up(board: int, record: int, ids: int, count: int, out: int) -> None:
        run(board, _GATHER_PARTS, gather, (record, vector(ids, count, np.int64(0)), out))

    look_up.__qualname__ = _named(form, "look_up")
    return kernel(look_up)


_FORMS = [Form(*flags) for flags in product((True, False), repeat=4)]

WORKERS = {form: _make_address(form) for form in _FORMS}
"""For each form a function that returns the address of its worker; compiled when it is first called."""

LOOK_UPS = {form: _make_look_up(form) for form in _FORMS}
"""For each form a function (board, record, ids, count, out): rows ids int64 [count] of a weight of one section,
dequantised, to out [count, in_features]; all by address."""
