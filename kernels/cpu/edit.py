"""`Ops.edit_logits` on the CPU: only the rows and tokens that are named are touched, where they lie.

Each kind of edit is a call of its own, so that all of one kind are done before the next begins.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.simd import next_item
from pagemill.kernels.cpu.team import run
from pagemill.kernels.cpu.views import matrix, vector

_LOWEST = np.float32(-np.inf)
_ALL = np.uint32(0xFFFFFFFF)
_WORD = 32  # tokens to a word of a mask
_PARTS = 4  # of the bans and biases, for each thread

_I32 = np.int32(0)
_U32 = np.uint32(0)
_F32 = np.float32(0)


@helper
def _mask_rows(
    part: int, parts: int, counter: Any, logits: Any, stride: int, vocab_size: int, rows: Any, masks: Any
) -> None:
    while True:
        item = next_item(counter)
        if item >= rows.shape[0]:
            break
        start = rows[item] * stride
        row = logits[start : start + vocab_size]
        for word in range(masks.shape[1]):
            allowed = masks[item, word]
            if allowed == _ALL:
                continue
            tokens = row[word * _WORD : min((word + 1) * _WORD, vocab_size)]
            if allowed == 0:
                tokens[:] = _LOWEST
                continue
            for bit in range(tokens.shape[0]):
                tokens[bit] = tokens[bit] if (allowed >> np.uint32(bit)) & np.uint32(1) else _LOWEST


@helper
def _ban_tokens(part: int, parts: int, logits: Any, stride: int, vocab_size: int, rows: Any, ids: Any) -> None:
    size = ids.shape[0]
    for item in range(size * part // parts, size * (part + 1) // parts):
        if 0 <= ids[item] < vocab_size:
            logits[rows[item] * stride + ids[item]] = _LOWEST


@helper
def _bias_tokens(
    part: int, parts: int, logits: Any, stride: int, vocab_size: int, rows: Any, ids: Any, bias: Any
) -> None:
    size = ids.shape[0]
    for item in range(size * part // parts, size * (part + 1) // parts):
        if 0 <= ids[item] < vocab_size:
            logits[rows[item] * stride + ids[item]] += bias[item]


@helper
def _penalise_rows(
    part: int,
    parts: int,
    counter: Any,
    logits: Any,
    stride: int,
    vocab_size: int,
    rows: Any,
    repetition: Any,
    presence: Any,
    frequency: Any,
    starts: Any,
    ids: Any,
    counts: Any,
) -> None:
    while True:
        item = next_item(counter)
        if item >= rows.shape[0]:
            break
        start = rows[item] * stride
        row = logits[start : start + vocab_size]
        factor, once, each = np.float64(repetition[item]), np.float64(presence[item]), np.float64(frequency[item])
        for entry in range(starts[item], starts[item + 1]):
            token, count = ids[entry], counts[entry]
            if 0 <= token < vocab_size:
                logit = np.float64(row[token])
                logit = logit / factor if logit > 0.0 else logit * factor
                row[token] = logit - each * count - (once if count > 0 else 0.0)


@kernel
def mask(
    board: int, logits: int, span: int, stride: int, vocab_size: int, rows: int, masks: int, num_rows: int
) -> None:
    """Masks uint32 [num_rows, ceil(vocab_size / 32)] of rows int32 [num_rows]; see `LogitEdits`.

    Here and below, arrays come by address; logits are float32 [span], their rows `stride` apart.
    """
    counter = np.zeros(1, np.int64)
    words = (vocab_size + _WORD - 1) // _WORD
    run(
        board,
        1,
        _mask_rows,
        (
            counter,
            vector(logits, span, _F32),
            stride,
            vocab_size,
            vector(rows, num_rows, _I32),
            matrix(masks, num_rows, words, _U32),
        ),
    )


@kernel
def ban(board: int, logits: int, span: int, stride: int, vocab_size: int, rows: int, ids: int, size: int) -> None:
    """Tokens ids int32 [size] of rows int32 [size]."""
    arrays = (vector(logits, span, _F32), stride, vocab_size, vector(rows, size, _I32), vector(ids, size, _I32))
    run(board, _PARTS, _ban_tokens, arrays)


@kernel
def add_bias(
    board: int, logits: int, span: int, stride: int, vocab_size: int, rows: int, ids: int, bias: int, size: int
) -> None:
    """Add bias float32 [size] to tokens ids int32 [size] of rows int32 [size]."""
    row_ids, tokens = vector(rows, size, _I32), vector(ids, size, _I32)
    arrays = (vector(logits, span, _F32), stride, vocab_size, row_ids, tokens, vector(bias, size, _F32))
    run(board, _PARTS, _bias_tokens, arrays)


@kernel
def penalise(
    board: int,
    logits: int,
    span: int,
    stride: int,
    vocab_size: int,
    rows: int,
    repetition: int,
    presence: int,
    frequency: int,
    starts: int,
    num_rows: int,
    ids: int,
    counts: int,
    size: int,
) -> None:
    """Penalties of rows int32 [num_rows] for their parts of ids and counts, int32 [size]."""
    counter = np.zeros(1, np.int64)
    arrays = (
        counter,
        vector(logits, span, _F32),
        stride,
        vocab_size,
        vector(rows, num_rows, _I32),
        vector(repetition, num_rows, _F32),
        vector(presence, num_rows, _F32),
        vector(frequency, num_rows, _F32),
        vector(starts, num_rows + 1, _I32),
        vector(ids, size, _I32),
        vector(counts, size, _I32),
    )
    run(board, 1, _penalise_rows, arrays)
