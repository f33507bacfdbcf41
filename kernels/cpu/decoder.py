"""All layers of a step in one compiled call: what each operation costs to call from Python is then paid once.

At batch 1 a layer's operations take some 150 us, and calling them from Python a third of that again. Here the same
kernels are called one after the other by compiled code, on the same team, so that the results have the same bits. The
caller has let go of the interpreter's lock meanwhile.

What the layers are is a table of addresses, a row a layer; linear layers are tasks (see `matmul`), so any kind of
weight that has a worker will do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagemill.kernels.cpu import attention_amx, elementwise
from pagemill.kernels.cpu.arena import huge_pages
from pagemill.kernels.cpu.attention import attention
from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.matmul import (
    GATED,
    PLAIN,
    TASK_COUNTER,
    TASK_OUT,
    TASK_OUT_STRIDE,
    TASK_RECORD,
    TASK_RESULT,
    TASK_ROWS,
    TASK_WORDS,
    TASK_X,
    TASK_X_STRIDE,
)
from pagemill.kernels.cpu.plan import AttentionPlan
from pagemill.kernels.cpu.team import Team, run_at
from pagemill.kernels.decoder import DecoderLayer, DecoderStack
from pagemill.kernels.layout import LayerKV
from pagemill.kernels.metadata import AttentionMetadata

PARALLEL_ELEMENTS = 16384
"""Elements below which a second thread costs more to start than it saves."""

_LINE = 64  # bytes of a cache line
_APART = 5 * _LINE  # rows of several buffers that are used together shall not compete for the same lines of a cache

_INPUT_NORM, _POST_NORM, _NEXT_NORM, _QUERY_NORM, _KEY_NORM, _ROTATES = range(6)
_QKV, _OUTPUT, _GATE_UP, _DOWN = range(6, 14, 2)  # the record of a linear, and its worker behind
_GATED = 14
_COLUMNS = 15

(
    _TOKENS,
    _WANTED,
    _HEADS,
    _KV_HEADS,
    _DIM,
    _SIZE,
    _HIDDEN,
    _INNER,
    _FIRST,
    _END,
    _LAST,
    _NUM_BLOCKS,
    _BLOCK_SIZE,
    _BLOCK_BYTES,
    _LONGEST,
    _POSITIONS,
    _SLOTS,
    _ROWS,
    _COS_SIN,
    _RESULT,
    _EMBEDDED,
    _X,
    _RESIDUAL,
    _SPARE,
    _QKV_ROWS,
    _ATTENDED,
    _PROJECTED,
    _ACTIVATED,
    _PICKED,
    _PICKED_RESIDUAL,
) = range(30)


@helper
def _team_for(board: int, elements: int) -> int:
    return board if elements >= PARALLEL_ELEMENTS else 0


@helper
def _multiply(
    board: int, task: Any, layer: Any, which: int, x: int, width: int, rows: int, out: int, features: int, result: int
) -> None:
    task[TASK_X], task[TASK_X_STRIDE], task[TASK_ROWS] = x, width, rows
    task[TASK_OUT], task[TASK_OUT_STRIDE] = out, features
    task[TASK_RECORD], task[TASK_RESULT], task[TASK_COUNTER] = layer[which], result, 0
    run_at(board, 1, layer[which + 1], task.ctypes.data)


@kernel
def run_layers(
    board: int,
    attention_board: int,
    layers: Any,
    pool: Any,
    at: Any,
    eps: Any,
    scale: Any,
    window: int,
    tiles: int,
    items: Any,
    tokens_of: Any,
    rows_of: Any,
    parts: Any,
    block_tables: Any,
    like: Any,
) -> None:
    """Layers at[_FIRST] .. at[_END] of the table int64 [L, _COLUMNS], whose keys and values lie at pool int64 [L, 2].

    The first layer finds its tokens at _EMBEDDED. A call leaves the normed and the plain sums at _X and _RESIDUAL for
    the next one. The last layer (_LAST) computes only the rows wanted behind its attention, and writes the normed sums
    to _RESULT.
    """
    tokens, hidden, inner = at[_TOKENS], at[_HIDDEN], at[_INNER]
    heads, kv_heads, dim, size = at[_HEADS], at[_KV_HEADS], at[_DIM], at[_SIZE]
    x, residual, spare, out = at[_X], at[_RESIDUAL], at[_SPARE], at[_PROJECTED]
    task = np.zeros(TASK_WORDS, np.int64)
    if at[_FIRST] == 0:
        shared = _team_for(board, tokens * hidden)
        elementwise.widen_all(shared, at[_EMBEDDED], residual, tokens * hidden, like)
        elementwise.rms_norm(shared, at[_EMBEDDED], layers[0, _INPUT_NORM], eps, x, tokens, hidden, like)
    for index in range(at[_FIRST], at[_END]):
        layer = layers[index]
        qkv, width = at[_QKV_ROWS], (heads + 2 * kv_heads) * dim
        _multiply(board, task, layer, _QKV, x, hidden, tokens, qkv, width, PLAIN)
        elementwise.place_qkv(
            _team_for(board, tokens * width),
            qkv,
            tokens,
            heads,
            kv_heads,
            dim,
            layer[_QUERY_NORM],
            layer[_KEY_NORM],
            eps,
            layer[_ROTATES] != 0,
            at[_POSITIONS],
            at[_COS_SIN],
            at[_LONGEST],
            pool[index, 0],
            pool[index, 1],
            at[_BLOCK_BYTES],
            at[_BLOCK_SIZE],
            at[_NUM_BLOCKS],
            at[_SLOTS],
            like,
        )
        last = index == at[_LAST]
        if last and at[_WANTED] == 0:
            return
        attended = at[_ATTENDED]
        attention(
            attention_board,
            items,
            tokens_of,
            rows_of,
            parts,
            block_tables,
            qkv,
            width * size,
            pool[index, 0],
            pool[index, 1],
            at[_BLOCK_BYTES],
            at[_BLOCK_SIZE],
            kv_heads,
            dim,
            heads // kv_heads,
            scale,
            window,
            tiles,
            attended,
            like,
        )
        rows, result = tokens, x
        if last:
            # Nothing attends to what the last layer makes of the other tokens.
            rows, result = at[_WANTED], at[_RESULT]
            wanted = at[_ROWS]
            shared = _team_for(board, rows * heads * dim)
            elementwise.pick_rows(shared, attended, tokens, heads * dim, wanted, rows, at[_PICKED], like)
            elementwise.pick_rows(shared, residual, tokens, hidden, wanted, rows, at[_PICKED_RESIDUAL], np.float32(0))
            attended, residual = at[_PICKED], at[_PICKED_RESIDUAL]
        # The sums go from one buffer to the other: loops that wrote where they read would not be vectorised.
        shared = _team_for(board, rows * hidden)
        _multiply(board, task, layer, _OUTPUT, attended, heads * dim, rows, out, hidden, PLAIN)
        elementwise.add_rms_norm(
            shared, out, residual, layer[_POST_NORM], eps, x, spare, rows, hidden, like, np.float32(0)
        )
        activated = at[_ACTIVATED]
        if layer[_GATED] != 0:
            _multiply(board, task, layer, _GATE_UP, x, hidden, rows, activated, inner, GATED)
        else:
            _multiply(board, task, layer, _GATE_UP, x, hidden, rows, activated, 2 * inner, PLAIN)
            both = activated
            activated += rows * 2 * inner * size
            elementwise.silu_and_mul(_team_for(board, rows * inner), both, activated, rows, inner, like)
        _multiply(board, task, layer, _DOWN, activated, inner, rows, out, hidden, PLAIN)
        elementwise.add_rms_norm(
            shared, out, spare, layer[_NEXT_NORM], eps, result, residual, rows, hidden, like, np.float32(0)
        )


class CpuDecoder:
    """`CompiledDecoder` for the CPU. Its memory for a step's activations is kept for the next, so a call at a time."""

    def __init__(self, stack: DecoderStack, team: Team, like: Any, plan: Callable[..., Any]) -> None:
        self._stack = stack
        self._team = team
        self._like = like
        self._plan = plan
        self._hidden = stack.layers[0].qkv.in_features
        self._inner = stack.layers[0].down.in_features
        self._layers = _table(stack)
        # Layers that see equally far share a work list.
        self._runs = [
            (window, [index for index, _ in run])
            for window, run in itertools.groupby(enumerate(stack.layers), key=lambda pair: pair[1].window)
        ]
        self._rows = 0
        self._scratch: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._starts: list[int] = []

    def forward(
        self, x: torch.Tensor, meta: AttentionMetadata, kv: Sequence[LayerKV], rows: torch.Tensor
    ) -> torch.Tensor:
        stack, tokens, wanted = self._stack, x.shape[0], rows.shape[0]
        scratch = self._addresses(tokens)
        hidden = torch.empty((wanted, self._hidden), dtype=x.dtype)
        x = x.contiguous()
        pool = np.array([each.addresses for each in kv], np.int64)
        rows = rows.contiguous()
        first = kv[0]
        at = np.array(
            [
                tokens,
                wanted,
                stack.num_heads,
                stack.num_kv_heads,
                stack.head_dim,
                x.itemsize,
                self._hidden,
                self._inner,
                0,
                0,
                len(kv) - 1,
                first.num_blocks,
                first.block_size,
                first.k.stride(0) * x.itemsize,
                stack.cos_sin.shape[0],
                meta.positions.data_ptr(),
                meta.slot_mapping.data_ptr(),
                rows.data_ptr(),
                stack.cos_sin.data_ptr(),
                hidden.data_ptr(),
                x.data_ptr(),
                *scratch,
            ],
            np.int64,
        )
        self._run(self._team.board(), at, pool, meta, first)
        return hidden

    def _run(
        self, board: int, at: npt.NDArray[np.int64], pool: npt.NDArray[np.int64], meta: AttentionMetadata, kv: LayerKV
    ) -> None:
        stack = self._stack
        for window, layers in self._runs:
            at[_FIRST], at[_END] = layers[0], min(layers[-1] + 1, len(pool))
            if at[_FIRST] >= len(pool):
                return
            plan, parts = self._plan(meta, stack.num_heads, kv, window)
            run_layers(
                board,
                board if attention_work(meta, plan, kv) >= PARALLEL_ELEMENTS else 0,
                self._layers,
                pool,
                at,
                np.float32(stack.eps),
                np.float32(stack.scale),
                window,
                attention_amx.use_tiles(kv.k.dtype, kv.block_size, kv.head_dim, stack.scale),
                plan.items,
                plan.tokens,
                plan.rows,
                parts,
                meta.host.block_tables,
                self._like,
            )

    def _addresses(self, tokens: int) -> list[int]:
        """Where the step's activations go, from _X on."""
        if tokens > self._rows:
            stack, size = self._stack, self._like.itemsize
            attended = stack.num_heads * stack.head_dim
            gated = all(layer.gate_up.gated for layer in stack.layers)
            widths = (
                size * self._hidden,
                4 * self._hidden,
                4 * self._hidden,
                size * stack.layers[0].qkv.out_features,
                size * attended,
                size * self._hidden,
                size * self._inner * (1 if gated else 3),
                size * attended,
                4 * self._hidden,
            )
            starts = np.cumsum([0, *(-(-tokens * width // _LINE) * _LINE + _APART for width in widths)])
            self._scratch = huge_pages(int(starts[-1]))
            self._starts = (starts[:-1] + self._scratch.ctypes.data).tolist()
            self._rows = tokens
        return self._starts


def attention_work(meta: AttentionMetadata, plan: AttentionPlan, kv: LayerKV) -> int:
    """Elements of keys that a step's attention reads, 0 where nobody could share them."""
    return int(meta.host.seq_lens.sum()) * kv.num_kv_heads * kv.head_dim if len(plan.items) > 1 else 0


def _table(stack: DecoderStack) -> npt.NDArray[np.int64]:
    """Addresses of what the layers are made of. `stack` keeps it alive."""
    table = np.zeros((len(stack.layers), _COLUMNS), np.int64)
    for index, layer in enumerate(stack.layers):
        last = index + 1 == len(stack.layers)
        following = stack.final_norm if last else stack.layers[index + 1].input_norm
        row = table[index]
        row[_INPUT_NORM], row[_POST_NORM], row[_NEXT_NORM] = (
            weight.data_ptr() for weight in (layer.input_norm, layer.post_norm, following)
        )
        if layer.head_norms:
            row[_QUERY_NORM], row[_KEY_NORM] = (weight.data_ptr() for weight in layer.head_norms)
        row[_ROTATES], row[_GATED] = layer.rotates, layer.gate_up.gated
        for column, linear in _linears(layer):
            row[column], row[column + 1] = linear.record.ctypes.data, linear.worker()
    return table


def _linears(layer: DecoderLayer) -> list[tuple[int, Any]]:
    return [(_QKV, layer.qkv), (_OUTPUT, layer.output), (_GATE_UP, layer.gate_up), (_DOWN, layer.down)]


def can_run(stack: DecoderStack, dtype: torch.dtype) -> bool:
    """Whether all linears are tasks on activations of this type; a weight of odd width is kept as float32."""
    return bool(stack.layers) and all(
        getattr(linear, "record", None) is not None and linear.dtype == dtype
        for layer in stack.layers
        for _, linear in _linears(layer)
    )
