"""The work list for attention as NumPy makes it: a twin of `kernels.cpu.plan`, by other means."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pagemill.kernels.cpu.plan import (
    ITEM_END,
    ITEM_FIRST,
    ITEM_HEAD,
    ITEM_HEADS,
    ITEM_IS_PART,
    ITEM_SEGMENT,
    ITEM_TOKENS,
    ROW_PENDING,
    ROW_PIECES,
    ROW_POSITION,
    ROW_SEGMENT,
    ROW_SEGMENTS,
    ROW_SLOT,
    SHARED_ROWS,
    STREAMED_ROWS,
    TILE_ROWS,
    AttentionPlan,
)
from pagemill.kernels.cpu.plan_sharing import SEGMENT
from pagemill.kernels.metadata import HostMetadata

_READING_ROWS = 24
_ITEMS_PER_THREAD = 3

IntArray = npt.NDArray[np.int32]


def attention_plan(
    host: HostMetadata, *, group: int, num_kv_heads: int, block_size: int, threads: int, window: int = 0
) -> AttentionPlan:
    """Items that together cover every query token, head and segment that it sees once.

    group: query heads of a key/value head. window: tokens that a row sees, 0 for all before it.
    """
    query_start, lengths = host.query_start, np.diff(host.query_start)
    first_position = host.seq_lens - lengths
    sequence = np.repeat(np.arange(lengths.shape[0], dtype=np.int32), lengths)
    num_tokens = sequence.shape[0]
    rows = np.empty((num_tokens, 6), np.int32)
    position = first_position[sequence] + np.arange(num_tokens, dtype=np.int32) - query_start[sequence]
    rows[:, ROW_POSITION] = position
    rows[:, ROW_SEGMENT] = np.maximum(position + 1 - window, 0) // SEGMENT if window else 0
    rows[:, ROW_SEGMENTS] = position // SEGMENT + 1 - rows[:, ROW_SEGMENT]
    shared, groups = ({}, []) if window else shared_segments(host, first_position, group, block_size)

    most = max(1, TILE_ROWS // group)
    tiles = -(-lengths // most)
    owner = np.repeat(np.arange(lengths.shape[0], dtype=np.int32), tiles)
    first = (np.arange(owner.shape[0]) - (np.cumsum(tiles) - tiles)[owner]) * most
    count = np.minimum(lengths[owner] - first, most)
    first += query_start[owner]
    begin = rows[first, ROW_SEGMENT]
    end = rows[first + count - 1, ROW_POSITION] // SEGMENT + 1
    if shared:
        begin = begin.copy()
        for index, segments in shared.items():
            begin[np.searchsorted(owner, index)] = segments  # its tokens are one tile
    items = np.stack(
        [owner, first, count, np.zeros_like(owner), np.full_like(owner, num_kv_heads), begin, end, begin > 0], axis=1
    ).astype(np.int32)
    items[:, ITEM_IS_PART] = 0
    tokens = np.arange(num_tokens, dtype=np.int32)
    if shared:
        items[np.isin(owner, list(shared)), ITEM_IS_PART] = 1
        together, tokens = _group_items(groups, host, group, num_kv_heads, tokens)
        items = np.concatenate([items[begin < end], together])
    items = _deal_out(items, group, num_kv_heads, threads)
    return AttentionPlan(items, tokens, rows, _number_parts(items, tokens, rows))


def shared_segments(
    host: HostMetadata, first_position: IntArray, group: int, block_size: int
) -> tuple[dict[int, int], list[tuple[list[int], int]]]:
    """Leading segments that sequences with few rows have in common with others.

    Returns for each such sequence how many they are, and (sequences, segment) of each item to compute for several.
    """
    lengths = np.diff(host.query_start)
    whole = (first_position + 1) // SEGMENT  # segments that all of a sequence's tokens see to the end
    few = max(1, STREAMED_ROWS // group)
    may = np.flatnonzero((lengths > 0) & (lengths <= few) & (whole > 0))
    shared: dict[int, int] = {}
    groups: list[tuple[list[int], int]] = []
    if may.shape[0] < 2 or np.unique(host.block_tables[may, 0]).shape[0] == may.shape[0]:
        return shared, groups
    alike: list[npt.NDArray[np.intp]] = [may]
    segment = 0
    while alike:
        blocks = slice(segment * SEGMENT // block_size, -(-(segment + 1) * SEGMENT // block_size))
        following = []
        for members in alike:
            members = members[whole[members] > segment]
            if members.shape[0] < 2:
                continue
            tables = host.block_tables[members, blocks]
            same = (tables == tables[0]).all(axis=1)
            parts = [members]
            if not same.all():
                by_blocks: dict[bytes, list[int]] = {}
                for member, table in zip(members.tolist(), tables, strict=True):
                    by_blocks.setdefault(table.tobytes(), []).append(member)
                parts = [np.array(part) for part in by_blocks.values() if len(part) > 1]
            for part in parts:
                following.append(part)
                groups.append((part.tolist(), segment))
                shared.update(dict.fromkeys(part.tolist(), segment + 1))
        alike = following
        segment += 1
    return shared, groups


def _group_items(
    groups: list[tuple[list[int], int]], host: HostMetadata, group: int, num_kv_heads: int, tokens: IntArray
) -> tuple[IntArray, IntArray]:
    """Items of several sequences, and `tokens` with theirs behind the others."""
    most = max(1, SHARED_ROWS // group)
    start = host.query_start.tolist()
    lists, items = [tokens], []
    known: dict[tuple[int, int], tuple[list[int], int, int]] = {}
    used = tokens.shape[0]
    for members, segment in groups:
        key = (members[0], len(members))
        if key not in known or known[key][0] != members:
            own = [token for member in members for token in range(start[member], start[member + 1])]
            known[key] = (members, used, len(own))
            lists.append(np.array(own, np.int32))
            used += len(own)
        _, first, count = known[key]
        pieces = -(-count // most)
        for piece in range(pieces):
            low, high = count * piece // pieces, count * (piece + 1) // pieces
            items.append((members[0], first + low, high - low, 0, num_kv_heads, segment, segment + 1, 1))
    return np.array(items, np.int32), np.concatenate(lists)


def _deal_out(items: IntArray, group: int, num_kv_heads: int, threads: int) -> IntArray:
    """Cut items where their number or size would leave threads idle, and put the largest first."""
    segments = items[:, ITEM_END] - items[:, ITEM_SEGMENT]
    many_rows = items[:, ITEM_TOKENS] * group > STREAMED_ROWS
    cost = (items[:, ITEM_TOKENS] * group + _READING_ROWS).astype(np.int64) * segments
    if threads > 1 and items.shape[0]:
        largest = max(1, int(cost.sum()) // (threads * _ITEMS_PER_THREAD))
        # Packed copies are of one head anyway; else the heads of a block stay together, they lie side by side.
        heads = np.where(many_rows, num_kv_heads, 1)
        cuts = np.where(cost > largest * heads, np.minimum(segments, -(-cost // (largest * heads))), 1)
        if int((heads * cuts).sum()) < threads * _ITEMS_PER_THREAD:
            heads[:] = num_kv_heads
        items = _cut(items, heads, cuts, num_kv_heads)
        cost = np.repeat(cost // (heads * cuts), heads * cuts)
    return items[np.argsort(-cost, kind="stable")]


def _cut(items: IntArray, heads: npt.NDArray[Any], cuts: npt.NDArray[Any], num_kv_heads: int) -> IntArray:
    """Each item in heads * cuts pieces: every kv head alone or all together, and ranges of its segments."""
    pieces = heads * cuts
    if (pieces == 1).all():
        return items
    whole = np.repeat(np.arange(items.shape[0]), pieces)
    piece = np.arange(whole.shape[0]) - (np.cumsum(pieces) - pieces)[whole]
    cut, head = np.divmod(piece, heads[whole])
    result = items[whole]
    single = heads[whole] > 1
    result[single, ITEM_HEAD] = head[single]
    result[single, ITEM_HEADS] = 1
    begin, segments = items[whole, ITEM_SEGMENT], (items[:, ITEM_END] - items[:, ITEM_SEGMENT])[whole]
    result[:, ITEM_SEGMENT] = begin + segments * cut // cuts[whole]
    result[:, ITEM_END] = begin + segments * (cut + 1) // cuts[whole]
    result[:, ITEM_IS_PART] |= cuts[whole] > 1
    return result


def _number_parts(items: IntArray, tokens: IntArray, rows: IntArray) -> int:
    """Write to `rows` where the parts of tokens lie and how many items make them; returns the number of parts."""
    rows[:, ROW_SLOT:] = 0
    parts = items[items[:, ITEM_IS_PART] > 0]
    if not parts.shape[0]:
        return 0
    counts = parts[:, ITEM_TOKENS]
    entry = np.repeat(parts[:, ITEM_FIRST] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    pieces = np.bincount(tokens[entry], minlength=rows.shape[0])
    rows[:, ROW_PIECES] = rows[:, ROW_PENDING] = pieces
    kept = np.where(pieces > 0, rows[:, ROW_SEGMENTS], 0)
    rows[:, ROW_SLOT] = np.cumsum(kept) - kept
    return int(kept.sum())
