"""min_p, top_k and top_p as one threshold per row: every token whose logit is at least that stays.

All three filters keep a prefix of the descending logits with all ties of its last, so their composition does too, and
the sampling kernel needs one float32 per row instead of a mask over the vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagemill.kernels.ops import SampleBatch


def logit_thresholds(logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """float32 [R]: the smallest logit that each row of `logits` [R, V] keeps; -inf where nothing is filtered."""
    thresholds = torch.full((logits.shape[0],), -torch.inf, dtype=torch.float32, device=logits.device)
    filtered = (batch.top_k > 0) | (batch.min_p > 0) | (batch.top_p < 1)
    rows = np.flatnonzero(filtered & (batch.temperature > 0))
    if rows.size:
        at = torch.from_numpy(rows).to(logits.device)
        thresholds[at] = _filtered(logits[at], batch, rows)
    return thresholds


def _filtered(logits: torch.Tensor, batch: SampleBatch, rows: npt.NDArray[np.int64]) -> torch.Tensor:
    def column(values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(logits.device).unsqueeze(1)

    vocab = logits.shape[1]
    descending = logits.sort(dim=1, descending=True).values
    scaled = descending.double() / column(batch.temperature[rows].astype(np.float64))
    top = scaled[:, :1]
    with np.errstate(divide="ignore"):
        log_min_p = np.log(batch.min_p[rows].astype(np.float64))
    kept = (scaled >= top + column(log_min_p)) & scaled.isfinite()
    counts = kept.sum(dim=1, keepdim=True)

    # top_k: the k-th largest and its ties.
    top_k = column(np.where(batch.top_k[rows] > 0, batch.top_k[rows], vocab).astype(np.int64))
    last = (torch.minimum(top_k, counts) - 1).clamp_min(0)
    kept &= descending >= descending.gather(1, last)

    # top_p: the shortest prefix whose mass reaches the share, and its ties.
    mass = torch.where(kept, (scaled - top).exp(), 0.0).cumsum(dim=1)
    share = column(np.minimum(batch.top_p[rows].astype(np.float64), 1.0))
    reached = torch.searchsorted(mass, share * mass[:, -1:])
    last = torch.where(share < 1.0, reached, vocab - 1)
    last = torch.minimum(last, (kept.sum(dim=1, keepdim=True) - 1).clamp_min(0))
    return descending.gather(1, last).squeeze(1)
