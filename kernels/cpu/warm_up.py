"""Compiling all that a model needs before its first request, with something to show meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pagemill.kernels.cpu.ops import CpuOps
from pagemill.kernels.layout import KVLayout
from pagemill.kernels.metadata import AttentionMetadata
from pagemill.kernels.ops import LogitEdits, SampleBatch


def warm_up(ops: CpuOps, layout: KVLayout, progress: Callable[[str, float], None] = lambda stage, share: None) -> None:
    """Compile every kernel, or load it from the cache, by running it once on next to nothing.

    layout: any pool of the model's dtype; one of a single small block does, since sizes are not compiled in. progress
    is called with a text and the share done, 0 to 1. Takes some 15 s in all the first time, well under one afterwards.
    """
    dtype, heads, dim = layout.dtype, layout.num_kv_heads, layout.head_dim
    kv = layout.layer(layout.allocate(), 0)
    rows = torch.zeros((1, heads, dim), dtype=dtype)
    hidden = torch.zeros((1, 2 * heads * dim), dtype=dtype)
    weight = torch.ones(2 * heads * dim, dtype=dtype)
    zero = np.zeros(1, np.int64)
    meta = AttentionMetadata.build(
        query_start=np.array([0, 1]),
        seq_lens=np.array([1]),
        block_tables=np.zeros((1, 1), np.int32),
        slot_mapping=zero - 1,
        positions=zero,
    )
    linear = ops.prepare_linear(torch.zeros((2, hidden.shape[1]), dtype=dtype))
    stages: list[tuple[str, Callable[[], object]]] = [
        ("attention", lambda: ops.paged_attention(rows, kv, meta, scale=1.0)),
        ("sampler", lambda: ops.sample(torch.zeros(1, 8), SampleBatch.greedy(1))),
        ("logit edits", lambda: ops.edit_logits(torch.zeros(1, 8), LogitEdits.one_of_each(8))),
        ("log-probabilities", lambda: ops.logprobs(torch.zeros(1, 8), torch.zeros(1, dtype=torch.int64), 1)),
        ("linear layers", lambda: ops.linear(hidden, linear)),
        ("KV writes", lambda: ops.write_kv(rows, rows, kv, meta.slot_mapping)),
        ("rotary embedding", lambda: ops.rotary_embedding(rows, rows.clone(), meta.positions, torch.zeros(1, dim))),
        ("norms", lambda: ops.rms_norm(hidden, weight, 1e-5)),
        ("norms", lambda: ops.add_rms_norm(hidden, hidden.float(), weight, 1e-5)),
        ("activation", lambda: ops.silu_and_mul(hidden)),
    ]
    for number, (name, run) in enumerate(stages):
        progress(f"compiling kernels: {name}", number / len(stages))
        run()
    progress("compiling kernels", 1.0)
