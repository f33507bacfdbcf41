"""`Ops.logprobs` on the CPU: the log-sum-exp and the rank in one pass over a row, the likeliest tokens without a sort.

A token can enter the list of the likeliest only if the maximum of its stretch of the row can, and as the list fills,
few stretches pass.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.simd import exp32, next_item, row_max
from pagemill.kernels.cpu.team import run
from pagemill.kernels.cpu.views import matrix, vector

LONGEST_LIST = 64
"""Entries of the list of likeliest tokens that are put in order by insertion."""

_SPAN = 64  # tokens that share a maximum
_CHUNK = 256  # tokens summed in float32
_LOWEST = np.float32(-np.inf)
_MISSING = np.float32(np.nan)

_I64 = np.int64(0)
_F32 = np.float32(0)


@helper
def _find_best(row: Any, maxima: Any, ids: Any, values: Any) -> None:
    """The tokens of the largest logits, best first, the lowest id first in ties, as far as there are any."""
    listed = 0
    for span in range(maxima.shape[0]):
        if listed == ids.shape[0] and maxima[span] <= values[listed - 1]:
            continue
        for token in range(span * _SPAN, min((span + 1) * _SPAN, row.shape[0])):
            logit = row[token]
            if listed < ids.shape[0]:
                listed += 1
            elif logit <= values[listed - 1]:
                continue
            place = listed - 1
            while place > 0 and values[place - 1] < logit:
                ids[place], values[place] = ids[place - 1], values[place - 1]
                place -= 1
            ids[place], values[place] = token, logit


@helper
def _logprob_rows(
    part: int,
    parts: int,
    counter: Any,
    logits: Any,
    stride: int,
    vocab_size: int,
    token_ids: Any,
    chosen: Any,
    rank: Any,
    ids: Any,
    values: Any,
) -> None:
    maxima = np.empty((vocab_size + _SPAN - 1) // _SPAN, np.float32)
    while True:
        item = next_item(counter)
        if item >= token_ids.shape[0]:
            break
        row = logits[item * stride : item * stride + vocab_size]
        token = token_ids[item]
        asked = 0 <= token < vocab_size
        chosen[item], rank[item] = _MISSING, 0
        ids[item], values[item] = -1, _MISSING
        for span in range(maxima.shape[0]):
            maxima[span] = row_max(row, span * _SPAN, min(_SPAN, vocab_size - span * _SPAN))
        largest = row_max(maxima, 0, maxima.shape[0])
        if not math.isfinite(largest):
            continue
        mark = row[token] if asked else largest
        total = 0.0
        likelier = 0
        for start in range(0, vocab_size, _CHUNK):
            chunk = row[start : min(start + _CHUNK, vocab_size)]
            weight = np.float32(0)
            above = np.int32(0)
            for i in range(chunk.shape[0]):
                weight += exp32(chunk[i] - largest)
                above += np.int32(1) if chunk[i] > mark else np.int32(0)
            total += np.float64(weight)
            likelier += int(above)
        norm = np.float64(largest) + math.log(total)
        if asked:
            chosen[item] = np.float64(mark) - norm
            rank[item] = likelier + 1
        listed = min(ids.shape[1], vocab_size)
        if listed:
            _find_best(row, maxima, ids[item, :listed], values[item, :listed])
            for place in range(listed):
                values[item, place] = np.float64(values[item, place]) - norm


@kernel
def logprobs(
    board: int,
    logits: int,
    stride: int,
    rows: int,
    vocab_size: int,
    token_ids: int,
    chosen: int,
    rank: int,
    ids: int,
    values: int,
    top: int,
) -> None:
    """All by address: logits float32 [rows, vocab_size], `stride` apart, and the fields of `TopLogprobs`."""
    counter = np.zeros(1, np.int64)
    arrays = (
        counter,
        vector(logits, max(rows - 1, 0) * stride + vocab_size, _F32),
        stride,
        vocab_size,
        vector(token_ids, rows, _I64),
        vector(chosen, rows, _F32),
        vector(rank, rows, _I64),
        matrix(ids, rows, top, _I64),
        matrix(values, rows, top, _F32),
    )
    run(board, 1, _logprob_rows, arrays)
