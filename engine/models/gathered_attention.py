"""Attention with what the kernels lack (soft-capped scores, attention sinks), in plain torch on gathered blocks.

Slower than the kernels: each step copies the context of each sequence together first.
"""

from __future__ import annotations

import torch

from pagemill.kernels.layout import LayerKV
from pagemill.kernels.metadata import AttentionMetadata

_SCORES_AT_ONCE = 1 << 24  # elements, 64 MiB


def gathered_attention(
    query: torch.Tensor,
    kv: LayerKV,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention of query [T, Hq, D] over the paged context; returns [T, Hq, D]. Computed in float32.

    `softcap` and `sinks` [Hq] as in `AttentionCall`.
    """
    out = torch.empty_like(query)
    starts, lengths = meta.host.query_start.tolist(), meta.host.seq_lens.tolist()
    for sequence, length in enumerate(lengths):
        begin, end = starts[sequence], starts[sequence + 1]
        if begin == end:
            continue
        # What is behind every query's window may have been given back, and hold anything.
        oldest = max(0, length - (end - begin) + 1 - window) // kv.block_size if window else 0
        blocks = meta.block_tables[sequence, oldest : -(-length // kv.block_size)].long()
        length -= oldest * kv.block_size
        k, v = (part[:length].float().transpose(0, 1) for part in kv.gather(blocks))  # [Hk, length, D]
        at_once = max(1, _SCORES_AT_ONCE // (query.shape[1] * length))
        for first in range(begin, end, at_once):
            last = min(first + at_once, end)
            position = length - (end - first)
            out[first:last] = _attend(query[first:last], k, v, position, scale, window, softcap, sinks)
    return out


def _attend(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Queries [n, Hq, D] from `position` on, counted from the first of the keys and values [Hk, length, D]."""
    count, heads, dim = query.shape
    kv_heads, length = k.shape[:2]
    grouped = query.float().view(count, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    scores = (grouped.flatten(1, 2) @ k.transpose(1, 2) * scale).view(kv_heads, -1, count, length)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    query_at = torch.arange(position, position + count, device=query.device)[:, None]
    key_at = torch.arange(length, device=query.device)
    hidden = key_at > query_at
    if window:
        hidden |= query_at - key_at >= window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.float().view(kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(dim=-1)[..., :length]
    mixed = (weights.flatten(1, 2) @ v).view(kv_heads, -1, count, dim)
    return mixed.permute(2, 0, 1, 3).reshape(count, heads, dim).to(query.dtype)
