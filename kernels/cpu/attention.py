"""Paged attention on the CPU: the blocks are read where they lie, a segment of 256 tokens at a time.

One work item (see `plan`) is some query tokens, key/value heads and segments. All query heads that share a key/value
head are rows of the same tile, so that every key and value is read once for the whole group; so are the tokens of
several sequences that share a segment. Two ways through a segment, with the same sums:

* *streamed*, few rows, as in a decode: the memory is the limit. All heads of a block are read before the next block's,
  first keys, then values, straight from the pool.
* *packed*, many rows, as in a prefill: the arithmetic is the limit. The segment's values of one head are woven once
  into a copy that stays in the cache, and groups of rows go past keys and values with as many sums as the registers
  hold. Sizes that do not fit vectors (blocks not a multiple of 16 tokens, heads not of 32 dimensions) come here too.

Within a segment a row has one maximum: scores, then weights, then weighted values, with no rescaling in between. The
segments of a row join by their maxima and sums.

Left out, since it gained nothing on a quiet machine: asking the caches ahead for the values of a streamed segment and
its next keys; four blocks are read at once anyway. Consecutive blocks would not be one stream either: the pool has the
block outermost, so in one layer they lie all other layers apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill.kernels.cpu.attention_rows import count_down, finish_row
from pagemill.kernels.cpu.attention_segment import (
    PART_HEADER,
    SCORE_BYTES,
    VECTOR_BYTES,
    join_parts,
    keep_rows,
    pack_keys,
    pack_values,
    score_rows,
    seen_by_any,
    value_rows,
    weigh_rows,
)
from pagemill.kernels.cpu.attention_tiles import (
    PACKED_ROWS,
    SCORE_VECTORS,
    SPAN,
    element_size,
    factor_size,
    load_factors,
    make_packed_tile,
    make_score_tile,
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
    SEGMENT,
    SHARED_ROWS,
    STREAMED_ROWS,
)
from pagemill.kernels.cpu.simd import next_item
from pagemill.kernels.cpu.team import run
from pagemill.kernels.cpu.views import vector

_ROWS_AT_ONCE = 24
"""Rows whose scores are made and used together: their scores, their queries and a tile's keys fit the first cache."""
_PAIRS_AT_ONCE = 32
"""Steps of packed values that stay in the first cache while the rows go past."""
_STREAMED_AT_ONCE = 36
_NEGATIVE_INFINITY = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_LOG2_E = np.float32(1.4426950408889634)

_score6, _score6_narrow = make_score_tile(PACKED_ROWS, SCORE_VECTORS), make_score_tile(PACKED_ROWS, 1)
_packed6, _packed6_wide = make_packed_tile(PACKED_ROWS, 2), make_packed_tile(PACKED_ROWS, 4)


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
    out: int,
    space: int,
    k_place: Any,
    v_place: Any,
    like: Any,
) -> None:
    element = element_size(like)
    per_step = 4 // element  # tokens of a step of values
    words = dim // per_step
    columns = -(-dim // SPAN) * SPAN
    sum_bytes, factor_bytes, head_bytes = 4 * columns, dim * factor_size(like), block_size * dim * element
    heads = num_kv_heads * group
    table = block_tables[item[ITEM_SEQUENCE]]
    entry: int = item[ITEM_FIRST]
    rows: int = item[ITEM_TOKENS] * group
    whole_blocks = block_size % LANES == 0
    streamed = rows <= STREAMED_ROWS and whole_blocks and dim % SPAN == 0
    at_once = max(1, _STREAMED_AT_ONCE // rows) if streamed else 1
    first_position, last_position = (
        token_rows[tokens[entry], ROW_POSITION],
        token_rows[tokens[entry + item[ITEM_TOKENS] - 1], ROW_POSITION],
    )

    # The space: queries and whole sums of all rows, then scores and sums of the rows at once, then packed copies.
    kept = max(_STREAMED_AT_ONCE, rows + PACKED_ROWS)
    queries = space
    whole_parts = queries + kept * dim * 4
    whole_sums = whole_parts + kept * VECTOR_BYTES
    parts = whole_sums + kept * sum_bytes
    sums = parts + _STREAMED_AT_ONCE * VECTOR_BYTES
    scores = sums + _STREAMED_AT_ONCE * sum_bytes
    packed_values = scores + _STREAMED_AT_ONCE * SCORE_BYTES
    packed_keys = packed_values + SEGMENT * sum_bytes

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
                if not direct:
                    vector(sum_at, together * rows * columns, _ZERO)[:] = _ZERO
                for index in range(first, last, SCORE_VECTORS):
                    other1, other2 = min(index + 1, last - 1), min(index + 2, last - 1)
                    other3 = min(index + 3, last - 1)
                    for h in range(together):
                        offset = (head + h) * head_bytes
                        score_rows(
                            rows,
                            queries + h * rows * factor_bytes,
                            factor_bytes,
                            k_place[index] + offset,
                            k_place[other1] + offset,
                            k_place[other2] + offset,
                            k_place[other3] + offset,
                            4 * block_size,
                            words,
                            scores + h * rows * SCORE_BYTES + index * VECTOR_BYTES,
                            scale,
                            like,
                        )
                for h in range(together):
                    start = h * rows
                    weigh_rows(
                        0,
                        rows,
                        group,
                        entry,
                        segment,
                        window,
                        tokens,
                        token_rows,
                        scores + start * SCORE_BYTES,
                        part_at + 8 * start,
                        last * LANES,
                        like,
                    )
                for index in range(first, last):
                    begin, end = max(0, low - index * LANES), min(LANES, high - index * LANES)
                    for h in range(together):
                        value_rows(
                            rows,
                            scores + h * rows * SCORE_BYTES + index * LANES * factor_size(like),
                            v_place[index] + (head + h) * head_bytes,
                            dim * element,
                            begin,
                            end,
                            sum_at + h * rows * sum_bytes,
                            sum_bytes,
                            columns,
                            like,
                        )
                if not direct:
                    for h in range(together):
                        start = h * rows
                        keep_rows(
                            0,
                            rows,
                            group,
                            head + h,
                            heads,
                            item,
                            segment,
                            window,
                            tokens,
                            token_rows,
                            part_at + 8 * start,
                            sum_at + start * sum_bytes,
                            columns,
                            all_parts,
                            whole_parts + 8 * start,
                            whole_sums + start * sum_bytes,
                        )
                continue

            pack_values(
                low,
                high,
                segment,
                table,
                block_size,
                values + head * head_bytes,
                block_bytes,
                dim,
                per_step,
                packed_values,
                sum_bytes,
                like,
            )
            if whole_blocks:
                for index in range(first, last):
                    k_place[index] += head * head_bytes
                key_step = 4 * block_size
            else:
                pack_keys(
                    low, high, segment, table, block_size, keys + head * head_bytes, block_bytes, words, packed_keys
                )
                for index in range(first, last):
                    k_place[index] = packed_keys + index * VECTOR_BYTES
                key_step = 4 * SEGMENT
            for row in range(0, rows, _ROWS_AT_ONCE):
                count = min(_ROWS_AT_ONCE, rows - row)
                low, high = seen_by_any(
                    token_rows[tokens[entry + row // group], ROW_POSITION],
                    token_rows[tokens[entry + (row + count - 1) // group], ROW_POSITION],
                    segment,
                    window,
                )
                if low == high:
                    continue
                row_parts, row_sums = (part_at + 8 * row, sum_at + row * sum_bytes) if direct else (part_at, sum_at)
                if not direct:
                    vector(row_sums, count * columns, _ZERO)[:] = _ZERO
                first, last = low // LANES, -(-high // LANES)
                index = first
                while index < last:
                    wide = last - index >= SCORE_VECTORS
                    for r in range(0, count, PACKED_ROWS):
                        place, target = (
                            queries + (row + r) * factor_bytes,
                            scores + r * SCORE_BYTES + index * VECTOR_BYTES,
                        )
                        if wide:
                            _score6(
                                place,
                                factor_bytes,
                                k_place[index],
                                k_place[min(index + 1, last - 1)],
                                k_place[min(index + 2, last - 1)],
                                k_place[min(index + 3, last - 1)],
                                key_step,
                                words,
                                target,
                                SCORE_BYTES,
                                scale,
                                like,
                            )
                        else:
                            key = k_place[index]
                            _score6_narrow(
                                place,
                                factor_bytes,
                                key,
                                key,
                                key,
                                key,
                                key_step,
                                words,
                                target,
                                SCORE_BYTES,
                                scale,
                                like,
                            )
                    index += SCORE_VECTORS if wide else 1
                weigh_rows(
                    row, count, group, entry, segment, window, tokens, token_rows, scores, row_parts, last * LANES, like
                )
                step, steps = low // per_step, -(-high // per_step)
                while step < steps:
                    many = min(_PAIRS_AT_ONCE, steps - step)
                    for r in range(0, count, PACKED_ROWS):
                        weights = scores + r * SCORE_BYTES + step * per_step * factor_size(like)
                        source, target = packed_values + step * sum_bytes, row_sums + r * sum_bytes
                        column = 0
                        while column < columns:
                            if SCORE_VECTORS >= 4 and column + 2 * SPAN <= columns:
                                _packed6_wide(weights, SCORE_BYTES, source, sum_bytes, many, target, sum_bytes, like)
                                column += 2 * SPAN
                                source += 8 * SPAN
                                target += 8 * SPAN
                            else:
                                _packed6(weights, SCORE_BYTES, source, sum_bytes, many, target, sum_bytes, like)
                                column += SPAN
                                source += 4 * SPAN
                                target += 4 * SPAN
                    step += many
                if not direct:
                    keep_rows(
                        row,
                        count,
                        group,
                        head,
                        heads,
                        item,
                        segment,
                        window,
                        tokens,
                        token_rows,
                        row_parts,
                        row_sums,
                        columns,
                        all_parts,
                        whole_parts + 8 * row,
                        whole_sums + row * sum_bytes,
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
    out: int,
    like: Any,
) -> None:
    columns = -(-dim // SPAN) * SPAN
    rows = max(SHARED_ROWS, group) + PACKED_ROWS
    size = rows * (dim + LANES + columns) + _STREAMED_AT_ONCE * (LANES + columns + SCORE_BYTES // 4)
    size += SEGMENT * (columns + dim) + 2 * LANES
    space = np.empty(size, np.float32)
    start = (space.ctypes.data + 63) // 64 * 64
    k_place, v_place = np.empty(SEGMENT // LANES, np.int64), np.empty(SEGMENT // LANES, np.int64)
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
            out,
            start,
            k_place,
            v_place,
            like,
        )
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
    out: int,
    like: Any,
) -> None:
    """Attention of a plan's items. query, out and block 0's keys and values by address, elements like `like`.

    Query rows [num_kv_heads * group * dim] are query_bytes apart, blocks block_bytes; the order within a block is that
    of `layout`, "k_major". all_parts: float32, `part_floats` for each of the plan's parts.
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
            out,
            like,
        ),
    )


def part_floats(num_heads: int, dim: int) -> int:
    """float32 of one part of a plan: one token's and segment's results for all query heads."""
    return num_heads * (PART_HEADER // 4 + -(-dim // SPAN) * SPAN)
