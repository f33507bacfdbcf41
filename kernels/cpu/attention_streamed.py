"""Few rows past a segment's blocks where they lie, in vectors: all heads of a block are read before the next block's,
first keys, then values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill.kernels.cpu.attention_segment import (
    SCORE_BYTES,
    VECTOR_BYTES,
    keep_rows,
    score_rows,
    value_rows,
    weigh_rows,
)
from pagemill.kernels.cpu.attention_tiles import SCORE_VECTORS, element_size, factor_size
from pagemill.kernels.cpu.isa import LANES
from pagemill.kernels.cpu.jit import exact_helper
from pagemill.kernels.cpu.plan import ITEM_FIRST, ITEM_TOKENS
from pagemill.kernels.cpu.views import vector

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@exact_helper
def streamed_segment(
    item: Any,
    head: int,
    together: int,
    group: int,
    heads: int,
    segment: int,
    low: int,
    high: int,
    window: int,
    tokens: Any,
    token_rows: Any,
    queries: int,
    k_place: Any,
    v_place: Any,
    block_size: int,
    dim: int,
    scores: int,
    scale: Any,
    direct: bool,
    part_at: int,
    sum_at: int,
    all_parts: int,
    whole_parts: int,
    whole_sums: int,
    like: Any,
) -> None:
    """An item's rows of `together` kv heads from `head` on, of the tokens low <= token < high of a segment.

    k_place, v_place: addresses of 16 tokens each, of head 0. direct: the results are whole parts, not to be joined.
    """
    entry: int = item[ITEM_FIRST]
    rows: int = item[ITEM_TOKENS] * group
    columns = dim
    sum_bytes, factor_bytes = 4 * columns, dim * factor_size(like)
    head_bytes, words = block_size * dim * element_size(like), dim * element_size(like) // 4
    first, last = low // LANES, -(-high // LANES)
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
            _ONE,
            like,
        )
    for index in range(first, last):
        begin, end = max(0, low - index * LANES), min(LANES, high - index * LANES)
        for h in range(together):
            value_rows(
                rows,
                scores + h * rows * SCORE_BYTES + index * LANES * factor_size(like),
                v_place[index] + (head + h) * head_bytes,
                dim * element_size(like),
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
