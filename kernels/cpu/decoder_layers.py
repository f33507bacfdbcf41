"""The layers of a step, one after the other, in compiled code: the middle of `decoder`.

What the layers are is a table of addresses, a row a layer (`COLUMNS`); the step is another (`step_words`). Linears
are tasks (see `matmul`), so any kind of weight that has a worker will do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill.kernels.cpu import elementwise
from pagemill.kernels.cpu import step_words as words
from pagemill.kernels.cpu.attention import attention
from pagemill.kernels.cpu.jit import helper
from pagemill.kernels.cpu.matmul import (
    GATED,
    PLAIN,
    TASK_COUNTER,
    TASK_OUT,
    TASK_OUT_STRIDE,
    TASK_RECORD,
    TASK_RESULT,
    TASK_ROWS,
    TASK_X,
    TASK_X_STRIDE,
)
from pagemill.kernels.cpu.team import run_at

PARALLEL_ELEMENTS = 16384
"""Elements below which a second thread costs more to start than it saves."""

INPUT_NORM, POST_NORM, NEXT_NORM, QUERY_NORM, KEY_NORM, ROTATES = range(6)
QKV, OUTPUT, GATE_UP, DOWN = range(6, 14, 2)  # the record of a linear, and its worker behind
IS_GATED = 14
COLUMNS = 15


@helper
def team_for(board: int, elements: int) -> int:
    return board if elements >= PARALLEL_ELEMENTS else 0


@helper
def multiply(
    board: int, task: Any, record: int, worker: int, x: int, width: int, rows: int, out: int, features: int, result: int
) -> None:
    task[TASK_X], task[TASK_X_STRIDE], task[TASK_ROWS] = x, width, rows
    task[TASK_OUT], task[TASK_OUT_STRIDE] = out, features
    task[TASK_RECORD], task[TASK_RESULT], task[TASK_COUNTER] = record, result, 0
    run_at(board, 1, worker, task.ctypes.data)


@helper
def _project(
    board: int, task: Any, layer: Any, which: int, x: int, width: int, rows: int, out: int, features: int, result: int
) -> None:
    multiply(board, task, layer[which], layer[which + 1], x, width, rows, out, features, result)


@helper
def begin_layers(board: int, layers: Any, at: Any, eps: Any, like: Any) -> None:
    """The first sums and norms, of embedded tokens."""
    tokens, hidden = at[words.TOKENS], at[words.HIDDEN]
    shared = team_for(board, tokens * hidden)
    elementwise.widen_all(shared, at[words.EMBEDDED], at[words.RESIDUAL], tokens * hidden, like)
    elementwise.rms_norm(shared, at[words.EMBEDDED], layers[0, INPUT_NORM], eps, at[words.X], tokens, hidden, like)


@helper
def run_layers(
    board: int,
    attention_board: int,
    begin: int,
    end: int,
    layers: Any,
    pool: Any,
    at: Any,
    eps: Any,
    scale: Any,
    window: int,
    items: Any,
    tokens_of: Any,
    rows_of: Any,
    parts: Any,
    block_tables: Any,
    task: Any,
    like: Any,
) -> None:
    """Layers begin .. end, which see equally far, of the table int64 [L, COLUMNS]; their keys and values lie at pool
    int64 [L, 2].

    A call finds the normed and the plain sums at X and RESIDUAL, and leaves them there for the next one. The
    last layer of all computes only the rows wanted behind its attention, and writes the normed sums to RESULT.
    """
    tokens, hidden, inner = at[words.TOKENS], at[words.HIDDEN], at[words.INNER]
    heads, kv_heads, dim, size = at[words.HEADS], at[words.KV_HEADS], at[words.DIM], at[words.SIZE]
    x, residual, spare, out = at[words.X], at[words.RESIDUAL], at[words.SPARE], at[words.PROJECTED]
    for index in range(begin, end):
        layer = layers[index]
        qkv, width = at[words.QKV_ROWS], (heads + 2 * kv_heads) * dim
        _project(board, task, layer, QKV, x, hidden, tokens, qkv, width, PLAIN)
        elementwise.place_qkv(
            team_for(board, tokens * width),
            qkv,
            tokens,
            heads,
            kv_heads,
            dim,
            layer[QUERY_NORM],
            layer[KEY_NORM],
            eps,
            layer[ROTATES] != 0,
            at[words.POSITIONS],
            at[words.COS_SIN],
            at[words.LONGEST],
            pool[index, 0],
            pool[index, 1],
            at[words.BLOCK_BYTES],
            at[words.BLOCK_SIZE],
            at[words.NUM_BLOCKS],
            at[words.SLOTS],
            like,
        )
        last = index + 1 == at[words.DEPTH]
        if last and at[words.WANTED] == 0:
            return
        attended = at[words.ATTENDED]
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
            at[words.BLOCK_BYTES],
            at[words.BLOCK_SIZE],
            kv_heads,
            dim,
            heads // kv_heads,
            scale,
            window,
            at[words.TILES],
            attended,
            like,
        )
        rows, result = tokens, x
        if last:
            # Nothing attends to what the last layer makes of the other tokens.
            rows, result = at[words.WANTED], at[words.RESULT]
            wanted = at[words.ROWS]
            shared = team_for(board, rows * heads * dim)
            elementwise.pick_rows(shared, attended, tokens, heads * dim, wanted, rows, at[words.PICKED], like)
            elementwise.pick_rows(
                shared, residual, tokens, hidden, wanted, rows, at[words.PICKED_RESIDUAL], np.float32(0)
            )
            attended, residual = at[words.PICKED], at[words.PICKED_RESIDUAL]
        # The sums go from one buffer to the other: loops that wrote where they read would not be vectorised.
        shared = team_for(board, rows * hidden)
        _project(board, task, layer, OUTPUT, attended, heads * dim, rows, out, hidden, PLAIN)
        elementwise.add_rms_norm(
            shared, out, residual, layer[POST_NORM], eps, x, spare, rows, hidden, like, np.float32(0)
        )
        activated = at[words.ACTIVATED]
        if layer[IS_GATED] != 0:
            _project(board, task, layer, GATE_UP, x, hidden, rows, activated, inner, GATED)
        else:
            _project(board, task, layer, GATE_UP, x, hidden, rows, activated, 2 * inner, PLAIN)
            both = activated
            activated += rows * 2 * inner * size
            elementwise.silu_and_mul(team_for(board, rows * inner), both, activated, rows, inner, like)
        _project(board, task, layer, DOWN, activated, inner, rows, out, hidden, PLAIN)
        elementwise.add_rms_norm(
            shared, out, spare, layer[NEXT_NORM], eps, result, residual, rows, hidden, like, np.float32(0)
        )
