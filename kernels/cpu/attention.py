"""Paged attention on the CPU: the blocks are read where they lie, a segment of 256 tokens at a time.

One work item (see `plan`) is some query tokens, key/value heads and segments. All query heads that share a key/value
head are rows of the same tile, so that every key and value is read once for the whole group; so are the tokens of
several sequences that share a segment. Two ways through a segment, with the same sums:

* *streamed*, few rows, as in a decode: the memory is the limit. All heads of a block are read before the next block's,
  first keys, then values, straight from the pool.
* *packed*, many rows, as in a prefill: the arithmetic is the limit. The segment's values of one head are woven once
  into a copy that stays in the cache, and groups of rows go past keys and values with as many sums as the registers
  hold. Sizes that do not fit vectors (blocks not a multiple of 16 tokens, heads not of 32 dimensions) come here too.
  Where products are made in tiles (AMX) all rows come here, few or many: their sums run in another order.

Within a segment a row has one maximum: scores, then weights, then weighted values, with no rescaling in between. The
segments of a row join by their maxima and sums.

Left out, since it gained nothing on a quiet machine: asking the caches ahead for the values of a streamed segment and
its next keys, four blocks being read at once anyway; and fetching the next segment, or the next item's first, evenly
while this one is computed (in vectors 0.99 to 1.01 of the time, 64 to 96 decodes of 127 to 300 tokens, two threads).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill.kernels.cpu.attention_amx import AT_ONCE, begin_tiles, end_tiles
from pagemill.kernels.cpu.attention_packed import packed_segment
from pagemill.kernels.cpu.attention_rows import count_down, finish_row
from pagemill.kernels.cpu.attention_segment import (
    PART_HEADER,
    SCORE_BYTES,
    VECTOR_BYTES,
    join_parts,
    seen_by_any,
)
from pagemill.kernels.cpu.attention_streamed import streamed_segment
from pagemill.kernels.cpu.attention_tiles import (
    SPAN,
    element_size,
    factor_size,
    load_factors,
)
from pagemill.kernels.cpu.isa import LANES
from pagemill.kernels.cpu.jit import exact_helper, kernel
from pagemill.kernels.cpu.plan import (
    ITEM_END,
    ITEM_FIRST,
    ITEM_HEAD,
    ITEM_HEADS,
    ITEM_IS_PART,
    ITEM_SEGMENT,
    ITEM_SEQUENCE,
    ITEM_TOKENS,
    ROW_PENDING,
    ROW_PIECES,
    ROW_POSITION,
    SHARED_ROWS,
    STREAMED_ROWS,
)
from pagemill.kernels.cpu.plan_sharing import SEGMENT
from pagemill.kernels.cpu.simd import next_item
from pagemill.kernels.cpu.team import run
from pagemill.kernels.cpu.tiny_numbers import count_as_before, count_as_zero
from pagemill.kernels.cpu.views import vector

_STREAMED_AT_ONCE = 36
_SPARE_ROWS = AT_ONCE
"""Rows behind an item's, which its last tile may reach into."""
_NEGATIVE_INFINITY = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_LOG2_E = np.float32(1.4426950408889634)


@exact_helper
def _attend(
    item: Any,
    tokens: Any,
    token_rows: Any,
    all_parts: int,
    block_tables: Any,
    query: int,
    query_bytes: int,
    keys: int,
    values: int,
    block_bytes: int,
    block_size: int,
    num_kv_heads: int,
    dim: int,
    group: int,
    scale: Any,
    window: int,
    tiles: int,
    out: int,
    space: int,
    k_place: Any,
    v_place: Any,
    like: Any,
) -> None:
    element = element_size(like)
    columns = -(-dim // SPAN) * SPAN
    sum_bytes, factor_bytes, head_bytes = 4 * columns, dim * factor_size(like), block_size * dim * element
    heads = num_kv_heads * group
    table = block_tables[item[ITEM_SEQUENCE]]
    entry: int = item[ITEM_FIRST]
    rows: int = item[ITEM_TOKENS] * group
    whole_blocks = block_size % LANES == 0
    streamed = rows <= STREAMED_ROWS and whole_blocks and dim % SPAN == 0 and tiles == 0
    at_once = max(1, _STREAMED_AT_ONCE // rows) if streamed else 1
    first_position, last_position = (
        token_rows[tokens[entry], ROW_POSITION],
        token_rows[tokens[entry + item[ITEM_TOKENS] - 1], ROW_POSITION],
    )

    # The space: queries and whole sums of all rows, then scores and sums of the rows at once, then packed copies.
    kept = max(_STREAMED_AT_ONCE, rows + _SPARE_ROWS)
    queries = space
    whole_parts = queries + kept * dim * 4
    whole_sums = whole_parts + kept * VECTOR_BYTES
    parts = whole_sums + kept * sum_bytes
    sums = parts + _STREAMED_AT_ONCE * VECTOR_BYTES
    scores = sums + _STREAMED_AT_ONCE * sum_bytes
    packed_values = scores + _STREAMED_AT_ONCE * SCORE_BYTES
    packed_keys = packed_values + SEGMENT * sum_bytes
    if tiles:
        begin_tiles(rows)

    for head in range(item[ITEM_HEAD], item[ITEM_HEAD] + item[ITEM_HEADS], at_once):
        together = min(at_once, item[ITEM_HEAD] + item[ITEM_HEADS] - head)
        for index in range(together * rows):
            token, place = tokens[entry + index % rows // group], (head + index // rows) * group + index % group
            load_factors(query + token * query_bytes + place * dim * element, dim, queries + index * factor_bytes, like)
        stats = vector(whole_parts, 2 * together * rows, _ZERO)
        stats[0::2] = _NEGATIVE_INFINITY
        stats[1::2] = _ZERO
        vector(whole_sums, together * rows * columns, _ZERO)[:] = _ZERO

        for segment in range(item[ITEM_SEGMENT], item[ITEM_END]):
            low, high = seen_by_any(first_position, last_position, segment, window)
            # The first part of a row goes where the joined ones would: joining it to nothing changes no bit.
            direct = segment == item[ITEM_SEGMENT] and item[ITEM_IS_PART] == 0
            part_at, sum_at = (whole_parts, whole_sums) if direct else (parts, sums)
            first, last = low // LANES, -(-high // LANES)
            if whole_blocks:
                for index in range(first, last):
                    token = segment * SEGMENT + index * LANES
                    block = table[token // block_size] * block_bytes
                    k_place[index] = keys + block + token % block_size * 4
                    v_place[index] = values + block + token % block_size * dim * element

            if streamed:
                streamed_segment(
                    item,
                    head,
                    together,
                    group,
                    heads,
                    segment,
                    low,
                    high,
                    window,
                    tokens,
                    token_rows,
                    queries,
                    k_place,
                    v_place,
                    block_size,
                    dim,
                    scores,
                    scale,
                    direct,
                    part_at,
                    sum_at,
                    all_parts,
                    whole_parts,
                    whole_sums,
                    like,
                )
                continue

            packed_segment(
                item,
                head,
                group,
                heads,
                segment,
                low,
                high,
                window,
                tokens,
                token_rows,
                queries,
                table,
                k_place,
                keys + head * head_bytes,
                values + head * head_bytes,
                block_bytes,
                block_size,
                dim,
                packed_values,
                packed_keys,
                scores,
                scale,
                tiles,
                direct,
                part_at,
                sum_at,
                all_parts,
                whole_parts,
                whole_sums,
                like,
            )

        if item[ITEM_IS_PART] == 0:
            for index in range(together * rows):
                token, place = tokens[entry + index % rows // group], (head + index // rows) * group + index % group
                target = out + (token * heads + place) * dim * element
                finish_row(whole_parts + 8 * index, whole_sums + index * sum_bytes, dim, target, like)

    if item[ITEM_IS_PART] > 0:
        for index in range(entry, entry + item[ITEM_TOKENS]):
            token = tokens[index]
            if count_down(token_rows, token * token_rows.shape[1] + ROW_PENDING) == 0:
                token_rows[token, ROW_PENDING] = token_rows[token, ROW_PIECES]  # for the next layer
                join_parts(token, token_rows[token], all_parts, heads, dim, columns, whole_parts, whole_sums, out, like)


@exact_helper
def _attend_items(
    part: int,
    parts: int,
    counter: Any,
    items: Any,
    tokens: Any,
    token_rows: Any,
    all_parts: int,
    block_tables: Any,
    query: int,
    query_bytes: int,
    keys: int,
    values: int,
    block_bytes: int,
    block_size: int,
    num_kv_heads: int,
    dim: int,
    group: int,
    scale: Any,
    window: int,
    tiles: int,
    out: int,
    like: Any,
) -> None:
    columns = -(-dim // SPAN) * SPAN
    rows = max(SHARED_ROWS, group) + _SPARE_ROWS
    size = rows * (dim + LANES + columns) + _STREAMED_AT_ONCE * (LANES + columns + SCORE_BYTES // 4)
    size += SEGMENT * (columns + dim) + 2 * LANES
    space = np.empty(size, np.float32)
    start = (space.ctypes.data + 63) // 64 * 64
    k_place, v_place = np.empty(SEGMENT // LANES, np.int64), np.empty(SEGMENT // LANES, np.int64)
    before = count_as_zero()
    while True:
        index = next_item(counter)
        if index >= items.shape[0]:
            break
        _attend(
            items[index],
            tokens,
            token_rows,
            all_parts,
            block_tables,
            query,
            query_bytes,
            keys,
            values,
            block_bytes,
            block_size,
            num_kv_heads,
            dim,
            group,
            scale * _LOG2_E,
            window,
            tiles,
            out,
            start,
            k_place,
            v_place,
            like,
        )
    if tiles:
        end_tiles()
    count_as_before(before)
    space[0] = _ZERO  # a use after the last: addresses are none that numba sees


@kernel
def attention(
    board: int,
    items: Any,
    tokens: Any,
    token_rows: Any,
    all_parts: Any,
    block_tables: Any,
    query: int,
    query_bytes: int,
    keys: int,
    values: int,
    block_bytes: int,
    block_size: int,
    num_kv_heads: int,
    dim: int,
    group: int,
    scale: Any,
    window: int,
    tiles: int,
    out: int,
    like: Any,
) -> None:
    """Attention of a plan's items. query, out and block 0's keys and values by address, elements like `like`.

    Query rows [num_kv_heads * group * dim] are query_bytes apart, blocks block_bytes; the order within a block is that
    of `layout`, "k_major". all_parts: float32, `part_floats` for each of the plan's parts. tiles: see
    `attention_amx.use_tiles`.
    """
    counter = np.zeros(1, np.int64)
    run(
        board,
        1,
        _attend_items,
        (
            counter,
            items,
            tokens,
            token_rows,
            all_parts.ctypes.data,
            block_tables,
            query,
            query_bytes,
            keys,
            values,
            block_bytes,
            block_size,
            num_kv_heads,
            dim,
            group,
            scale,
            window,
            tiles,
            out,
            like,
        ),
    )


def part_floats(num_heads: int, dim: int) -> int:
    """float32 of one part of a plan: one token's and segment's results for all query heads."""
    return num_heads * (PART_HEADER // 4 + -(-dim // SPAN) * SPAN)
