"""Choosing tokens in Triton: Philox noise and Gumbel-max over one row of logits, cut into chunks.

The noise integers are those of `kernels.rng`. Values are float64 from the logits to the noise, so that a choice differs
from the reference's only where two candidates agree to the last bits of a double.
"""

# Parameters of a kernel are Triton values and constants, which Python annotations cannot say.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from pagemill.kernels.ops import SampleBatch
from pagemill.kernels.triton.configs import next_power_of_two
from pagemill.kernels.triton.filters import logit_thresholds

PARAMETER_WORDS = 8
"""int32 words per row: seed low and high, position low and high, choice, float32 temperature bits, two unused."""

_GROUPS = 512  # of four tokens


@triton.jit
def philox_words(group, parameters):
    """The four words of Philox4x32-10 at counter (group, position low, choice, position high) under the row's seed."""
    key_low = tl.load(parameters).to(tl.uint32, bitcast=True)
    key_high = tl.load(parameters + 1).to(tl.uint32, bitcast=True)
    position_low = tl.load(parameters + 2).to(tl.uint32, bitcast=True)
    position_high = tl.load(parameters + 3).to(tl.uint32, bitcast=True)
    choice = tl.load(parameters + 4).to(tl.uint32, bitcast=True)
    zeros = tl.zeros_like(group).to(tl.uint32)
    return tl.philox_impl(
        group.to(tl.uint32), zeros + position_low, zeros + choice, zeros + position_high, key_low, key_high
    )


@triton.jit
def philox_bits_kernel(output, parameters, groups, BLOCK: tl.constexpr):
    """The raw words, int32 [groups, 4], of the row whose parameters are given: what the tests compare."""
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w0, w1, w2, w3 = philox_words(group, parameters)
    mask = group < groups
    tl.store(output + group * 4, w0.to(tl.int32, bitcast=True), mask=mask)
    tl.store(output + group * 4 + 1, w1.to(tl.int32, bitcast=True), mask=mask)
    tl.store(output + group * 4 + 2, w2.to(tl.int32, bitcast=True), mask=mask)
    tl.store(output + group * 4 + 3, w3.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def _gumbel(words):
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(uniform))


@triton.jit
def _candidate(logits, ids, vocab, temperature, threshold, words):
    """Logit / temperature + noise of `ids`, -inf where filtered out."""
    values = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
    noisy = values.to(tl.float64) / temperature + _gumbel(words)
    return tl.where((values >= threshold) & (values > float("-inf")), noisy, float("-inf"))


@triton.jit(do_not_specialize=["chunks"])
def sample_chunk_kernel(
    raw_best,
    raw_id,
    noisy_best,
    noisy_id,
    logits,
    thresholds,
    parameters,
    vocab,
    chunks,
    logits_stride: tl.int64,
    GROUPS: tl.constexpr,
    GREEDY: tl.constexpr,
):
    """Best raw and best noisy candidate among 4 * GROUPS tokens. Grid (chunks, rows).

    A raw best of NaN says that the chunk holds one. The lowest id wins ties. With GREEDY all rows are that, and nothing
    is read or written but logits and raw bests.
    """
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    at = row * chunks + chunk
    row_logits = logits + row * logits_stride
    group = chunk * GROUPS + tl.arange(0, GROUPS)

    ids = chunk * GROUPS * 4 + tl.arange(0, GROUPS * 4)
    values = tl.load(row_logits + ids, mask=ids < vocab, other=float("-inf"))
    spoilt = tl.max((values != values).to(tl.int32), 0)
    clean = tl.where(values != values, float("-inf"), values)
    best = tl.max(clean, 0)
    tl.store(raw_id + at, tl.min(tl.where(clean == best, ids, 2147483647), 0))
    tl.store(raw_best + at, tl.where(spoilt > 0, float("nan"), best))

    if not GREEDY:
        row_parameters = parameters + row * 8
        temperature = tl.load(row_parameters + 5).to(tl.float32, bitcast=True).to(tl.float64)
        if temperature > 0.0:
            threshold = tl.load(thresholds + row)
            w0, w1, w2, w3 = philox_words(group, row_parameters)
            first = group * 4
            c0 = _candidate(row_logits, first, vocab, temperature, threshold, w0)
            c1 = _candidate(row_logits, first + 1, vocab, temperature, threshold, w1)
            c2 = _candidate(row_logits, first + 2, vocab, temperature, threshold, w2)
            c3 = _candidate(row_logits, first + 3, vocab, temperature, threshold, w3)
            top = tl.max(tl.maximum(tl.maximum(c0, c1), tl.maximum(c2, c3)), 0)
            winner = tl.where(c3 == top, first + 3, 2147483647)
            winner = tl.where(c2 == top, first + 2, winner)
            winner = tl.where(c1 == top, first + 1, winner)
            winner = tl.where(c0 == top, first, winner)
            tl.store(noisy_id + at, tl.min(winner, 0))
            tl.store(noisy_best + at, top)


@triton.jit(do_not_specialize=["chunks"])
def sample_row_kernel(
    output, raw_best, raw_id, noisy_best, noisy_id, parameters, chunks, CHUNKS_PAD: tl.constexpr, GREEDY: tl.constexpr
):
    """The token of a row from its chunks, -1 where the row holds NaN or only -inf. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS_PAD)
    mask = chunk < chunks
    at = row * chunks + chunk
    raw = tl.load(raw_best + at, mask=mask, other=float("-inf"))
    spoilt = tl.max((raw != raw).to(tl.int32), 0)
    best = tl.max(tl.where(raw != raw, float("-inf"), raw), 0)
    token = tl.min(tl.where(raw == best, tl.load(raw_id + at, mask=mask, other=2147483647), 2147483647), 0)
    if not GREEDY:
        temperature = tl.load(parameters + row * 8 + 5).to(tl.float32, bitcast=True)
        if (temperature > 0.0) & (best < float("inf")):
            noisy = tl.load(noisy_best + at, mask=mask, other=float("-inf"))
            top = tl.max(noisy, 0)
            token = tl.min(tl.where(noisy == top, tl.load(noisy_id + at, mask=mask, other=2147483647), 2147483647), 0)
    token = tl.where((spoilt > 0) | (best == float("-inf")), -1, token)
    tl.store(output + row, token.to(tl.int64))


def sample(launch: Callable[..., None], logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """See `Ops.sample`; rows have unit stride. `launch` takes a kernel, its grid and its arguments."""
    rows, vocab = logits.shape
    device = logits.device
    chunks = -(-vocab // (_GROUPS * 4))
    greedy = not batch.temperature.any()
    thresholds = parameters = noisy_best = noisy_id = None
    if not greedy:
        thresholds = logit_thresholds(launch, logits, batch)
        parameters = torch.from_numpy(sample_parameters(batch)).to(device, non_blocking=True)
        noisy_best = torch.empty((rows, chunks), dtype=torch.float64, device=device)
        noisy_id = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    raw_best = torch.empty((rows, chunks), dtype=torch.float32, device=device)
    raw_id = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    output = torch.empty(rows, dtype=torch.int64, device=device)
    launch(
        sample_chunk_kernel,
        (chunks, rows),
        raw_best,
        raw_id,
        noisy_best,
        noisy_id,
        logits,
        thresholds,
        parameters,
        vocab,
        chunks,
        logits.stride(0),
        GROUPS=_GROUPS,
        GREEDY=greedy,
        num_warps=4,
    )
    launch(
        sample_row_kernel,
        (rows,),
        output,
        raw_best,
        raw_id,
        noisy_best,
        noisy_id,
        parameters,
        chunks,
        CHUNKS_PAD=next_power_of_two(chunks),
        GREEDY=greedy,
        num_warps=1,
    )
    return output


def sample_parameters(batch: SampleBatch) -> npt.NDArray[np.int32]:
    """int32 [R, 8]: the rows' seeds, positions, choices and temperatures as the sampling kernels read them."""
    words = np.zeros((len(batch), PARAMETER_WORDS), dtype=np.uint32)
    position = batch.position.astype(np.int64).view(np.uint64)
    words[:, 0] = batch.seed & np.uint64(0xFFFFFFFF)
    words[:, 1] = batch.seed >> np.uint64(32)
    words[:, 2] = position & np.uint64(0xFFFFFFFF)
    words[:, 3] = position >> np.uint64(32)
    words[:, 4] = batch.index.astype(np.int64).astype(np.uint64) & np.uint64(0xFFFFFFFF)
    words[:, 5] = batch.temperature.astype(np.float32).view(np.uint32)
    return words.view(np.int32)
