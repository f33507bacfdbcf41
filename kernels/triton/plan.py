"""The attention work list: which query tile reads which range of keys. Plain numpy, so it is tested without a device.

One kernel serves prefill, decode, mixed, chunked, windowed and split batches; they differ only in this list. A work
item is one query tile of one sequence (up to `block_m` packed rows: tokens x query heads of one KV head) and one range
of keys. A tile whose keys are many while the device has little else to do is cut into parts, each an item of its own,
and the merge list says which parts make up which output token.

Invariants, property-tested: every (query token, visible key) pair lies in exactly one item; the parts of a tile are
numbered contiguously and cut at absolute positions; no part is empty; every query token belongs to one tile, so every
output row is written, also where nothing is visible (the kernel then writes zeros).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

WORK_FIELDS = 8
"""int32 words in a work record: sequence, first token, tokens, first position, key range low, high, part, unused.

`first token` counts in the flat batch; the key range is half open, in positions; `part` is -1 where the item writes
the output itself. Eight words keep each record within one aligned 32-byte sector.
"""

MERGE_FIELDS = 4
"""int32 words in a merge record: token in the batch, first part, number of parts, place of the token in the tile."""

MIN_PART_TOKENS = 256
"""Keys below which another part costs more in merging than it brings."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """Rows and keys that one kernel program holds at a time: `block_m` rows, `tile` keys."""

    block_m: int
    tile: int


@dataclass(frozen=True, slots=True)
class WorkList:
    """`work` int32 [items, 8], `merge` int32 [merged tokens, 4], and the number of parts the scratch must hold."""

    work: IntArray
    merge: IntArray
    num_parts: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The work of one step for layers of one shape: `decode` in small query tiles, `prefill` in large ones."""

    decode: WorkList
    prefill: WorkList


def plan_attention(
    query_start: npt.NDArray[np.integer],
    seq_lens: npt.NDArray[np.integer],
    *,
    group: int,
    kv_heads: int,
    decode: TileShape,
    prefill: TileShape,
    window: int,
    target_programs: int,
) -> AttentionPlan:
    """Work lists where the queries of s are the last `query_start[s + 1] - query_start[s]` of its `seq_lens[s]` tokens.

    `query_start` [S + 1], `seq_lens` [S] (context including this step). `window` 0 means none. Items are cut into
    parts so that about `target_programs` programs (items x `kv_heads`) share the keys evenly; 0 never cuts.
    Longest items come first: the device hands programs out in order, and a long one started last is waited for alone.
    """
    starts = np.asarray(query_start, dtype=np.int64)
    contexts = np.asarray(seq_lens, dtype=np.int64)
    query_lens = np.diff(starts)
    small = query_lens * group <= decode.block_m
    decode_tiles = _query_tiles(np.flatnonzero(small), starts, query_lens, contexts, decode.block_m // group, window)
    prefill_tiles = _query_tiles(np.flatnonzero(~small), starts, query_lens, contexts, prefill.block_m // group, window)
    budget = target_programs // kv_heads
    total = int((decode_tiles[5] - decode_tiles[4]).sum() + (prefill_tiles[5] - prefill_tiles[4]).sum())
    share = -(-total // budget) if budget > 0 else 0
    return AttentionPlan(
        decode=_cut(decode_tiles, share, decode.tile), prefill=_cut(prefill_tiles, share, prefill.tile)
    )


def _query_tiles(
    sequences: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    query_lens: npt.NDArray[np.int64],
    contexts: npt.NDArray[np.int64],
    tile_tokens: int,
    window: int,
) -> npt.NDArray[np.int64]:
    """[6, tiles]: sequence, first token, tokens, first position, key range low, high."""
    lens = query_lens[sequences]
    counts = -(-lens // tile_tokens)
    owner = np.repeat(sequences, counts)
    ordinal = np.arange(owner.size) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = ordinal * tile_tokens
    tokens = np.minimum(tile_tokens, query_lens[owner] - offset)
    first_position = contexts[owner] - query_lens[owner] + offset
    high = np.maximum(np.minimum(contexts[owner], first_position + tokens), 0)
    low = np.maximum(first_position - window + 1, 0) if window else np.zeros_like(high)
    return np.stack([owner, starts[owner] + offset, tokens, first_position, np.minimum(low, high), high])


def _cut(tiles: npt.NDArray[np.int64], share: int, tile: int) -> WorkList:
    low, high = tiles[4], tiles[5]
    span = high - low
    chunk = -(-max(share, MIN_PART_TOKENS) // tile) * tile
    # Twice the fair share, so that a batch of about equal sequences is not cut for a gain smaller than the merge.
    is_cut = (span > 2 * chunk) if share > 0 else np.zeros(span.shape, dtype=bool)
    first_chunk = low // chunk
    counts = np.where(is_cut, -(-high // chunk) - first_chunk, 1)
    source = np.repeat(np.arange(span.size), counts)
    ordinal = np.arange(source.size) - np.repeat(np.cumsum(counts) - counts, counts)

    work = np.zeros((source.size, WORK_FIELDS), dtype=np.int32)
    work[:, :6] = tiles[:, source].T
    cut_items = np.flatnonzero(is_cut[source])
    begin = (first_chunk[source] + ordinal)[cut_items] * chunk
    work[cut_items, 4] = np.maximum(work[cut_items, 4], begin)
    work[cut_items, 5] = np.minimum(work[cut_items, 5], begin + chunk)
    work[:, 6] = -1
    work[cut_items, 6] = np.arange(cut_items.size)

    merge = _merge_records(tiles, np.flatnonzero(is_cut), counts)
    order = np.argsort(work[:, 4] - work[:, 5], kind="stable")
    return WorkList(work=work[order], merge=merge, num_parts=int(cut_items.size))


def _merge_records(
    tiles: npt.NDArray[np.int64], cut_tiles: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> IntArray:
    tokens = tiles[2][cut_tiles]
    parts = counts[cut_tiles]
    first_part = np.cumsum(parts) - parts
    place = np.arange(int(tokens.sum())) - np.repeat(np.cumsum(tokens) - tokens, tokens)
    merge = np.empty((place.size, MERGE_FIELDS), dtype=np.int32)
    merge[:, 0] = np.repeat(tiles[1][cut_tiles], tokens) + place
    merge[:, 1] = np.repeat(first_part, tokens)
    merge[:, 2] = np.repeat(parts, tokens)
    merge[:, 3] = place
    return merge
