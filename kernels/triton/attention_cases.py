"""Ragged steps of attention, made to catch the known faults of paged kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagemill.kernels.layout import KVLayout, LayerKV
from pagemill.kernels.metadata import AttentionMetadata
from pagemill.kernels.ops import Ops
from pagemill.kernels.triton.comparison import seeded

WILD_BLOCK_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A ragged step: the queries of s are the last `query_lens[s]` of `seq_lens[s]` tokens. `spare_rows` follow."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_size: int = 16
    head_dim: int = 64
    kv_heads: int = 2
    group: int = 3
    dtype: torch.dtype = torch.float16
    window: int = 0
    spare_rows: int = 0


_EDGES = (1, 15, 16, 17, 63, 64, 65, 130)
_RAGGED = (1, 3, 0, 17, 33, 64, 50)
_MIXED_QUERIES, _MIXED_CONTEXTS = (1, 40, 1, 7, 0, 16), (100, 40, 1, 77, 30, 144)

ATTENTION_CASES: tuple[AttentionCase, ...] = (
    *(AttentionCase(f"decode block {b}", (1,) * 8, _EDGES, block_size=b) for b in (1, 8, 16, 24, 64, 128)),
    *(AttentionCase(f"decode head {d}", (1,) * 8, _EDGES, head_dim=d) for d in (16, 80, 96, 128, 256)),
    *(AttentionCase(f"decode group {g}", (1,) * 8, _EDGES, group=g, kv_heads=1) for g in (1, 4, 7, 20)),
    *(AttentionCase(f"prefill block {b}", _RAGGED, _RAGGED, block_size=b) for b in (1, 8, 16, 64, 128)),
    *(AttentionCase(f"prefill head {d}", _RAGGED, _RAGGED, head_dim=d) for d in (80, 96, 128)),
    *(AttentionCase(f"prefill group {g}", _RAGGED, _RAGGED, group=g, kv_heads=1) for g in (1, 4, 7, 20)),
    AttentionCase("mixed", _MIXED_QUERIES, _MIXED_CONTEXTS),
    AttentionCase("mixed, float32", _MIXED_QUERIES, _MIXED_CONTEXTS, dtype=torch.float32),
    AttentionCase("mixed, float32, head 128", _MIXED_QUERIES, _MIXED_CONTEXTS, head_dim=128, dtype=torch.float32),
    AttentionCase("mixed, bfloat16", _MIXED_QUERIES, _MIXED_CONTEXTS, dtype=torch.bfloat16),
    AttentionCase("spare rows", _MIXED_QUERIES, _MIXED_CONTEXTS, spare_rows=5),
    AttentionCase("chunk of a long prompt", (48, 50), (300, 170), group=4, block_size=32),
    *(AttentionCase(f"window {w}", _MIXED_QUERIES, _MIXED_CONTEXTS, window=w) for w in (1, 16, 17, 64, 100, 1000)),
    AttentionCase("window, block 64", (1, 70, 5), (300, 150, 133), block_size=64, window=65),
    AttentionCase("window, block 1", (1, 70), (90, 150), block_size=1, window=33),
    AttentionCase("split", (1, 1, 1), (2047, 5, 600), kv_heads=1),
    AttentionCase("split at part borders", (1, 1, 1), (1536, 1537, 1535), kv_heads=1, group=7),
    AttentionCase("split prefill", (40, 3), (1500, 1100), kv_heads=1, group=4, block_size=64),
    AttentionCase("split, head 80, float32", (1,), (1300,), kv_heads=1, head_dim=80, dtype=torch.float32),
    AttentionCase("split, window", (1, 9), (2500, 1900), kv_heads=1, window=1100),
    AttentionCase("split, window, block 128", (2,), (2500,), kv_heads=1, window=1500, block_size=128),
)


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The tensors of a case on a device."""

    query: torch.Tensor
    kv: LayerKV
    meta: AttentionMetadata


def make_attention_step(case: AttentionCase, ops: Ops, device: str) -> AttentionStep:
    """Random queries, keys and values for a case, in a pool where all else is NaN."""
    rng, generator = seeded(case.name)
    needed = [-(-length // case.block_size) for length in case.seq_lens]
    layout = KVLayout(
        num_blocks=1 + sum(needed) + 3,
        num_layers=2,
        block_size=case.block_size,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        device=device,
        form=ops.kv_form,
    )
    pool = layout.allocate()
    pool.fill_(torch.nan)
    kv = layout.layer(pool, 1)
    free = iter(rng.permutation(np.arange(1, layout.num_blocks)))
    tables = np.full((len(needed), max(needed) + 2), WILD_BLOCK_ID, dtype=np.int32)
    for sequence, (count, length) in enumerate(zip(needed, case.seq_lens, strict=True)):
        tables[sequence, :count] = [next(free) for _ in range(count)]
        at = np.arange(length)
        slots = tables[sequence, at // case.block_size].astype(np.int64) * case.block_size + at % case.block_size
        shape = (length, case.kv_heads, case.head_dim)
        key, value = torch.randn((2, *shape), generator=generator).to(device=device, dtype=case.dtype)
        kv.scatter(torch.from_numpy(slots).to(device), key, value)
    pairs = list(zip(case.query_lens, case.seq_lens, strict=True))
    tokens = sum(case.query_lens)
    meta = AttentionMetadata.build(
        query_start=np.cumsum([0, *case.query_lens]),
        seq_lens=np.array(case.seq_lens),
        block_tables=tables,
        slot_mapping=np.full(tokens, -1),
        positions=np.concatenate([np.arange(length - queries, length) for queries, length in pairs]),
        device=device,
    )
    heads = case.kv_heads * case.group
    rows = torch.randn((tokens + case.spare_rows, heads + 2, case.head_dim), generator=generator)
    return AttentionStep(rows.to(device=device, dtype=case.dtype)[:, 1:-1], kv, meta)
