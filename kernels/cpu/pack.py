"""Weights into the panels of `matmul`, straight from where they are stored, by the whole team: a start waits for it.

A panel takes `PANEL` rows of the weight and holds them word by word along in_features, so that packing is a
transposition of 32-bit words, 16 by 16 of them in registers. Rows come by their addresses: several projections become
one weight, and float32 is rounded to bfloat16 on the way, without a copy in between that memory has to be found for.
"""

# llvmlite and numba ship no types, and `intrinsic` returns what numba makes of a function.
# mypy: disable-error-code="untyped-decorator, import-untyped, no-any-return"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pagemill.kernels.cpu.isa import LANES, to_bfloat
from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.matmul import PANEL
from pagemill.kernels.cpu.simd import narrow
from pagemill.kernels.cpu.team import Team, run
from pagemill.kernels.cpu.views import vector

_PARTS = 4  # of the panels, for each thread
_ROW = np.int64(0)
_WORD, _PAIR, _FLOAT = np.uint32(0), np.uint16(0), np.float32(0)

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_VI32 = ir.VectorType(_I32, LANES)
_VF32 = ir.VectorType(ir.FloatType(), LANES)


def _load_words(builder: Any, address: Any) -> Any:
    words = builder.load(builder.inttoptr(address, _VI32.as_pointer()))
    words.align = 4
    return words


def _load_rounded(builder: Any, address: Any) -> Any:
    """2 x 16 float32 as 16 words of two bfloat16."""
    halves = []
    for start in (0, 4 * LANES):
        floats = builder.load(builder.inttoptr(builder.add(address, ir.Constant(_I64, start)), _VF32.as_pointer()))
        floats.align = 4
        halves.append(to_bfloat(builder, floats))
    order = ir.Constant(ir.VectorType(_I32, 2 * LANES), list(range(2 * LANES)))
    return builder.bitcast(builder.shuffle_vector(*halves, order), _VI32)


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Squares of half the size swap places, then those inside of them, and so on."""
    rows = list(rows)
    size = LANES // 2
    while size:
        upper = [lane if not lane & size else LANES + lane - size for lane in range(LANES)]
        lower = [lane + size if not lane & size else LANES + lane for lane in range(LANES)]
        for index in (index for index in range(LANES) if not index & size):
            pair = rows[index], rows[index + size]
            rows[index], rows[index + size] = (
                builder.shuffle_vector(*pair, ir.Constant(_VI32, order)) for order in (upper, lower)
            )
        size //= 2
    return rows


def _make_mover(load: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def move(typingctx: Any, rows: Any, offset: Any, out: Any) -> Any:
        """16 words of 16 rows, whose addresses lie at `rows`, from a byte `offset` on, to a panel from `out` on."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            addresses = builder.inttoptr(args[0], _I64.as_pointer())
            starts = [builder.load(builder.gep(addresses, [ir.Constant(_I32, row)])) for row in range(LANES)]
            loaded = [load(builder, builder.add(start, args[1])) for start in starts]
            for index, column in enumerate(_transposed(builder, loaded)):
                place = builder.add(args[2], ir.Constant(_I64, index * PANEL * 4))
                builder.store(column, builder.inttoptr(place, _VI32.as_pointer())).align = 4
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return move


_move_words = _make_mover(_load_words)
_move_rounded = _make_mover(_load_rounded)


@helper
def _pack_words(part: int, parts: int, rows: Any, depth: int, out: int) -> None:
    panels = rows.shape[0] // PANEL
    for panel in range(panels * part // parts, panels * (part + 1) // parts):
        target = out + panel * depth * PANEL * 4
        for first in range(0, PANEL, LANES):
            addresses = rows.ctypes.data + (panel * PANEL + first) * 8
            for word in range(0, depth - LANES + 1, LANES):
                _move_words(addresses, word * 4, target + (word * PANEL + first) * 4)
        words = vector(target, depth * PANEL, _WORD)
        for row in range(PANEL):
            source = vector(rows[panel * PANEL + row], depth, _WORD)
            for word in range(depth // LANES * LANES, depth):
                words[word * PANEL + row] = source[word]


@helper
def _pack_rounded(part: int, parts: int, rows: Any, depth: int, out: int) -> None:
    panels = rows.shape[0] // PANEL
    for panel in range(panels * part // parts, panels * (part + 1) // parts):
        target = out + panel * depth * PANEL * 4
        for first in range(0, PANEL, LANES):
            addresses = rows.ctypes.data + (panel * PANEL + first) * 8
            for word in range(0, depth - LANES + 1, LANES):
                _move_rounded(addresses, word * 8, target + (word * PANEL + first) * 4)
        halves = vector(target, 2 * depth * PANEL, _PAIR)
        for row in range(PANEL):
            source = vector(rows[panel * PANEL + row], 2 * depth, _FLOAT)
            for element in range(2 * (depth // LANES * LANES), 2 * depth):
                halves[2 * (element // 2 * PANEL + row) + element % 2] = narrow(source[element], _PAIR)


@kernel
def pack_words(board: int, rows: int, count: int, depth: int, out: int) -> None:
    """Rows of `depth` words, whose addresses are int64 [count], into panels [count / PANEL, depth, PANEL]; all by
    address."""
    run(board, _PARTS, _pack_words, (vector(rows, count, _ROW), depth, out))


@kernel
def pack_rounded(board: int, rows: int, count: int, depth: int, out: int) -> None:
    """The same for rows of 2 `depth` float32, which become bfloat16."""
    run(board, _PARTS, _pack_rounded, (vector(rows, count, _ROW), depth, out))


def pack(weights: Sequence[torch.Tensor], panels: npt.NDArray[Any], dtype: torch.dtype, team: Team) -> None:
    """Weights [N_i, K] one under another, of `dtype` or float32, into panels of 32-bit words [ceil(N / PANEL), words of
    K, PANEL], zeros behind the last row: each a float32 or, where `dtype` is bfloat16, two of these."""
    if len({weight.dtype for weight in weights}) > 1:
        weights = [weight.to(dtype) for weight in weights]
    kept = [weight.detach().contiguous() for weight in weights]
    row_bytes = kept[0].shape[1] * kept[0].itemsize
    nothing = np.zeros(row_bytes, np.uint8)
    rows = np.full(len(panels) * PANEL, nothing.ctypes.data, np.int64)
    first = 0
    for weight in kept:
        rows[first : first + len(weight)] = weight.data_ptr() + np.arange(len(weight)) * row_bytes
        first += len(weight)
    pack_kept = pack_words if kept[0].dtype == dtype else pack_rounded
    pack_kept(team.board(), rows.ctypes.data, len(rows), panels.shape[1], panels.ctypes.data)
