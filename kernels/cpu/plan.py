"""The CPU's work list for attention: largest items first, taken by the threads as they come free.

The context is cut into segments of 256 tokens, and each row's segments are always computed apart and joined in order,
also where one item does them all. So how the work is dealt out changes no bit of the result. Three reasons to deal out
a row's segments:

* few sequences are long: their segments go to different threads (split-KV, as in Flash-Decoding);
* sequences whose tables begin with the same blocks read them once, as rows of one item;
* where neither holds a sequence is one item, whose blocks are read from end to end.

Whoever finishes the last item of a token joins its parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagemill.kernels.metadata import HostMetadata

SEGMENT = 256
"""Context tokens of a segment. Shorter ones share and split more, and cost more joining."""

TILE_ROWS = 96
"""Rows (query tokens times the heads of a group) of an item at most, where one token has fewer: its keys and values
are brought into the cache, and packed, once for all of them."""

SHARED_ROWS = 192
"""The same for an item of several sequences."""

STREAMED_ROWS = 12
"""Up to so many rows read keys and values where they lie. More of them share a packed copy."""

ITEM_SEQUENCE, ITEM_FIRST, ITEM_TOKENS, ITEM_HEAD, ITEM_HEADS, ITEM_SEGMENT, ITEM_END, ITEM_IS_PART = range(8)
"""Columns of an item: the sequence whose block table is read; first entry of `tokens` and their number; first kv head
and their number; segments; whether its results are parts to be joined."""

ROW_POSITION, ROW_SEGMENT, ROW_SEGMENTS, ROW_SLOT, ROW_PIECES, ROW_PENDING = range(6)
"""Columns of a query token's row: position; first segment seen and their number; number of its first part; items that
make its parts, and those of them that are not done."""

# What an item costs beside its rows, in rows: few rows wait for memory.
_READING_ROWS = 24
_ITEMS_PER_THREAD = 3

IntArray = npt.NDArray[np.int32]


class AttentionPlan(NamedTuple):
    """items [n, 8], tokens [m] (indices of query tokens), rows [T, 6] and how many parts of segments to keep."""

    items: IntArray
    tokens: IntArray
    rows: IntArray
    num_parts: int


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


class PlanKeeper:
    """Makes the plans of one kind of layer. Most steps are the same sequences with one token more each, whose work is
    the same but for their positions: then the last plan is returned once more, changed. It is valid until the next."""

    def __init__(self) -> None:
        self._shape: tuple[int, ...] = ()
        self._segments = np.zeros(0, np.int32)
        self._plan: AttentionPlan | None = None

    def plan(
        self, host: HostMetadata, *, group: int, num_kv_heads: int, block_size: int, threads: int, window: int = 0
    ) -> AttentionPlan:
        """As `attention_plan`."""
        shape = (group, num_kv_heads, block_size, threads, host.positions.shape[0])
        # Only sequences that are a segment long have anything to share.
        decodes = host.positions.shape[0] == host.seq_lens.shape[0] and not window
        alone = decodes and (host.query_start[1:] > host.query_start[:-1]).all() and _long(host) < 2
        segments = (host.seq_lens - 1) // SEGMENT
        if alone and self._plan is not None and shape == self._shape and (segments == self._segments).all():
            np.subtract(host.seq_lens, 1, out=self._plan.rows[:, ROW_POSITION])
            return self._plan
        plan = attention_plan(
            host, group=group, num_kv_heads=num_kv_heads, block_size=block_size, threads=threads, window=window
        )
        self._shape, self._segments, self._plan = shape, segments, plan if alone else None
        return plan


def _long(host: HostMetadata) -> int:
    return int((host.seq_lens >= SEGMENT).sum())


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
