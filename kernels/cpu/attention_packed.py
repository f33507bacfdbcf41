"""Rows past one head's keys and a woven copy of its values, a segment at a time.

The products, which are scores and sums of weighted values, are made in vectors here, in tiles by `attention_amx`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill.kernels.cpu.attention_amx import AT_ONCE, TILE_TOKENS, clear_beside, tile_scores, tile_values
from pagemill.kernels.cpu.attention_segment import (
    SCORE_BYTES,
    VECTOR_BYTES,
    keep_rows,
    seen_by_any,
    weigh_rows,
)
from pagemill.kernels.cpu.attention_tiles import (
    PACKED_ROWS,
    SCORE_VECTORS,
    SPAN,
    element_size,
    factor_size,
    make_packed_tile,
    make_score_tile,
    stand_alone,
    weave_rows,
)
from pagemill.kernels.cpu.isa import LANES
from pagemill.kernels.cpu.jit import exact_helper
from pagemill.kernels.cpu.plan import ITEM_FIRST, ITEM_TOKENS, ROW_POSITION
from pagemill.kernels.cpu.plan_sharing import SEGMENT
from pagemill.kernels.cpu.views import vector

_ROWS_AT_ONCE = 24
"""Rows whose scores are made and used together: their scores, their queries and a tile's keys fit the first cache."""
_PAIRS_AT_ONCE = 32
"""Steps of packed values that stay in the first cache while the rows go past."""
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)

_score6, _score6_narrow = make_score_tile(PACKED_ROWS, SCORE_VECTORS), make_score_tile(PACKED_ROWS, 1)
_packed6, _packed6_wide = make_packed_tile(PACKED_ROWS, 2), make_packed_tile(PACKED_ROWS, 4)


@exact_helper
def packed_scores(
    rows: int,
    queries: int,
    k_place: Any,
    first: int,
    last: int,
    key_step: int,
    words: int,
    scores: int,
    scale: Any,
    dim: int,
    like: Any,
) -> None:
    """Scores of rows against the keys at k_place[first:last], 16 tokens each, whose dimensions are key_step bytes
    apart; those behind the last are no scores."""
    query_bytes = dim * factor_size(like)
    index = first
    while index < last:
        wide = last - index >= SCORE_VECTORS
        other1, other2, other3 = min(index + 1, last - 1), min(index + 2, last - 1), min(index + 3, last - 1)
        for row in range(0, rows, PACKED_ROWS):
            place, target = queries + row * query_bytes, scores + row * SCORE_BYTES + index * VECTOR_BYTES
            key = k_place[index]
            if wide:
                _score6(
                    place,
                    query_bytes,
                    key,
                    k_place[other1],
                    k_place[other2],
                    k_place[other3],
                    key_step,
                    words,
                    target,
                    SCORE_BYTES,
                    scale,
                    like,
                )
            else:
                _score6_narrow(
                    place, query_bytes, key, key, key, key, key_step, words, target, SCORE_BYTES, scale, like
                )
        index += SCORE_VECTORS if wide else 1


@exact_helper
def add_packed_values(
    rows: int, weights: int, packed: int, low: int, high: int, sums: int, columns: int, like: Any
) -> None:
    """Add the weighted values of the tokens low <= t < high, woven, to the sums of rows."""
    per_step, sum_bytes = 4 // element_size(like), 4 * columns
    step, steps = low // per_step, -(-high // per_step)
    while step < steps:
        many = min(_PAIRS_AT_ONCE, steps - step)
        for row in range(0, rows, PACKED_ROWS):
            weight = weights + row * SCORE_BYTES + step * per_step * factor_size(like)
            source, target = packed + step * sum_bytes, sums + row * sum_bytes
            column = 0
            while column < columns:
                if SCORE_VECTORS >= 4 and column + 2 * SPAN <= columns:
                    _packed6_wide(weight, SCORE_BYTES, source, sum_bytes, many, target, sum_bytes, like)
                    column += 2 * SPAN
                    source += 8 * SPAN
                    target += 8 * SPAN
                else:
                    _packed6(weight, SCORE_BYTES, source, sum_bytes, many, target, sum_bytes, like)
                    column += SPAN
                    source += 4 * SPAN
                    target += 4 * SPAN
        step += many


@exact_helper
def pack_values(
    low: int,
    high: int,
    segment: int,
    table: Any,
    block_size: int,
    values: int,
    block_bytes: int,
    dim: int,
    per_step: int,
    packed: int,
    step_bytes: int,
    like: Any,
) -> None:
    """Weave the values of one head's tokens low <= token < high of a segment; half a pair is woven with itself."""
    stand_alone()
    row_bytes = dim * element_size(like)
    token = low
    block, offset = divmod(segment * SEGMENT + low, block_size)
    while token < high:
        place = values + table[block] * block_bytes + offset * row_bytes
        partner = place
        advance = 1
        if per_step == 2 and token % 2 == 0 and token + 1 < high:
            advance = 2
            if offset + 1 < block_size:
                partner = place + row_bytes
            else:
                partner = values + (table[block + 1]) * block_bytes
        weave_rows(place, partner, dim, packed + token // per_step * step_bytes, like)
        token += advance
        offset += advance
        while offset >= block_size:
            offset -= block_size
            block += 1


@exact_helper
def pack_keys(
    low: int, high: int, segment: int, table: Any, block_size: int, keys: int, block_bytes: int, words: int, packed: int
) -> None:
    """Copy the keys of one head's tokens of a segment to [words][SEGMENT], for blocks without whole vectors."""
    stand_alone()
    token = low
    block, offset = divmod(segment * SEGMENT + low, block_size)
    while token < high:
        count = min(block_size - offset, high - token)
        place = keys + table[block] * block_bytes + 4 * offset
        for word in range(words):
            target = vector(packed + 4 * (word * SEGMENT + token), count, _ZERO)
            source = vector(place + 4 * word * block_size, count, _ZERO)
            for index in range(count):
                target[index] = source[index]
        token += count
        offset = 0
        block += 1


@exact_helper
def packed_segment(
    item: Any,
    head: int,
    group: int,
    heads: int,
    segment: int,
    low: int,
    high: int,
    window: int,
    tokens: Any,
    token_rows: Any,
    queries: int,
    table: Any,
    k_place: Any,
    keys: int,
    values: int,
    block_bytes: int,
    block_size: int,
    dim: int,
    packed_values: int,
    packed_keys: int,
    scores: int,
    scale: Any,
    tiles: int,
    direct: bool,
    part_at: int,
    sum_at: int,
    all_parts: int,
    whole_parts: int,
    whole_sums: int,
    like: Any,
) -> None:
    """An item's rows of kv head `head`, of the tokens low <= token < high of a segment.

    keys, values: addresses of the head's in block 0. k_place: addresses of 16 tokens' keys each, of head 0, which this
    head's take the place of; not given where blocks have no whole vectors. tiles: whether products are made in tiles.
    direct: the results are whole parts, not to be joined.
    """
    entry: int = item[ITEM_FIRST]
    rows: int = item[ITEM_TOKENS] * group
    element = element_size(like)
    per_step = 4 // element  # tokens of a step of values
    words = dim // per_step
    columns = -(-dim // SPAN) * SPAN
    sum_bytes, factor_bytes = 4 * columns, dim * factor_size(like)
    pack_values(
        low,
        high,
        segment,
        table,
        block_size,
        values,
        block_bytes,
        dim,
        per_step,
        packed_values,
        sum_bytes,
        like,
    )
    first, last = low // LANES, -(-high // LANES)
    key_step = 4 * block_size
    if block_size % LANES == 0:
        for index in range(first, last):
            k_place[index] += head * block_size * dim * element
    else:
        pack_keys(low, high, segment, table, block_size, keys, block_bytes, words, packed_keys)
        for index in range(first, last):
            k_place[index] = packed_keys + index * VECTOR_BYTES
        key_step = 4 * SEGMENT
    rows_at_once = AT_ONCE if tiles else _ROWS_AT_ONCE
    if tiles:
        clear_beside(packed_values, sum_bytes, low, high)
    for row in range(0, rows, rows_at_once):
        count = min(rows_at_once, rows - row)
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
        query_rows = queries + row * factor_bytes
        if tiles:
            tile_scores(count, query_rows, factor_bytes, k_place, first, last, key_step, words, scores, SCORE_BYTES)
        else:
            packed_scores(count, query_rows, k_place, first, last, key_step, words, scores, scale, dim, like)
        weigh_rows(
            row,
            count,
            group,
            entry,
            segment,
            window,
            tokens,
            token_rows,
            scores,
            row_parts,
            -(-high // TILE_TOKENS) * TILE_TOKENS if tiles else last * LANES,
            scale if tiles else _ONE,
            like,
        )
        if tiles:
            tile_values(count, scores, SCORE_BYTES, packed_values, low, high, row_sums, sum_bytes)
        else:
            add_packed_values(count, scores, packed_values, low, high, row_sums, columns, like)
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
