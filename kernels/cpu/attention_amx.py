"""Products of attention in tiles of AMX (see `amx`): up to 32 rows of queries or weights by 32 tokens or columns.

Keys lie in the pool as tiles want them: a row a pair of dimensions, 16 tokens in it. Woven values are the same with
pairs of tokens, 32 of which are a tile's step; weights of tokens that a row does not see are 0, and so are values that
nobody sees. Sums run over dimensions or tokens in ascending order, 32 at a time, whatever the number of rows: so here
too a row has the same bits in a prefill, in a decode, and beside any other rows.

An item of more than 16 rows is done in tiles of 16 rows throughout, where the last ones may hold no row: what is in
them is computed, and not looked at.
"""

# llvmlite and numba ship no types, and `intrinsic` returns what numba makes of a function.
# mypy: disable-error-code="untyped-decorator, import-untyped, no-any-return"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu import amx
from pagemill.kernels.cpu.amx import TILE
from pagemill.kernels.cpu.attention_tiles import stand_alone
from pagemill.kernels.cpu.jit import exact_helper
from pagemill.kernels.cpu.views import vector

TILE_TOKENS = 2 * TILE
"""Tokens of a step along the values."""

_ROW_BYTES = 4 * TILE
_LEFT, _RIGHT = 4, 6  # the first of two tiles; the sums are 0 to 3
_KEYS_OR_VALUES = 0b11 << _RIGHT
_I64 = ir.IntType(64)
_ZERO = np.float32(0.0)


def _make_block(groups: int) -> Callable[..., Any]:
    """c[r, n] = a[r, :] @ b[:, n], or added to it, for 1 or 2 groups of 16 rows and twice 16 columns.

    int64: address of a, bytes from row to row; addresses of the first and second 16 columns of b, bytes from row to row
    and from step to step; steps of 16 words; address of c, bytes from row to row, and whether to add to what is there.
    """

    @intrinsic
    def block(
        typingctx: Any,
        a: Any,
        astr: Any,
        b0: Any,
        b1: Any,
        bstr: Any,
        bstep: Any,
        steps: Any,
        c: Any,
        cstr: Any,
        add: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            left, left_stride, first, second, right_stride, right_step, count, out, out_stride, adds = args

            def below(address: Any, stride: Any, group: int) -> Any:
                return builder.add(address, builder.mul(stride, ir.Constant(_I64, TILE * group)))

            places = [
                (2 * group + half, builder.add(below(out, out_stride, group), ir.Constant(_I64, _ROW_BYTES * half)))
                for group in range(groups)
                for half in range(2)
            ]
            with builder.if_else(builder.icmp_signed("!=", adds, ir.Constant(_I64, 0))) as (to_them, anew):
                with to_them:
                    for tile, place in places:
                        amx.load(builder, tile, place, out_stride)
                with anew:
                    for tile, _ in places:
                        amx.zero(builder, tile)
            lefts = [below(left, left_stride, group) for group in range(groups)]
            with cgutils.for_range(builder, count) as loop:
                along = builder.mul(loop.index, ir.Constant(_I64, _ROW_BYTES))
                down = builder.mul(loop.index, right_step)
                amx.load(builder, _LEFT, builder.add(lefts[0], along), left_stride)
                for half, start in enumerate((first, second)):
                    amx.load(builder, _RIGHT + half, builder.add(start, down), right_stride)
                    amx.multiply(builder, half, _LEFT, _RIGHT + half)
                if groups == 2:
                    amx.load(builder, _LEFT + 1, builder.add(lefts[1], along), left_stride)
                    for half in range(2):
                        amx.multiply(builder, 2 + half, _LEFT + 1, _RIGHT + half)
            for tile, place in places:
                amx.store(builder, tile, place, out_stride)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 10), codegen

    return block


_block1, _block2 = _make_block(1), _make_block(2)

AT_ONCE = 2 * TILE
"""Rows that a call takes at most."""


@exact_helper
def begin_tiles(rows: int) -> None:
    """Set the tiles up for an item of so many rows."""
    amx.configure(min(rows, TILE), _KEYS_OR_VALUES)


@exact_helper
def end_tiles() -> None:
    amx.release()


@exact_helper
def tile_scores(
    rows: int,
    queries: int,
    query_bytes: int,
    k_place: Any,
    first: int,
    last: int,
    key_step: int,
    words: int,
    scores: int,
    score_bytes: int,
) -> None:
    """Products of rows with the keys at k_place[first:last], 16 tokens each; those behind the last are no scores."""
    stand_alone()
    for index in range(first, last, 2):
        here, beside = k_place[index], k_place[min(index + 1, last - 1)]
        target, steps, step = scores + index * _ROW_BYTES, words // TILE, TILE * key_step
        if rows > TILE:
            _block2(queries, query_bytes, here, beside, key_step, step, steps, target, score_bytes, 0)
        else:
            _block1(queries, query_bytes, here, beside, key_step, step, steps, target, score_bytes, 0)


@exact_helper
def clear_beside(packed: int, step_bytes: int, low: int, high: int) -> None:
    """Zeros for the tokens that share a tile of woven values with the seen ones low <= token < high."""
    for step in range(low // TILE_TOKENS * TILE, low // 2):
        vector(packed + step * step_bytes, step_bytes // 4, _ZERO)[:] = _ZERO
    for step in range((high + 1) // 2, -(-high // TILE_TOKENS) * TILE):
        vector(packed + step * step_bytes, step_bytes // 4, _ZERO)[:] = _ZERO


@exact_helper
def tile_values(
    rows: int, weights: int, weight_bytes: int, packed: int, low: int, high: int, sums: int, sum_bytes: int
) -> None:
    """Add the weighted values of the tokens low <= t < high, and their neighbours of weight 0, to the sums of rows."""
    stand_alone()
    first = low // TILE_TOKENS
    steps = -(-high // TILE_TOKENS) - first
    left, step = weights + first * _ROW_BYTES, TILE * sum_bytes
    for column in range(0, sum_bytes, 2 * _ROW_BYTES):
        here, target = packed + first * step + column, sums + column
        if rows > TILE:
            _block2(left, weight_bytes, here, here + _ROW_BYTES, sum_bytes, step, steps, target, sum_bytes, 1)
        else:
            _block1(left, weight_bytes, here, here + _ROW_BYTES, sum_bytes, step, steps, target, sum_bytes, 1)


def use_tiles(dtype: torch.dtype, block_size: int, dim: int, scale: float) -> bool:
    """Whether attention of this form shall multiply in tiles: always or never, since the bits of a row depend on it."""
    return dtype == torch.bfloat16 and block_size % TILE == 0 and dim % (2 * TILE) == 0 and scale > 0 and amx.allowed()
