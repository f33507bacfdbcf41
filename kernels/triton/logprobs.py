"""`Ops.logprobs` on a device: rows are cut into chunks, each of which gives its log-sum-exp, the number of tokens above
the chosen one and its likeliest tokens; what is left to combine is small.

Tokens are put in order by one integer each, the logit's order above the token id's complement, so that the lowest id
wins ties however the work is divided.
"""

# Parameters of a kernel are Triton values and constants, which Python annotations cannot say.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from pagemill.kernels.ops import TopLogprobs

LONGEST_LIST = 64
"""Likeliest tokens that a chunk takes out one by one."""

_CHUNK = 2048


@triton.jit(do_not_specialize=["chunks", "top"])
def logprobs_chunk_kernel(
    largest, weight, above, best, logits, marks, vocab, chunks, top, logits_stride: tl.int64, CHUNK: tl.constexpr
):
    """Of each chunk of a row: largest logit float32 (NaN where one is), weight float32, the sum of exp(logit -
    largest), above int32, the number of logits above the row's mark, best int64 [top], the keys of its likeliest
    tokens, the lowest of integers where there are no more. Grid (chunks, rows)."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    at = row * chunks + chunk
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * logits_stride + ids, mask=ids < vocab, other=float("-inf"))
    spoilt = tl.max((values != values).to(tl.int32), 0)
    values = tl.where(values == 0.0, 0.0, values)  # -0 is no less than 0
    clean = tl.where(values != values, float("-inf"), values)
    highest = tl.max(clean, 0)
    # A chunk of nothing but -inf weighs nothing, rather than NaN.
    base = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)
    tl.store(largest + at, tl.where(spoilt > 0, float("nan"), highest))
    tl.store(weight + at, tl.sum(tl.exp(clean - base), 0))
    tl.store(above + at, tl.sum((clean > tl.load(marks + row)).to(tl.int32), 0))

    bits = clean.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (order.to(tl.int64) << 32) | (0x7FFFFFFF - ids)
    keys = tl.where(ids < vocab, keys, -9223372036854775808)
    for place in range(top):
        key = tl.max(keys, 0)
        tl.store(best + at * top + place, key)
        keys = tl.where(keys == key, -9223372036854775808, keys)


def logprobs(launch: Callable[..., None], logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> TopLogprobs:
    """See `Ops.logprobs`; top is at most LONGEST_LIST. `launch` takes a kernel, its grid and its arguments."""
    rows, vocab = logits.shape
    device = logits.device
    chunks = triton.cdiv(vocab, _CHUNK)
    asked = (token_ids >= 0) & (token_ids < vocab)
    marks = logits.gather(1, token_ids.clamp(0, vocab - 1).unsqueeze(1)).squeeze(1)
    largest = torch.empty((rows, chunks), dtype=torch.float32, device=device)
    weight = torch.empty((rows, chunks), dtype=torch.float32, device=device)
    above = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    best = torch.empty((rows, chunks, top), dtype=torch.int64, device=device)
    launch(
        logprobs_chunk_kernel,
        (chunks, rows),
        largest, weight, above, best, logits, marks, vocab, chunks, top, logits.stride(0),
        CHUNK=_CHUNK, num_warps=8,
    )  # fmt: skip
    highest = largest.amax(dim=1)
    sound = highest.isfinite()
    total = (weight.double() * (largest - highest.unsqueeze(1)).double().exp()).sum(dim=1)
    norm = highest.double() + total.log()
    listed = min(top, vocab)
    keys = best.view(rows, chunks * top).topk(listed, dim=1).values
    order = (keys >> 32).to(torch.int32)
    values = (order ^ ((order >> 31) & 0x7FFFFFFF)).view(torch.float32).double() - norm.unsqueeze(1)
    ids = 0x7FFFFFFF - (keys & 0xFFFFFFFF)
    missing = top - listed
    return TopLogprobs(
        torch.where(asked & sound, marks.double() - norm, torch.nan).float(),
        torch.where(asked & sound, above.sum(dim=1) + 1, 0),
        torch.nn.functional.pad(torch.where(sound.unsqueeze(1), ids, -1), (0, missing), value=-1),
        torch.nn.functional.pad(
            torch.where(sound.unsqueeze(1), values, torch.nan).float(), (0, missing), value=torch.nan
        ),
    )
