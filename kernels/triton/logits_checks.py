"""Choosing tokens, edits of logits and log-probabilities against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagemill.kernels.ops import LogitEdits, Ops, SampleBatch
from pagemill.kernels.reference import ReferenceOps
from pagemill.kernels.triton.comparison import ELEMENTWISE_TOLERANCE, Outcome, exact, relative, seeded, worst


def sample_mixed(ops: Ops, device: str) -> Outcome:
    """Rows with every mixture of filters and temperatures, ties, NaN, infinities, far positions and large seeds."""
    rng, generator = seeded("sample")
    rows, vocab = 24, 2200
    logits = torch.randn((rows, vocab), generator=generator) * 3
    logits[1] = torch.nan
    logits[2] = -torch.inf
    logits[3, 2190] = torch.nan
    logits[4, 11] = torch.inf
    logits[5, 100:] = -torch.inf
    logits[6:10] = 1.0
    logits[10:16] = (logits[10:16] * 2).round() / 2
    logits[16] = 0.0
    logits[16, ::3] = -0.0
    logits[17] *= 1e37

    def some(values: npt.NDArray[np.float64], off: float) -> npt.NDArray[np.float64]:
        return np.where(rng.random(rows) < 0.5, off, values)

    batch = SampleBatch(
        temperature=np.where(rng.random(rows) < 0.15, 0, rng.uniform(0.05, 2, rows)).astype(np.float32),
        top_k=some(rng.integers(1, 60, rows).astype(np.float64), 0).astype(np.int32),
        top_p=some(rng.choice([0, 0.3, 0.9, 0.999], rows), 1).astype(np.float32),
        min_p=some(rng.random(rows) * 0.3, 0).astype(np.float32),
        seed=rng.integers(0, 2**64, rows, dtype=np.uint64),
        position=rng.integers(0, 2**40, rows),
        index=rng.integers(0, 5, rows).astype(np.int32),
    )
    got = ops.sample(logits.to(device), batch)
    return exact(got.cpu(), ReferenceOps().sample(logits, batch))


def sample_greedy(ops: Ops, device: str) -> Outcome:
    _, generator = seeded("greedy")
    logits = torch.randn((6, 5001), generator=generator)
    logits[0, [70, 4999]] = 50.0
    logits[1, -1] = 50.0
    logits[2] = 0.0
    logits[3, 4000] = torch.nan
    logits[4] = -torch.inf
    logits[5, [9, 4000]] = torch.inf
    batch = SampleBatch.greedy(6)
    return exact(ops.sample(logits.to(device), batch).cpu(), ReferenceOps().sample(logits, batch))


def edit_logits(ops: Ops, device: str, vocab: int) -> Outcome:
    """Edits of every kind that meet in some rows, with ids outside the vocabulary, in rows that are parts of longer."""
    rng, generator = seeded("edit_logits")
    rows = 6
    wide = torch.randn((rows, vocab + 7), generator=generator) * 4
    wide[0, 3] = torch.nan
    wide[5] = -torch.inf
    words = -(-vocab // 32)

    def int32(values: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        return np.asarray(values, np.int32)

    def float32(size: int) -> npt.NDArray[np.float32]:
        return rng.uniform(0.3, 2, size).astype(np.float32)

    lists = [rng.choice(vocab, size, replace=False) for size in (0, vocab // 2, vocab // 7, 3)]
    lists[-1][:2] = -1, vocab
    edits = LogitEdits(
        mask_rows=int32([0, 2, 3]),
        masks=rng.integers(0, 2**32, (3, words), dtype=np.uint32),
        ban_rows=int32([1, 2, 2, 4]),
        ban_ids=int32([1, -1, vocab, vocab - 1]),
        bias_rows=int32([2, 2, 3, 4, 0]),
        bias_ids=int32([2, vocab + 3, 0, vocab - 1, 3]),
        bias=float32(5),
        penalty_rows=int32([5, 1, 2, 0]),
        repetition=float32(4),
        presence=float32(4),
        frequency=float32(4),
        starts=int32(np.cumsum([0, *map(len, lists)])),
        ids=int32(np.concatenate(lists)),
        counts=int32(rng.integers(0, 4, sum(map(len, lists)))),
    )
    got, want = wide.to(device), wide.clone()
    ops.edit_logits(got[:, :vocab], edits)
    ReferenceOps().edit_logits(want[:, :vocab], edits)
    got = got.cpu()
    same = torch.equal(got.isfinite(), want.isfinite()) and torch.equal(got.isnan(), want.isnan())
    error = relative(got.nan_to_num(neginf=0.0), want.nan_to_num(neginf=0.0)) if same else torch.inf
    return Outcome(error, ELEMENTWISE_TOLERANCE[torch.float32], got)


def logprobs(ops: Ops, device: str, vocab: int, top: int) -> Outcome:
    """Ties, zeros of both signs, NaN, infinities, rows of -inf and tokens that are none."""
    _, generator = seeded("logprobs")
    logits = (torch.randn((10, vocab), generator=generator) * 4).round() / 2
    logits[0] = 0.0
    logits[0, ::3] = -0.0
    logits[1, 4] = torch.nan
    logits[2] = -torch.inf
    logits[3, 1] = torch.inf
    logits[4, 2:] = -torch.inf
    tokens = torch.tensor([1, 2, 3, 4, 2, vocab - 1, -1, vocab, 0, 1])
    got = ops.logprobs(logits.to(device), tokens.to(device), top)
    want = ReferenceOps().logprobs(logits, tokens, top)
    exact = torch.equal(got.rank.cpu(), want.rank) and torch.equal(got.ids.cpu(), want.ids)
    pairs = [(got.chosen.cpu(), want.chosen), (got.values.cpu(), want.values)]
    # Infinity and NaN must be where they are in the reference.
    errors = [float((a - b).abs().nan_to_num(nan=0.0).max()) for a, b in pairs if a.numel()]
    for a, b in pairs:
        exact = exact and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())
    return Outcome(worst(errors) if exact else torch.inf, 1e-5, torch.cat((got.chosen.cpu(), got.values.cpu().ravel())))
