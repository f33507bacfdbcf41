"""Many rows past one head's keys and a woven copy of its values, in vectors: scores, and sums of weighted values.

`attention_amx` does the same in tiles.
"""

from __future__ import annotations

from typing import Any

from pagemill.kernels.cpu.attention_segment import SCORE_BYTES, VECTOR_BYTES
from pagemill.kernels.cpu.attention_tiles import (
    PACKED_ROWS,
    SCORE_VECTORS,
    SPAN,
    element_size,
    factor_size,
    make_packed_tile,
    make_score_tile,
)
from pagemill.kernels.cpu.jit import exact_helper

_PAIRS_AT_ONCE = 32
"""Steps of packed values that stay in the first cache while the rows go past."""

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
