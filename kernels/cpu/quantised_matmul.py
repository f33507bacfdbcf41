"""Workers for products with quantised weights; see `quantised_form` for the layout.

They take the same tasks as the workers of `matmul`, with a record of their own. A row is summed in the same order
whatever rows are beside it, as there: group by group, the products of codes first, then times the scale. Rows that fill
two register tiles or more are multiplied by opened groups (see `quantised_open`), others by the weights as they lie,
which makes the same sums. Where the processor multiplies tiles, `quantised_amx` has workers of another order of sums,
for one row as for many.
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
from pagemill.kernels.cpu.quantised_form import STEP, Form
from pagemill.kernels.cpu.quantised_open import make_open, make_sizes
from pagemill.kernels.cpu.quantised_tile import MOST_FLOAT_ROWS, MOST_PAIR_ROWS, VECTORS, make_tile
from pagemill.kernels.cpu.simd import LANES, next_item, widen
from pagemill.kernels.cpu.team import address_of
from pagemill.kernels.cpu.views import vector

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

SPARE_ROWS = 16
"""Rows of sums, and of sums of groups, that a worker has memory for beyond those it is given."""
_ZERO = np.float32(0.0)
# Items of work for each thread, so that the last one to finish holds up little.
_ITEMS_PER_THREAD = 16
# Bytes of a packed weight that one thread takes at a time: enough to make the taking cheap, little enough to share out.
_BYTES_AT_ONCE = 32768


def make_columns(form: Form) -> Any:
    """columns(rows, x, distance of its rows, sums of its groups, distance of theirs, panel, groups, steps of a group,
    bytes of a block, c, bias, memory for opened groups, which panel comes next): a panel's sums for some rows."""
    tile1, tile2, tile4, tile8 = (make_tile(rows, form) for rows in (1, 2, 4, 8))
    most_rows = MOST_PAIR_ROWS if form.stored_pairs else MOST_FLOAT_ROWS
    opened_tile = make_tile(most_rows, form, opened=True)
    open_groups = make_open(form, exact=False)
    opened_bytes, groups_at_once = make_sizes(form)
    width = 2 if form.stored_pairs else 4

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
            tile8(x, xstr, sums, sstr, w, column, groups, steps, block, c, bias, 0, 0)
            return 8
        if rows >= 4:
            tile4(x, xstr, sums, sstr, w, column, groups, steps, block, c, bias, 0, 0)
            return 4
        if rows >= 2:
            tile2(x, xstr, sums, sstr, w, column, groups, steps, block, c, bias, 0, 0)
            return 2
        tile1(x, xstr, sums, sstr, w, column, groups, steps, block, c, bias, 0, 0)
        return 1

    @helper
    def by_opened(
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
        room: int,
        after: int,
    ) -> None:
        """Whole tiles of rows."""
        begin_sums(rows, c, bias)
        size, most = opened_bytes(steps), groups_at_once(steps)
        group_bytes = STEP * steps * width
        share = (block + rows // most_rows - 1) // (rows // most_rows)
        for first in range(0, groups, most):
            count = min(most, groups - first)
            ahead = w + (first + most) * block if first + most < groups else after
            open_groups(w + first * block, count, steps, block, room, size)
            for row in range(0, rows, most_rows):
                for column in range(0, PANEL, VECTORS * LANES):
                    opened_tile(
                        x + row * xstr + first * group_bytes,
                        xstr,
                        sums + row * sstr + 4 * first,
                        sstr,
                        room,
                        column,
                        count,
                        steps,
                        size,
                        c + 4 * (row * PANEL + column),
                        ahead + row // most_rows * share,
                        block,
                        share if column == 0 else 0,
                    )

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
        room: int,
        after: int,
    ) -> None:
        row = 0
        if rows >= 2 * most_rows:
            row = rows // most_rows * most_rows
            by_opened(row, x, xstr, sums, sstr, w, groups, steps, block, c, bias, room, after)
        while row < rows:
            here = min(most_rows, rows - row)
            done = 0
            for column in range(0, PANEL, VECTORS * LANES):
                at = 4 * column
                done = tiles(
                    here,
                    x + row * xstr,
                    xstr,
                    sums + row * sstr,
                    sstr,
                    w,
                    column,
                    groups,
                    steps,
                    block,
                    c + 4 * row * PANEL + at,
                    bias + at,
                )
            row += done

    return columns


@helper
def begin_sums(rows: int, c: int, bias: int) -> None:
    """Let the sums of so many rows begin with the bias."""
    added, all_sums = vector(bias, PANEL, _ZERO), vector(c, rows * PANEL, _ZERO)
    for row in range(rows):
        for column in range(PANEL):
            all_sums[row * PANEL + column] = added[column]


@helper
def _nothing() -> None:
    pass


def make_worker(form: Form, most_rows: int, needs_sums: bool, columns: Any, finish: Any = _nothing) -> Any:
    """A worker for the products of rows by `columns`, which see in `make_columns`; it does most_rows at a time best.

    needs_sums: whether it looks at the sums of groups. finish(): called at the end.
    """
    like = np.uint16(0) if form.stored_pairs else _ZERO
    size = 2 if form.stored_pairs else 4
    packed = form.stored_pairs
    opened_bytes, groups_at_once = make_sizes(form)

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
        x_sums = np.zeros((rows + SPARE_ROWS if needs_sums else 0, groups), np.float32)
        if needs_sums:
            # Every thread for itself: cheaper than waiting for each other.
            sum_groups(x, x_stride, rows, width, x_sums)
        scratch = np.empty((2, min(rows, ROWS_AT_ONCE) + SPARE_ROWS, PANEL), np.float32)
        at, beside_at = scratch[0].ctypes.data, scratch[1].ctypes.data
        opened = groups_at_once(steps) * opened_bytes(steps) // 4
        room = np.empty(opened + (SPARE_ROWS + 1) * PANEL, np.float32)
        room[opened:] = _ZERO
        while True:
            item = next_item(counter)
            if item >= bundles * shares:
                break
            row = item // bundles * rows_at_once
            here = min(rows_at_once, rows - row)
            first = item % bundles * panels_at_once
            last = min(first + panels_at_once, panels) - 1
            for panel in range(first, last + 1):
                weights = record[RECORD_PANELS] + panel * panel_bytes
                bias = record[RECORD_BIAS] + panel * bias_step
                inside = panel % section
                shown = min(PANEL, features - inside * PANEL)
                column = inside * PANEL + panel // section * features
                place, sums = x + row * x_stride, x_sums.ctypes.data + row * groups * 4
                beside = weights + section * panel_bytes
                # Threads take turns as long as they are equally fast; what is behind the last panel does no harm.
                after = weights + panel_bytes * (1 if panel < last else 1 + (parts - 1) * panels_at_once)
                room_at = (room.ctypes.data + 63) // 64 * 64  # here, since an array lives until it is last named
                columns(
                    here,
                    place,
                    x_stride,
                    sums,
                    groups * 4,
                    weights,
                    groups,
                    steps,
                    block,
                    at,
                    bias,
                    room_at,
                    beside if result == GATED else after,
                )
                if result == GATED:
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
                        beside_at,
                        bias + section * bias_step,
                        room_at,
                        after,
                    )
                    gate_sums(scratch[0], scratch[1], here)
                if result == FLOAT32:
                    target = out + (row * out_stride + column) * 4
                    write_floats(here, scratch[0], at, target, out_stride * 4, shown)
                else:
                    target = out + (row * out_stride + column) * size
                    write(here, scratch[0], at, target, out_stride * size, shown)
        finish()

    return worker


def _make_address(form: Form) -> Callable[[], int]:
    most_rows = MOST_PAIR_ROWS if form.stored_pairs else MOST_FLOAT_ROWS
    return worker_address(form.named("worker"), make_worker(form, most_rows, form.needs_sums, make_columns(form)))


def worker_address(name: str, worker: Any) -> Callable[[], int]:
    """A function that returns the address of a worker, which is compiled when it is first called."""

    def address() -> int:
        found: int = address_of(worker)
        return found

    address.__qualname__ = name
    return kernel(address)


FORMS = [Form(*flags) for flags in product((True, False), repeat=4)]

WORKERS = {form: _make_address(form) for form in FORMS}
"""For each form the address of its worker, by a function."""
