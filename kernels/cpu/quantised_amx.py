"""Products with quantised weights where the processor multiplies tiles (see `amx`): up to 16 rows by opened groups.

A tile takes a step of 32 in_features, so the sum over a group stays in one until it meets the scale: it is stored, and
read by vectors, which add it times the scale to the row's sum, in registers over many groups. That takes about as long
as the tiles themselves. Scaled weights would not need it, but they would be rounded to bfloat16, and a product of one
row would wait for the scaling.

Up to three rows go past vectors that make the same sums (`quantised_few`); those of `quantised_tile` make others. With
9 to 16 rows a block is a third of a panel, otherwise registers would not hold its sums.
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

from pagemill.kernels.cpu import amx
from pagemill.kernels.cpu.amx import TILE
from pagemill.kernels.cpu.jit import helper
from pagemill.kernels.cpu.matmul import PANEL, multiply_floats
from pagemill.kernels.cpu.quantised_few import MOST_ROWS, TILE_GROUP, make_few
from pagemill.kernels.cpu.quantised_form import STEP, Form, load, plus
from pagemill.kernels.cpu.quantised_matmul import FORMS, begin_sums, make_worker, worker_address
from pagemill.kernels.cpu.quantised_open import LINE_BYTES, VECTOR_BYTES, fetch_share, make_open, make_sizes, store
from pagemill.kernels.cpu.simd import LANES, splat
from pagemill.kernels.cpu.tiny_numbers import count_as_before, count_as_zero
from pagemill.kernels.cpu.views import vector

_ACROSS = PANEL // TILE
_LEFT, _RIGHT = _ACROSS, _ACROSS + 1  # tiles of activations and the first of weights; the sums are 0 to 2
_WEIGHTS = sum(1 << _RIGHT + column for column in range(_ACROSS))
_ROWS = (1, 2, 4, 8, TILE)
_WIDE_ROWS = 8  # whose sums over a whole panel fit the registers
_FEW_GROUPS = 3  # opened ahead where rows are few
_ZERO = np.float32(0.0)
_F32 = ir.FloatType()
_I64 = ir.IntType(64)
_VF32 = ir.VectorType(_F32, LANES)


def _make_block(rows: int, has_minimum: bool) -> Callable[..., Any]:
    """c[r, n] += sum over k of x[r, k] * opened[n, k] for `rows` rows and 48 columns, or 16 of more than 8 rows.

    int64: address of x, bytes from row to row; of the sums of its groups, bytes from row to row; address of the opened
    groups, their number, steps of a tile in one, bytes of one; address of c (float32, rows of 48) and of memory for
    `rows` x 48 sums of a group; the block to fetch of meanwhile for the first group, bytes of a block, and how many of
    each to fetch. Tiles may have been configured for fewer rows: the last ones of c are then no sums.
    """
    across = _ACROSS if rows <= _WIDE_ROWS else 1

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
        sum_: Any,
        ahead: Any,
        block: Any,
        share: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            (
                x_at,
                x_stride,
                s_at,
                s_stride,
                w_at,
                n,
                per_group,
                group_bytes,
                c_at,
                sum_at,
                ahead_at,
                block_bytes,
                share_bytes,
            ) = args

            def times(value: Any, constant: int) -> Any:
                return builder.mul(value, ir.Constant(_I64, constant))

            def places(address: Any, row: int) -> list[Any]:
                return [plus(builder, address, row * LINE_BYTES + column * VECTOR_BYTES) for column in range(across)]

            line = ir.Constant(_I64, LINE_BYTES)
            totals = [[cgutils.alloca_once(builder, _VF32) for _ in range(across)] for _ in range(rows)]
            for row, kept in enumerate(totals):
                for pointer, place in zip(kept, places(c_at, row), strict=True):
                    builder.store(load(builder, place, _VF32), pointer)
            with cgutils.for_range(builder, n) as group:
                for column in range(across):
                    amx.zero(builder, column)
                start = builder.add(w_at, builder.mul(group.index, group_bytes))
                fetch_share(builder, builder.add(ahead_at, builder.mul(group.index, block_bytes)), share_bytes)
                with cgutils.for_range(builder, per_group) as step:
                    index = builder.add(builder.mul(group.index, per_group), step.index)
                    amx.load(builder, _LEFT, builder.add(x_at, times(index, 4 * TILE)), x_stride)
                    below = builder.add(start, times(step.index, TILE * LINE_BYTES))
                    for column, place in enumerate(places(below, 0)):
                        amx.load(builder, _RIGHT + column, place, line)
                        amx.multiply(builder, column, _LEFT, _RIGHT + column)
                for column, place in enumerate(places(sum_at, 0)):
                    amx.store(builder, column, place, line)
                scales_at = builder.add(start, times(per_group, TILE * LINE_BYTES))
                scales = [load(builder, place, _VF32) for place in places(scales_at, 0)]
                minima = [load(builder, place, _VF32) for place in places(scales_at, 1)] if has_minimum else []
                for row, kept in enumerate(totals):
                    if has_minimum:
                        at = builder.add(builder.add(s_at, times(s_stride, row)), times(group.index, 4))
                        x_sum = splat(builder, load(builder, at, _F32))
                    for column, place in enumerate(places(sum_at, row)):
                        total = builder.load(kept[column])
                        if has_minimum:
                            total = multiply_floats(builder, minima[column], x_sum, total)
                        total = multiply_floats(builder, scales[column], load(builder, place, _VF32), total)
                        builder.store(total, kept[column])
            for row, kept in enumerate(totals):
                for pointer, place in zip(kept, places(c_at, row), strict=True):
                    store(builder, builder.load(pointer), place)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 13), codegen

    return block


def _make_columns(form: Form) -> Any:
    """As `quantised_matmul.make_columns`."""
    block1, block2, block4, block8, block16 = (_make_block(rows, form.has_minimum) for rows in _ROWS)
    open_groups = make_open(form, exact=True)
    opened_bytes, groups_at_once = make_sizes(form)
    few = make_few(form)

    @helper
    def blocks(
        rows: int,
        x: int,
        xstr: int,
        sums: int,
        sstr: int,
        w: int,
        groups: int,
        steps: int,
        size: int,
        c: int,
        spare: int,
        ahead: int,
        block: int,
        share: int,
    ) -> None:
        if rows == 1:
            block1(x, xstr, sums, sstr, w, groups, steps, size, c, spare, ahead, block, share)
        elif rows == 2:
            block2(x, xstr, sums, sstr, w, groups, steps, size, c, spare, ahead, block, share)
        elif rows <= 4:
            block4(x, xstr, sums, sstr, w, groups, steps, size, c, spare, ahead, block, share)
        elif rows <= 8:
            block8(x, xstr, sums, sstr, w, groups, steps, size, c, spare, ahead, block, share)
        else:
            for column in range(0, PANEL, TILE):
                block16(
                    x,
                    xstr,
                    sums,
                    sstr,
                    w + 4 * column,
                    groups,
                    steps,
                    size,
                    c + 4 * column,
                    spare,
                    ahead + column // TILE * share,
                    block,
                    share,
                )

    @helper
    def small(
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
        size: int,
        spare: int,
    ) -> None:
        """One block of rows that does not take long: groups are opened while the ones before are multiplied."""
        tile_steps, opened = steps * STEP // TILE_GROUP, min(_FEW_GROUPS, groups)
        open_groups(w, opened, steps, block, room, size)
        first = 0
        here, there = room, room + _FEW_GROUPS * size
        while first < groups:
            count = opened
            following = first + count
            opened = min(_FEW_GROUPS, groups - following)
            if opened > 0:
                open_groups(w + following * block, opened, steps, block, there, size)
            place = x + first * tile_steps * 4 * TILE
            blocks(rows, place, xstr, sums + 4 * first, sstr, here, count, tile_steps, size, c, spare, 0, 0, 0)
            first = following
            here, there = there, here

    @helper
    def by_tiles(
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
        """All blocks have the same number of rows; of the last one some may be those of the one before, and are
        computed twice. Each has 16 rows of c, until all are summed."""
        number = (rows + TILE - 1) // TILE
        each = (rows + number - 1) // number
        begin_sums(min(2 * rows, number * TILE), c, bias)
        size, most, tile_steps = opened_bytes(steps), groups_at_once(steps), steps * STEP // TILE_GROUP
        spare = room + most * size
        amx.configure(each, _WEIGHTS)
        if rows <= _WIDE_ROWS and most >= 2 * _FEW_GROUPS:
            small(rows, x, xstr, sums, sstr, w, groups, steps, block, c, room, size, spare)
            return
        share = (block + number * _ACROSS - 1) // (number * _ACROSS)
        for first in range(0, groups, most):
            count = min(most, groups - first)
            ahead = w + (first + most) * block if first + most < groups else after
            open_groups(w + first * block, count, steps, block, room, size)
            for index in range(number):
                row = min(index * each, rows - each)
                place = x + row * xstr + first * tile_steps * 4 * TILE
                at = sums + row * sstr + 4 * first
                blocks(
                    each,
                    place,
                    xstr,
                    at,
                    sstr,
                    room,
                    count,
                    tile_steps,
                    size,
                    c + index * TILE * LINE_BYTES,
                    spare,
                    ahead + index * _ACROSS * share,
                    block,
                    share,
                )
        if rows < number * TILE:
            all_sums = vector(c, number * TILE * PANEL, _ZERO)
            for index in range(1, number):
                to = min(index * each, rows - each) * PANEL
                for place in range(each * PANEL):
                    all_sums[to + place] = all_sums[index * TILE * PANEL + place]

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
        """Tiny numbers are zeros, whatever the number of rows: tiles know no other way."""
        before = count_as_zero()
        if rows <= MOST_ROWS:
            begin_sums(rows, c, bias)
            few(rows, x, xstr, sums, sstr, w, groups, steps, block, c, room, after)
        else:
            by_tiles(rows, x, xstr, sums, sstr, w, groups, steps, block, c, bias, room, after)
        count_as_before(before)

    return columns


@helper
def _finish() -> None:
    amx.release()


def _make_address(form: Form) -> Callable[[], int]:
    worker = make_worker(form, TILE, form.has_minimum, _make_columns(form), _finish)
    return worker_address(form.named("tile_worker"), worker)


WORKERS = {form: _make_address(form) for form in FORMS if form.stored_pairs}
"""For each form of weights for bfloat16 the address of its worker, by a function, where `amx.allowed` and groups are a
multiple of TILE_GROUP."""
