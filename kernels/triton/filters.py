"""min_p, top_k and top_p as one threshold per row: every token whose logit is at least that stays.

All three filters keep a prefix of the descending logits with all ties of its last, so their composition does too, and
the sampling kernel needs one float32 per row instead of a mask over the vocabulary.

The threshold is searched for in the order of the floats, with three places tried in each pass over the row, so nothing
is sorted: 16 passes at most for a filter, over a row that lies in the device's cache.
"""

# Parameters of a kernel are Triton values and constants, which Python annotations cannot say.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl

from pagemill.kernels.ops import SampleBatch
from pagemill.kernels.triton.transfer import upload

_CHUNK = 4096


@triton.jit
def _rank_of_float(x):
    """The place of a float32 in their order, int64: it grows with the float."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _float_of_rank(rank):
    low = rank.to(tl.int32)
    return (low ^ ((low >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(values, highest, heat):
    """exp((value - highest) * heat): 1 for a heat of 0, also where the difference overflows."""
    return tl.exp(tl.maximum(values - highest, -3.4028234663852886e38) * heat)


@triton.jit
def _reaching(logits, vocab, low, high, highest, heat, wanted, CHUNK: tl.constexpr):
    """The highest place from which upward the weights of a row come to wanted > 0, at least `low`, below `high`."""
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        from_first = wanted * 0.0
        from_second = from_first
        from_third = from_first
        for start in range(0, vocab, CHUNK):
            ids = start + tl.arange(0, CHUNK)
            values = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
            weights = _weights(values, highest, heat)
            from_first += tl.sum(tl.where(values >= _float_of_rank(first), weights, 0.0), 0).to(tl.float64)
            from_second += tl.sum(tl.where(values >= _float_of_rank(second), weights, 0.0), 0).to(tl.float64)
            from_third += tl.sum(tl.where(values >= _float_of_rank(third), weights, 0.0), 0).to(tl.float64)
        reached = tl.where(from_first >= wanted, first, low)
        reached = tl.where(from_second >= wanted, second, reached)
        reached = tl.where(from_third >= wanted, third, reached)
        high = tl.where(from_third < wanted, third, high)
        high = tl.where(from_second < wanted, second, high)
        high = tl.where(from_first < wanted, first, high)
        low = reached
    return low


@triton.jit
def threshold_kernel(
    thresholds, logits, rows, temperatures, top_ks, top_ps, min_ps, vocab, logits_stride: tl.int64, CHUNK: tl.constexpr
):
    """The thresholds of `rows`, by which their parameters are indexed too. Grid (rows,)."""
    entry = tl.program_id(0)
    row = tl.load(rows + entry).to(tl.int64)
    logits += row * logits_stride
    temperature = tl.load(temperatures + entry).to(tl.float64)
    highest = tl.full((), float("-inf"), tl.float32)
    spoilt = tl.full((), 0, tl.int32)
    for start in range(0, vocab, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        values = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
        spoilt = tl.maximum(spoilt, tl.max((values != values).to(tl.int32), 0))
        highest = tl.maximum(highest, tl.max(tl.where(values != values, float("-inf"), values), 0))
    # A row without a distribution gets no threshold: what becomes of it is for the sampling kernel to say.
    if (spoilt == 0) & (tl.abs(highest) < float("inf")):
        low = tl.full((), -0x7F800001, tl.int64)  # -inf
        high = _rank_of_float(highest) + 1
        min_p = tl.load(min_ps + entry).to(tl.float64)
        if min_p > 0:
            bound = highest.to(tl.float64) / temperature + tl.log(min_p)
            near = _rank_of_float((bound * temperature).to(tl.float32)) + tl.arange(0, 8) - 4
            kept = _float_of_rank(near).to(tl.float64) / temperature >= bound
            low = tl.maximum(low, tl.min(tl.where(kept, near, high - 1), 0))
        top_k = tl.load(top_ks + entry)
        if top_k > 0:
            low = _reaching(logits, vocab, low, high, highest, 0.0, top_k.to(tl.float64), CHUNK)
        top_p = tl.load(top_ps + entry).to(tl.float64)
        if top_p < 1:
            heat = tl.minimum(1.0 / temperature, 1e30).to(tl.float32)
            total = temperature * 0.0
            for start in range(0, vocab, CHUNK):
                ids = start + tl.arange(0, CHUNK)
                values = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
                weights = _weights(values, highest, heat)
                total += tl.sum(tl.where(values >= _float_of_rank(low), weights, 0.0), 0).to(tl.float64)
            wanted = tl.maximum(top_p, 1e-30) * total  # a nucleus is never empty
            low = _reaching(logits, vocab, low, high, highest, heat, wanted, CHUNK)
        tl.store(thresholds + row, _float_of_rank(low))


def logit_thresholds(launch: Callable[..., None], logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """float32 [R]: a logit between what each row of `logits` [R, V] keeps and what it does not; -inf: keep all.

    `launch` takes a kernel, its grid and its arguments.
    """
    thresholds = torch.full((logits.shape[0],), -torch.inf, dtype=torch.float32, device=logits.device)
    filtered = (batch.top_k > 0) | (batch.min_p > 0) | (batch.top_p < 1)
    rows = np.flatnonzero(filtered & (batch.temperature > 0)).astype(np.int32)
    if rows.size:
        columns = (batch.temperature[rows], batch.top_k[rows], batch.top_p[rows], batch.min_p[rows])
        uploaded = upload(logits.device, rows, *columns)
        launch(
            threshold_kernel,
            (rows.size,),
            thresholds, logits, *uploaded, logits.shape[1], logits.stride(0),
            CHUNK=_CHUNK, num_warps=8,
        )  # fmt: skip
    return thresholds
