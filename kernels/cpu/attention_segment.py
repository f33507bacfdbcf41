"""What attention does with one segment of 256 tokens: scores, weights, weighted values, joining.

Rows are query tokens times the heads of a group. Everything is given by address; `attention` decides what is done with
which rows, and in which of two ways.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill.kernels.cpu.attention_rows import finish_row, join_row, largest_score, weigh_row
from pagemill.kernels.cpu.attention_tiles import (
    SCORE_VECTORS,
    SPAN,
    element_size,
    make_score_tile,
    make_value_tile,
    stand_alone,
)
from pagemill.kernels.cpu.isa import LANES, WIDE_REGISTERS
from pagemill.kernels.cpu.jit import exact_helper
from pagemill.kernels.cpu.plan import (
    ITEM_FIRST,
    ITEM_IS_PART,
    ROW_POSITION,
    ROW_SEGMENT,
    ROW_SEGMENTS,
    ROW_SLOT,
)
from pagemill.kernels.cpu.plan_sharing import SEGMENT
from pagemill.kernels.cpu.views import vector

VECTOR_BYTES = 4 * LANES
PART_HEADER = VECTOR_BYTES
"""Bytes of a part before its sums: a row's maximum and sum of weights."""
SCORE_BYTES = 4 * SEGMENT + 4 * VECTOR_BYTES
"""A row of scores: a tile may write past the segment."""
_NEGATIVE_INFINITY = np.float32(-np.inf)
_ZERO = np.float32(0.0)

_MOST_STREAMED = 4 if WIDE_REGISTERS else 2
_score1, _score2, _score3, _score4 = (make_score_tile(rows, SCORE_VECTORS) for rows in (1, 2, 3, 4))
_value1, _value2, _value3, _value4 = (make_value_tile(rows, 1) for rows in (1, 2, 3, 4))
_value1_wide, _value2_wide, _value3_wide, _value4_wide = (make_value_tile(rows, 2) for rows in (1, 2, 3, 4))


@exact_helper
def score_rows(
    rows: int,
    queries: int,
    query_bytes: int,
    key0: int,
    key1: int,
    key2: int,
    key3: int,
    key_step: int,
    words: int,
    scores: int,
    scale: Any,
    like: Any,
) -> None:
    """Scores of some rows against 64 tokens, 16 of them at each address of keys."""
    row = 0
    while row < rows:
        left = min(rows - row, _MOST_STREAMED)
        query, target = queries + row * query_bytes, scores + row * SCORE_BYTES
        if left == 4:
            _score4(query, query_bytes, key0, key1, key2, key3, key_step, words, target, SCORE_BYTES, scale, like)
        elif left == 3:
            _score3(query, query_bytes, key0, key1, key2, key3, key_step, words, target, SCORE_BYTES, scale, like)
        elif left == 2:
            _score2(query, query_bytes, key0, key1, key2, key3, key_step, words, target, SCORE_BYTES, scale, like)
        else:
            _score1(query, query_bytes, key0, key1, key2, key3, key_step, words, target, SCORE_BYTES, scale, like)
        row += left


@exact_helper
def value_rows(
    rows: int,
    weights: int,
    values: int,
    token_bytes: int,
    begin: int,
    end: int,
    sums: int,
    sum_bytes: int,
    columns: int,
    like: Any,
) -> None:
    """Add the weighted values of the tokens begin <= t < end to the sums of some rows."""
    row = 0
    while row < rows:
        left = min(rows - row, _MOST_STREAMED)
        weight, target, place = weights + row * SCORE_BYTES, sums + row * sum_bytes, values
        column = 0
        if WIDE_REGISTERS:
            while column + 2 * SPAN <= columns:
                if left == 4:
                    _value4_wide(weight, SCORE_BYTES, place, token_bytes, begin, end, target, sum_bytes, like)
                elif left == 3:
                    _value3_wide(weight, SCORE_BYTES, place, token_bytes, begin, end, target, sum_bytes, like)
                elif left == 2:
                    _value2_wide(weight, SCORE_BYTES, place, token_bytes, begin, end, target, sum_bytes, like)
                else:
                    _value1_wide(weight, SCORE_BYTES, place, token_bytes, begin, end, target, sum_bytes, like)
                column += 2 * SPAN
                target += 8 * SPAN
                place += 2 * SPAN * element_size(like)
        while column < columns:
            if left == 4:
                _value4(weight, SCORE_BYTES, place, token_bytes, begin, end, target, sum_bytes, like)
            elif left == 3:
                _value3(weight, SCORE_BYTES, place, token_bytes, begin, end, target, sum_bytes, like)
            elif left == 2:
                _value2(weight, SCORE_BYTES, place, token_bytes, begin, end, target, sum_bytes, like)
            else:
                _value1(weight, SCORE_BYTES, place, token_bytes, begin, end, target, sum_bytes, like)
            column += SPAN
            target += 4 * SPAN
            place += SPAN * element_size(like)
        row += left


@exact_helper
def seen(position: int, segment: int, window: int) -> Any:
    """Tokens of a segment that a row sees: begin <= token < end, both 0 where it sees none."""
    start = segment * SEGMENT
    end = min(position + 1 - start, SEGMENT)
    begin = max(0, position + 1 - window - start) if window > 0 else 0
    if begin >= end:
        return 0, 0
    return begin, end


@exact_helper
def seen_by_any(first: int, last: int, segment: int, window: int) -> Any:
    """The same for rows of which the first to the last position are given."""
    begin, end = seen(last, segment, window)
    if window > 0:
        begin = min(seen(first, segment, window)[0], begin)
    return begin, end


@exact_helper
def weigh_rows(
    first_row: int,
    rows: int,
    group: int,
    first_entry: int,
    segment: int,
    window: int,
    tokens: Any,
    token_rows: Any,
    scores: int,
    parts: int,
    upto: int,
    scale: Any,
    like: Any,
) -> None:
    """Weights of the rows of one head from their scores, which are to be multiplied by `scale` > 0."""
    stand_alone()
    # The maxima of all rows first: one alone is a chain of instructions that wait for each other.
    for row in range(rows):
        begin, end = seen(token_rows[tokens[first_entry + (first_row + row) // group], ROW_POSITION], segment, window)
        largest_score(scores + row * SCORE_BYTES, begin, end, scale, parts + 8 * row)
    for row in range(rows):
        begin, end = seen(token_rows[tokens[first_entry + (first_row + row) // group], ROW_POSITION], segment, window)
        weigh_row(scores + row * SCORE_BYTES, begin, end, upto, scale, parts + 8 * row, like)


@exact_helper
def keep_rows(
    first_row: int,
    rows: int,
    group: int,
    head: int,
    heads: int,
    item: Any,
    segment: int,
    window: int,
    tokens: Any,
    token_rows: Any,
    parts: int,
    sums: int,
    columns: int,
    all_parts: int,
    whole_parts: int,
    whole_sums: int,
) -> None:
    """Put a segment's results of one head's rows where they are wanted: into a list of parts, or joined to a whole."""
    stand_alone()
    for row in range(rows):
        token = tokens[item[ITEM_FIRST] + (first_row + row) // group]
        begin, end = seen(token_rows[token, ROW_POSITION], segment, window)
        if begin == end:
            continue
        if item[ITEM_IS_PART] > 0:
            index = token_rows[token, ROW_SLOT] + segment - token_rows[token, ROW_SEGMENT]
            index = index * heads + head * group + (first_row + row) % group
            target = all_parts + index * (PART_HEADER + 4 * columns)
            vector(target, 2, _ZERO)[:] = vector(parts + 8 * row, 2, _ZERO)
            vector(target + PART_HEADER, columns, _ZERO)[:] = vector(sums + 4 * columns * row, columns, _ZERO)
        else:
            join_row(
                whole_parts + 8 * row,
                whole_sums + 4 * columns * row,
                parts + 8 * row,
                sums + 4 * columns * row,
                columns,
            )


@exact_helper
def join_parts(
    token: int,
    token_row: Any,
    all_parts: int,
    heads: int,
    dim: int,
    columns: int,
    part: int,
    sums: int,
    out: int,
    like: Any,
) -> None:
    """Join the parts of one token's segments, in their order, and write its result."""
    stand_alone()
    size = PART_HEADER + 4 * columns
    stats, whole = vector(part, 2, _ZERO), vector(sums, columns, _ZERO)
    for head in range(heads):
        stats[0], stats[1] = _NEGATIVE_INFINITY, _ZERO
        whole[:] = _ZERO
        for index in range(token_row[ROW_SLOT], token_row[ROW_SLOT] + token_row[ROW_SEGMENTS]):
            place = all_parts + (index * heads + head) * size
            join_row(part, sums, place, place + PART_HEADER, columns)
        finish_row(part, sums, dim, out + (token * heads + head) * dim * element_size(like), like)
