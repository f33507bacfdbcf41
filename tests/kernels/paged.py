"""Ragged batches over a paged pool, with everything that a kernel must not read made poisonous."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagemill.kernels.layout import KVForm, KVLayout, LayerKV
from pagemill.kernels.metadata import AttentionMetadata
from pagemill.kernels.reference import ReferenceOps

WILD_ID = 2**31 - 1


@dataclass
class PagedCase:
    """A pool whose owned slots hold random keys and values and whose other slots hold NaN."""

    layout: KVLayout
    pool: torch.Tensor
    kv: LayerKV
    meta: AttentionMetadata
    query: torch.Tensor
    key: torch.Tensor  # of this step's tokens, as they lie in the pool
    value: torch.Tensor


def make_case(
    seq_lens: list[int],
    query_lens: list[int],
    *,
    block_size: int = 16,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    form: KVForm | None = None,
    seed: int = 0,
) -> PagedCase:
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-length // block_size) for length in seq_lens]
    layout = KVLayout(
        num_blocks=sum(blocks) + 3,
        num_layers=2,
        block_size=block_size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        form=form,
    )
    pool = layout.allocate()
    pool.fill_(float("nan"))
    kv = layout.layer(pool, 1)
    ids = rng.permutation(np.arange(1, layout.num_blocks))
    tables = np.full((len(seq_lens), max(blocks, default=0) + 2), WILD_ID, np.int32)
    slots: list[int] = []
    positions: list[int] = []
    keys, values = [], []
    used = 0
    for row, (length, queries) in enumerate(zip(seq_lens, query_lens, strict=True)):
        tables[row, : blocks[row]] = ids[used : used + blocks[row]]
        used += blocks[row]
        own = [int(tables[row, p // block_size]) * block_size + p % block_size for p in range(length)]
        key = torch.randn((length, kv_heads, head_dim), generator=generator).to(dtype)
        value = torch.randn((length, kv_heads, head_dim), generator=generator).to(dtype)
        kv.scatter(torch.tensor(own, dtype=torch.int64), key, value)
        slots += own[length - queries :]
        positions += range(length - queries, length)
        keys.append(key[length - queries :])
        values.append(value[length - queries :])
    meta = AttentionMetadata.build(
        query_start=np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
        seq_lens=np.array(seq_lens, np.int32),
        block_tables=tables,
        slot_mapping=np.array(slots, np.int64),
        positions=np.array(positions, np.int64),
    )
    query = torch.randn((len(slots), kv_heads * group, head_dim), generator=generator).to(dtype)
    return PagedCase(layout, pool, kv, meta, query, torch.cat(keys), torch.cat(values))


def naive_attention(case: PagedCase, scale: float, window: int = 0) -> torch.Tensor:
    """Attention one query token and head at a time, reading slot by slot: shares no code with any back end."""
    host, kv = case.meta.host, case.kv
    out = torch.zeros_like(case.query, dtype=torch.float64)
    group = case.query.shape[1] // kv.num_kv_heads
    for row, seq_len in enumerate(host.seq_lens):
        begin, end = host.query_start[row], host.query_start[row + 1]
        table = torch.from_numpy(host.block_tables[row, : -(-seq_len // kv.block_size)]).long()
        keys, values = kv.gather(table)
        for token in range(begin, end):
            position = seq_len - (end - begin) + (token - begin)
            visible = [p for p in range(position + 1) if not window or position - p < window]
            for head in range(case.query.shape[1]):
                key, value = keys[visible, head // group].double(), values[visible, head // group].double()
                weights = torch.softmax(key @ case.query[token, head].double() * scale, dim=0)
                out[token, head] = weights @ value
    return out


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the Euclidean norm; infinite where anything is not finite."""
    if not torch.isfinite(actual).all():
        return float("inf")
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


REFERENCE = ReferenceOps()
