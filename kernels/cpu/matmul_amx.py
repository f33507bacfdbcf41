"""The worker of `matmul` for bfloat16 where the processor multiplies tiles (see `amx`): up to 32 rows by a panel.

Six tiles hold the sums of 32 rows and 48 columns, so each tile that is loaded is multiplied two or three times. Rows
that do not fill two tiles are halved, so that both halves have the same number; of an odd number the middle one is in
both, and is computed twice. Up to 16 rows use one tile. Rows cost what they number, and a row's sums have the same bits
with any others.
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
from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.matmul import PANEL, fetch, make_worker
from pagemill.kernels.cpu.team import address_of
from pagemill.kernels.cpu.views import vector

_MOST_ROWS = 2 * TILE
_ACROSS = PANEL // TILE
_I64 = ir.IntType(64)
_ZERO = np.float32(0.0)

# Tiles of two groups of rows: the sums, one of activations, one of weights. Of one group: more of weights.
_LEFT, _RIGHT = 2 * _ACROSS, 2 * _ACROSS + 1
_ALONE_LEFT, _ALONE_RIGHT = _ACROSS, _ACROSS + 1
_WEIGHTS = 1 << _RIGHT
_ALONE_WEIGHTS = sum(1 << _ALONE_RIGHT + column for column in range(_ACROSS))

TILE_DEPTH = TILE
"""Words of a panel that a tile takes at a time: 32 bfloat16 along in_features."""


def _make_product(groups: int) -> Callable[..., Any]:
    """c[r, n] = bias[n] + sum over k of x[r, k] * panel[k, n] for 1 or 2 groups of rows and 48 columns.

    int64: addresses of x and of the second group's, bytes from row to row, address of the panel, steps of 32 along k,
    address of c (float32, rows of 48) and of the second group's, whether c holds the bias already, address of what to
    fetch meanwhile, bytes of it a step.
    """

    @intrinsic
    def product(
        typingctx: Any,
        x: Any,
        x2: Any,
        stride: Any,
        w: Any,
        steps: Any,
        c: Any,
        c2: Any,
        add: Any,
        ahead: Any,
        step: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            x_at, x2_at, x_stride, w_at, count, c_at, c2_at, adds, ahead_at, ahead_step = args
            panel_stride = ir.Constant(_I64, 4 * PANEL)
            places = [
                (group * _ACROSS + column, builder.add(sums, ir.Constant(_I64, 4 * TILE * column)))
                for group, sums in enumerate((c_at, c2_at)[:groups])
                for column in range(_ACROSS)
            ]
            with builder.if_else(builder.icmp_signed("!=", adds, ir.Constant(_I64, 0))) as (with_bias, without):
                with with_bias:
                    for tile, place in places:
                        amx.load(builder, tile, place, panel_stride)
                with without:
                    for tile, _ in places:
                        amx.zero(builder, tile)
            with cgutils.for_range(builder, count) as loop:
                along = builder.mul(loop.index, ir.Constant(_I64, 4 * TILE_DEPTH))
                below = builder.add(w_at, builder.mul(loop.index, ir.Constant(_I64, 4 * PANEL * TILE_DEPTH)))
                left = [builder.add(start, along) for start in (x_at, x2_at)]
                right = [builder.add(below, ir.Constant(_I64, 4 * TILE * column)) for column in range(_ACROSS)]
                if groups == 1:
                    amx.load(builder, _ALONE_LEFT, left[0], x_stride)
                    for column in range(_ACROSS):
                        amx.load(builder, _ALONE_RIGHT + column, right[column], panel_stride)
                    for column in range(_ACROSS):
                        amx.multiply(builder, column, _ALONE_LEFT, _ALONE_RIGHT + column)
                else:
                    # Each column of weights meets both groups, the one that is loaded already first.
                    group = 0
                    amx.load(builder, _LEFT, left[group], x_stride)
                    for column in range(_ACROSS):
                        amx.load(builder, _RIGHT, right[column], panel_stride)
                        amx.multiply(builder, group * _ACROSS + column, _LEFT, _RIGHT)
                        group = 1 - group
                        amx.load(builder, _LEFT, left[group], x_stride)
                        amx.multiply(builder, group * _ACROSS + column, _LEFT, _RIGHT)
                _fetch_lines(builder, builder.add(ahead_at, builder.mul(loop.index, ahead_step)), ahead_step)
            for tile, place in places:
                amx.store(builder, tile, place, panel_stride)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 10), codegen

    return product


def _fetch_lines(builder: Any, address: Any, size: Any) -> None:
    lines = builder.lshr(builder.add(size, ir.Constant(_I64, 63)), ir.Constant(_I64, 6))
    with cgutils.for_range(builder, lines) as loop:
        fetch(builder, builder.add(address, builder.mul(loop.index, ir.Constant(_I64, 64))))


_one_group, _two_groups = _make_product(1), _make_product(2)


@helper
def _columns(
    rows: int, x: int, xstr: int, w: int, depth: int, c: int, bias: int, biased: int, ahead: int, step: int
) -> None:
    if biased:
        added, sums = vector(bias, PANEL, _ZERO), vector(c, rows * PANEL, _ZERO)
        for row in range(rows):
            for column in range(PANEL):
                sums[row * PANEL + column] = added[column]
    steps = depth // TILE_DEPTH
    if rows <= TILE:
        _one_group(x, x, xstr, w, steps, c, c, biased, ahead, step * TILE_DEPTH)
    else:
        second = rows - (rows + 1) // 2
        _two_groups(x, x + second * xstr, xstr, w, steps, c, c + 4 * PANEL * second, biased, ahead, step * TILE_DEPTH)


@helper
def _prepare(rows: int, before: int) -> int:
    if rows != before:
        if rows <= TILE:
            amx.configure(rows, _ALONE_WEIGHTS)
        else:
            amx.configure((rows + 1) // 2, _WEIGHTS)
    return rows


@helper
def _finish() -> None:
    amx.release()


_worker = make_worker(True, _MOST_ROWS, _columns, _prepare, _finish)


@kernel
def tile_worker() -> int:
    """The address of the worker for bfloat16 in tiles, where in_features is a multiple of 32."""
    return address_of(_worker)
