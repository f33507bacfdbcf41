"""The CPU's work list for attention: largest items first, taken by the threads as they come free."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagemill.kernels.metadata import HostMetadata


def attention_items(host: HostMetadata, *, tile_tokens: int, num_kv_heads: int, threads: int) -> npt.NDArray[np.int32]:
    """int32 [n, 5]: sequence, first query token, query tokens (at most tile_tokens), first kv head, kv heads.

    Together the items cover every query token and head once. Where sequences are plenty an item takes all heads of its
    sequence, whose keys lie side by side; where they are few the heads are dealt out, to keep the threads busy.
    """
    query_lens = np.diff(host.query_start)
    tiles = -(-query_lens // tile_tokens)
    sequence = np.repeat(np.arange(host.seq_lens.shape[0], dtype=np.int32), tiles)
    first_tile = np.cumsum(tiles) - tiles
    first = (np.arange(sequence.shape[0]) - first_tile[sequence]) * tile_tokens
    count = np.minimum(query_lens[sequence] - first, tile_tokens)
    context = host.seq_lens[sequence] - query_lens[sequence] + first + count
    order = np.argsort(-(context.astype(np.int64) * count), kind="stable")
    items = np.zeros((sequence.shape[0], 5), np.int32)
    items[:, 0], items[:, 1], items[:, 2], items[:, 4] = sequence[order], first[order], count[order], num_kv_heads
    if threads == 1 or items.shape[0] >= 3 * threads:
        return items
    items = np.repeat(items, num_kv_heads, axis=0)
    items[:, 3] = np.tile(np.arange(num_kv_heads, dtype=np.int32), items.shape[0] // num_kv_heads)
    items[:, 4] = 1
    return items
