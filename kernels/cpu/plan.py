"""The CPU's work list for attention: largest items first, taken by the threads as they come free.

The context is cut into segments of 256 tokens, and each row's segments are always computed apart and joined in order,
also where one item does them all. So how the work is dealt out changes no bit of the result. Three reasons to deal out
a row's segments:

* few sequences are long: their segments go to different threads (split-KV, as in Flash-Decoding);
* sequences whose tables begin with the same blocks read them once, as rows of one item;
* where neither holds a sequence is one item, whose blocks are read from end to end.

Whoever finishes the last item of a token joins its parts.

The list is made anew each step, by compiled code: with NumPy it took some sixty calls, which cost most in a step whose
kernels had just taken the caches for themselves.
"""

# numba ships no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.plan_sharing import SEGMENT, shared_segments
from pagemill.kernels.metadata import HostMetadata

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

ITEM_WORDS = 8
ROW_WORDS = 6

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
    made = _plan(host.query_start, host.seq_lens, host.block_tables, group, num_kv_heads, block_size, threads, window)
    return AttentionPlan(*made)


@helper
def _up(value: int, unit: int) -> int:
    return -(-value // unit)


@helper
def _rows(query_start: Any, seq_lens: Any, window: int) -> Any:
    """What is known of each query token; of its parts nothing yet."""
    rows = np.zeros((query_start[-1], ROW_WORDS), np.int32)
    for sequence in range(seq_lens.shape[0]):
        first, end = query_start[sequence], query_start[sequence + 1]
        for token in range(first, end):
            position = seq_lens[sequence] - end + token
            segment = max(position + 1 - window, 0) // SEGMENT if window else 0
            row = rows[token]
            row[ROW_POSITION] = position
            row[ROW_SEGMENT] = segment
            row[ROW_SEGMENTS] = position // SEGMENT + 1 - segment
    return rows


@helper
def _fill(item: Any, sequence: int, first: int, count: int, heads: int, begin: int, end: int, is_part: int) -> None:
    item[ITEM_SEQUENCE], item[ITEM_FIRST], item[ITEM_TOKENS] = sequence, first, count
    item[ITEM_HEAD], item[ITEM_HEADS] = 0, heads
    item[ITEM_SEGMENT], item[ITEM_END], item[ITEM_IS_PART] = begin, end, is_part


@helper
def _list(query_start: Any, seq_lens: Any, block_tables: Any, rows: Any, group: int, kv_heads: int, size: int) -> Any:
    """Items as large as they may be, and `tokens`; size: of a block, 0 where nothing may be shared."""
    most = max(1, TILE_ROWS // group)
    shared_most = max(1, SHARED_ROWS // group)
    few = max(1, STREAMED_ROWS // group) if size else -1
    shared, members, starts, segments, repeats = shared_segments(query_start, seq_lens, block_tables, max(size, 1), few)
    total = query_start[-1]
    more = 0  # tokens of groups, of which each has its place in `tokens` once more
    pieces = 0
    for index in range(segments.shape[0]):
        count = 0
        for member in members[starts[index] : starts[index + 1]]:
            count += query_start[member + 1] - query_start[member]
        pieces += _up(count, shared_most)
        more += 0 if repeats[index] else count
    for sequence in range(seq_lens.shape[0]):
        pieces += _up(query_start[sequence + 1] - query_start[sequence], most)
    tokens = np.empty(total + more, np.int32)
    for token in range(total):
        tokens[token] = token
    items = np.empty((pieces, ITEM_WORDS), np.int32)
    used = 0
    for sequence in range(seq_lens.shape[0]):
        end = query_start[sequence + 1]
        for first in range(query_start[sequence], end, most):
            count = min(most, end - first)
            begin = max(rows[first, ROW_SEGMENT], shared[sequence])  # where anything is shared, its tokens are one item
            last = rows[first + count - 1, ROW_POSITION] // SEGMENT + 1
            if begin < last:
                _fill(items[used], sequence, first, count, kv_heads, begin, last, 1 if shared[sequence] else 0)
                used += 1
    place = total
    count = 0
    for index in range(segments.shape[0]):
        if not repeats[index]:
            place += count
            count = 0
            for member in members[starts[index] : starts[index + 1]]:
                for token in range(query_start[member], query_start[member + 1]):
                    tokens[place + count] = token
                    count += 1
        pieces = _up(count, shared_most)
        for piece in range(pieces):
            low, high = count * piece // pieces, count * (piece + 1) // pieces
            segment = segments[index]
            _fill(items[used], members[starts[index]], place + low, high - low, kv_heads, segment, segment + 1, 1)
            used += 1
    return items[:used], tokens


@helper
def _deal_out(items: Any, group: int, kv_heads: int, threads: int) -> Any:
    """Cut items where their number or size would leave threads idle, and put the largest first."""
    count = items.shape[0]
    cost, heads, cuts = np.empty(count, np.int64), np.ones(count, np.int64), np.ones(count, np.int64)
    for index in range(count):
        item = items[index]
        cost[index] = (item[ITEM_TOKENS] * group + _READING_ROWS) * (item[ITEM_END] - item[ITEM_SEGMENT])
    if threads > 1 and count:
        largest = max(1, cost.sum() // (threads * _ITEMS_PER_THREAD))
        for index in range(count):
            item = items[index]
            if item[ITEM_TOKENS] * group > STREAMED_ROWS:
                # Packed copies are of one head anyway; else the heads of a block stay together, they lie side by side.
                heads[index] = kv_heads
            if cost[index] > largest * heads[index]:
                segments = item[ITEM_END] - item[ITEM_SEGMENT]
                cuts[index] = min(segments, _up(cost[index], largest * heads[index]))
        if (heads * cuts).sum() < threads * _ITEMS_PER_THREAD:
            heads[:] = kv_heads
    pieces = heads * cuts
    cut = np.empty((pieces.sum(), ITEM_WORDS), np.int32)
    weight = np.empty(cut.shape[0], np.int64)
    used = 0
    for index in range(count):
        begin = items[index, ITEM_SEGMENT]
        segments = items[index, ITEM_END] - begin
        for piece in range(pieces[index]):
            part, head = piece // heads[index], piece % heads[index]
            made = cut[used]
            made[:] = items[index]
            if heads[index] > 1:
                made[ITEM_HEAD] = head
                made[ITEM_HEADS] = 1
            made[ITEM_SEGMENT] = begin + segments * part // cuts[index]
            made[ITEM_END] = begin + segments * (part + 1) // cuts[index]
            if cuts[index] > 1:
                made[ITEM_IS_PART] = 1
            weight[used] = -(cost[index] // pieces[index])
            used += 1
    order = np.argsort(weight, kind="mergesort")
    dealt = np.empty_like(cut)
    for index in range(used):
        dealt[index] = cut[order[index]]
    return dealt


@helper
def _number_parts(items: Any, tokens: Any, rows: Any) -> int:
    """Write to `rows` where the parts of tokens lie and how many items make them; returns the number of parts."""
    for index in range(items.shape[0]):
        item = items[index]
        if item[ITEM_IS_PART]:
            for token in tokens[item[ITEM_FIRST] : item[ITEM_FIRST] + item[ITEM_TOKENS]]:
                rows[token, ROW_PIECES] += 1
    parts = 0
    for token in range(rows.shape[0]):
        rows[token, ROW_PENDING] = rows[token, ROW_PIECES]
        rows[token, ROW_SLOT] = parts
        if rows[token, ROW_PIECES]:
            parts += rows[token, ROW_SEGMENTS]
    return parts


@helper
def make_plan(
    query_start: Any,
    seq_lens: Any,
    block_tables: Any,
    group: int,
    kv_heads: int,
    block_size: int,
    threads: int,
    window: int,
) -> Any:
    """`attention_plan` for compiled code."""
    rows = _rows(query_start, seq_lens, window)
    items, tokens = _list(query_start, seq_lens, block_tables, rows, group, kv_heads, 0 if window else block_size)
    items = _deal_out(items, group, kv_heads, threads)
    return items, tokens, rows, _number_parts(items, tokens, rows)


@kernel
def _plan(
    query_start: Any,
    seq_lens: Any,
    block_tables: Any,
    group: int,
    kv_heads: int,
    block_size: int,
    threads: int,
    window: int,
) -> Any:
    return make_plan(query_start, seq_lens, block_tables, group, kv_heads, block_size, threads, window)
