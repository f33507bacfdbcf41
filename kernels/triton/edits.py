"""`Ops.edit_logits` on a device: one small transfer for all edits but the masks, and a launch for each kind.

The order of launches is the order of the edits. Nothing depends on how many rows there are.
"""

# Parameters of a kernel are Triton values and constants, which Python annotations cannot say.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl

from pagemill.kernels.ops import LogitEdits
from pagemill.kernels.triton.transfer import upload

_MASK_WORDS = 128  # of 32 tokens, to a program
_LISTED = 512  # tokens, to a program


@triton.jit(do_not_specialize=["vocab", "words"])
def mask_logits_kernel(logits, rows, masks, vocab, words, logits_stride: tl.int64, WORDS: tl.constexpr):
    """-inf where a mask, int32 [M, words], has no bit. Grid (ceil(words / WORDS), M)."""
    entry = tl.program_id(1)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    allowed = tl.load(masks + entry.to(tl.int64) * words + word, mask=word < words, other=-1)
    bit = tl.arange(0, 32)
    ids = word[:, None] * 32 + bit[None, :]
    banned = ((allowed[:, None] >> bit[None, :]) & 1) == 0
    row = tl.load(rows + entry).to(tl.int64)
    lowest = tl.full((WORDS, 32), float("-inf"), tl.float32)
    tl.store(logits + row * logits_stride + ids, lowest, mask=banned & (ids < vocab))


@triton.jit(do_not_specialize=["vocab", "size"])
def shift_logits_kernel(
    logits, rows, ids, bias, size, vocab, logits_stride: tl.int64, BAN: tl.constexpr, BLOCK: tl.constexpr
):
    """Add bias float32 [size] to tokens ids of rows, both int32 [size], or with BAN set them to -inf.

    Grid (ceil(size / BLOCK),). No (row, id) comes twice where they are added to.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + at, mask=at < size, other=-1)
    known = (token >= 0) & (token < vocab)
    place = logits + tl.load(rows + at, mask=known, other=0).to(tl.int64) * logits_stride + token
    if BAN:
        tl.store(place, tl.full((BLOCK,), float("-inf"), tl.float32), mask=known)
    else:
        tl.store(place, tl.load(place, mask=known) + tl.load(bias + at, mask=known), mask=known)


@triton.jit(do_not_specialize=["vocab"])
def penalise_logits_kernel(
    logits,
    rows,
    repetition,
    presence,
    frequency,
    starts,
    ids,
    counts,
    vocab,
    logits_stride: tl.int64,
    BLOCK: tl.constexpr,
):
    """The penalties of `LogitEdits`. Grid (ceil(longest list / BLOCK), P)."""
    entry = tl.program_id(1)
    at = tl.load(starts + entry) + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    listed = at < tl.load(starts + entry + 1)
    token = tl.load(ids + at, mask=listed, other=-1)
    known = (token >= 0) & (token < vocab)
    count = tl.load(counts + at, mask=known, other=0).to(tl.float64)
    place = logits + tl.load(rows + entry).to(tl.int64) * logits_stride + token
    logit = tl.load(place, mask=known).to(tl.float64)
    factor = tl.load(repetition + entry).to(tl.float64)
    logit = tl.where(logit > 0, logit / factor, logit * factor)
    once = tl.where(count > 0, tl.load(presence + entry).to(tl.float64), 0.0)
    logit -= tl.load(frequency + entry).to(tl.float64) * count + once
    tl.store(place, logit.to(tl.float32), mask=known)


def edit_logits(launch: Callable[..., None], logits: torch.Tensor, edits: LogitEdits) -> None:
    """Apply edits that fit the logits. `launch` takes a kernel, its grid and its arguments."""
    vocab, stride = logits.shape[1], logits.stride(0)
    mask_rows, ban_rows, ban_ids, bias_rows, bias_ids, bias, *penalties = upload(
        logits.device,
        edits.mask_rows,
        edits.ban_rows,
        edits.ban_ids,
        edits.bias_rows,
        edits.bias_ids,
        edits.bias,
        edits.penalty_rows,
        edits.repetition,
        edits.presence,
        edits.frequency,
        edits.starts,
        edits.ids,
        edits.counts,
    )
    words = edits.masks.shape[1]
    grid = (triton.cdiv(words, _MASK_WORDS), len(edits.mask_rows))
    if 0 not in grid:
        (masks,) = upload(logits.device, edits.masks)
        launch(mask_logits_kernel, grid, logits, mask_rows, masks, vocab, words, stride, WORDS=_MASK_WORDS, num_warps=4)
    for rows, ids, ban in ((ban_rows, ban_ids, True), (bias_rows, bias_ids, False)):
        size = ids.shape[0]
        launch(
            shift_logits_kernel,
            (triton.cdiv(size, _LISTED),),
            logits, rows, ids, bias, size, vocab, stride,
            BAN=ban, BLOCK=_LISTED, num_warps=4,
        )  # fmt: skip
    longest = int(np.diff(edits.starts).max(initial=0))
    grid = (triton.cdiv(longest, _LISTED), len(edits.penalty_rows))
    launch(penalise_logits_kernel, grid, logits, *penalties, vocab, stride, BLOCK=_LISTED, num_warps=4)
