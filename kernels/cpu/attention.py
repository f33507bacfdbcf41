"""Paged attention on the CPU: the blocks are read where they lie, one tile of tokens at a time.

One work item is a few query tokens of one sequence and some of its key/value heads. All query heads that share a
key/value head are rows of the same tile, so that every key and value is read once for the whole group. Tiles are
combined by their running maximum and sum (the online softmax of Milakov and Gimelshein, arXiv 1805.02867).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.simd import exp32, make_score_tile, make_value_tile, narrow, next_item, row_max, widen
from pagemill.kernels.cpu.team import run
from pagemill.kernels.cpu.views import vector

TILE_ROWS = 32
"""Rows (query tokens times the heads of a group) that an item holds at most, where a group has fewer."""

TILE_TOKENS = 64
"""Context tokens of one softmax step, where a block has fewer."""

_LANES = 16
_NEGATIVE_INFINITY = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)

_score1, _score2, _score3, _score4, _score8 = (make_score_tile(rows) for rows in (1, 2, 3, 4, 8))
_value1, _value2, _value3, _value4, _value8 = (make_value_tile(rows) for rows in (1, 2, 3, 4, 8))


@helper
def _scores(
    rows: int, a: Any, astr: int, b: Any, bo: int, bstr: int, depth: int, cols: int, c: Any, co: int, cstr: int
) -> None:
    row = 0
    while row < rows:
        left = rows - row
        if left >= 8:
            _score8(a, row * astr, astr, b, bo, bstr, depth, cols, c, co + row * cstr, cstr)
            row += 8
        elif left >= 4:
            _score4(a, row * astr, astr, b, bo, bstr, depth, cols, c, co + row * cstr, cstr)
            row += 4
        elif left == 3:
            _score3(a, row * astr, astr, b, bo, bstr, depth, cols, c, co + row * cstr, cstr)
            row += 3
        elif left == 2:
            _score2(a, row * astr, astr, b, bo, bstr, depth, cols, c, co + row * cstr, cstr)
            row += 2
        else:
            _score1(a, row * astr, astr, b, bo, bstr, depth, cols, c, co + row * cstr, cstr)
            row += 1


@helper
def _values(
    rows: int, a: Any, ao: int, astr: int, b: Any, bo: int, bstr: int, depth: int, cols: int, c: Any, co: int, cstr: int
) -> None:
    row = 0
    while row < rows:
        left = rows - row
        if left >= 8:
            _value8(a, ao + row * astr, astr, b, bo, bstr, depth, cols, c, co + row * cstr, cstr)
            row += 8
        elif left >= 4:
            _value4(a, ao + row * astr, astr, b, bo, bstr, depth, cols, c, co + row * cstr, cstr)
            row += 4
        elif left == 3:
            _value3(a, ao + row * astr, astr, b, bo, bstr, depth, cols, c, co + row * cstr, cstr)
            row += 3
        elif left == 2:
            _value2(a, ao + row * astr, astr, b, bo, bstr, depth, cols, c, co + row * cstr, cstr)
            row += 2
        else:
            _value1(a, ao + row * astr, astr, b, bo, bstr, depth, cols, c, co + row * cstr, cstr)
            row += 1


@helper
def _softmax_step(
    rows: int,
    group: int,
    first_position: int,
    tile_start: int,
    tokens: int,
    window: int,
    scores: Any,
    score_stride: int,
    acc: Any,
    acc_stride: int,
    largest: Any,
    total: Any,
) -> None:
    """Turn a tile's scores into weights relative to the new running maximum; what a row may not see gets weight 0."""
    for row in range(rows):
        position = first_position + row // group
        end = min(tokens, position + 1 - tile_start)
        begin = 0
        if window > 0:
            begin = max(0, position + 1 - window - tile_start)
        base = row * score_stride
        if end <= begin:
            scores[base : base + tokens] = _ZERO
            continue
        highest = max(largest[row], row_max(scores, base + begin, end - begin))
        # A row of -inf scores has no maximum to subtract; its weights are 0, and NaN stays NaN.
        shift = highest if highest != _NEGATIVE_INFINITY else _ZERO
        # Slices, because LLVM vectorises a loop only where it sees that no index counts from the end.
        scores[base : base + begin] = _ZERO
        scores[base + end : base + tokens] = _ZERO
        visible = scores[base + begin : base + end]
        sum_here = _ZERO
        for t in range(visible.shape[0]):
            weight = exp32(visible[t] - shift)
            visible[t] = weight
            sum_here += weight
        if largest[row] != highest:
            keep = exp32(largest[row] - shift)
            total[row] *= keep
            sums = acc[row * acc_stride : (row + 1) * acc_stride]
            for d in range(sums.shape[0]):
                sums[d] *= keep
            largest[row] = highest
        total[row] += sum_here


@helper
def _attend(
    item: Any,
    group: int,
    scale: Any,
    window: int,
    query: Any,
    query_stride: int,
    k: Any,
    v: Any,
    query_start: Any,
    seq_lens: Any,
    block_tables: Any,
    out: Any,
    q_tile: Any,
    scores: Any,
    acc: Any,
    largest: Any,
    total: Any,
) -> None:
    sequence, first_query, queries, first_head, heads = item[0], item[1], item[2], item[3], item[4]
    block_size, dim = v.shape[2], v.shape[3]
    pack = k.shape[4]
    words = dim // pack
    k_block, k_head = k.strides[0] // 4, k.strides[1] // 4
    v_block, v_head = v.strides[0] // 4, v.strides[1] // 4
    begin = query_start[sequence]
    first_position = seq_lens[sequence] - (query_start[sequence + 1] - begin) + first_query
    visible_end = first_position + queries
    visible_begin = max(0, first_position + 1 - window) if window > 0 else 0
    blocks_per_tile = max(1, TILE_TOKENS // block_size)
    score_stride = blocks_per_tile * block_size + _LANES
    acc_stride = (words + _LANES - 1) // _LANES * _LANES * pack
    rows = queries * group
    num_heads = k.shape[1] * group

    for head in range(first_head, first_head + heads):
        for row in range(rows):
            source = (begin + first_query + row // group) * query_stride + (head * group + row % group) * dim
            stored = query[source : source + dim]
            scaled = q_tile[row * dim : (row + 1) * dim]
            for d in range(dim):
                scaled[d] = widen(stored[d]) * scale
            largest[row] = _NEGATIVE_INFINITY
            total[row] = _ZERO
        acc[: rows * acc_stride] = _ZERO

        first_block = visible_begin // block_size
        while first_block * block_size < visible_end:
            tile_start = first_block * block_size
            tokens = min(blocks_per_tile * block_size, visible_end - tile_start)
            skipped = max(0, visible_begin - tile_start)
            for j in range((tokens + block_size - 1) // block_size):
                place = np.int64(block_tables[sequence, first_block + j]) * k_block + head * k_head
                cols = min(block_size, tokens - j * block_size)
                for c in range(0, cols, _LANES):
                    _scores(
                        rows,
                        q_tile,
                        dim,
                        k,
                        place + c,
                        block_size,
                        words,
                        cols - c,
                        scores,
                        j * block_size + c,
                        score_stride,
                    )
            _softmax_step(
                rows,
                group,
                first_position,
                tile_start,
                tokens,
                window,
                scores,
                score_stride,
                acc,
                acc_stride,
                largest,
                total,
            )
            for j in range((tokens + block_size - 1) // block_size):
                start = min(max(0, skipped - j * block_size), block_size)
                depth = min(block_size, tokens - j * block_size) - start
                if depth > 0:
                    place = np.int64(block_tables[sequence, first_block + j]) * v_block + head * v_head + start * words
                    for c in range(0, words, _LANES):
                        _values(
                            rows,
                            scores,
                            j * block_size + start,
                            score_stride,
                            v,
                            place + c,
                            words,
                            depth,
                            words - c,
                            acc,
                            c * pack,
                            acc_stride,
                        )
            first_block += blocks_per_tile

        for row in range(rows):
            target = (begin + first_query + row // group) * num_heads * dim + (head * group + row % group) * dim
            inverse = _ONE / total[row] if total[row] != _ZERO else _ZERO
            result = out[target : target + dim]
            for half in range(pack):
                for first in range(0, words, _LANES):
                    sums = acc[row * acc_stride + first * pack + half * _LANES :]
                    for lane in range(min(_LANES, words - first)):
                        d = (first + lane) * pack + half
                        result[d] = narrow(sums[lane] * inverse, result[d])


@helper
def _attend_items(
    part: int,
    parts: int,
    items: Any,
    counter: Any,
    group: int,
    scale: Any,
    window: int,
    query: Any,
    query_stride: int,
    k: Any,
    v: Any,
    query_start: Any,
    seq_lens: Any,
    block_tables: Any,
    out: Any,
) -> None:
    block_size, dim = v.shape[2], v.shape[3]
    rows = max(TILE_ROWS, group)
    q_tile = np.empty(rows * dim, np.float32)
    scores = np.empty(rows * (max(1, TILE_TOKENS // block_size) * block_size + _LANES) + _LANES, np.float32)
    acc = np.empty(rows * (dim + 2 * _LANES), np.float32)
    largest = np.empty(rows, np.float32)
    total = np.empty(rows, np.float32)
    while True:
        index = next_item(counter)
        if index >= items.shape[0]:
            break
        _attend(
            items[index],
            group,
            scale,
            window,
            query,
            query_stride,
            k,
            v,
            query_start,
            seq_lens,
            block_tables,
            out,
            q_tile,
            scores,
            acc,
            largest,
            total,
        )


@kernel
def attention(
    board: int,
    items: Any,
    group: int,
    scale: Any,
    window: int,
    query: int,
    query_stride: int,
    k: Any,
    v: Any,
    query_start: Any,
    seq_lens: Any,
    block_tables: Any,
    out: int,
    rows: int,
    like: Any,
) -> None:
    """Attention of the work items int32 [n, 5] (sequence, first query, queries, first kv head, kv heads).

    query, its rows query_stride apart, and out [rows, heads * dim] by address, elements like `like`; k and v are
    `LayerKV.words`.
    """
    queries = vector(query, rows * query_stride, like)
    results = vector(out, rows * k.shape[1] * group * v.shape[3], like)
    counter = np.zeros(1, np.int64)
    run(
        board,
        1,
        _attend_items,
        (
            items,
            counter,
            group,
            scale,
            window,
            queries,
            query_stride,
            k,
            v,
            query_start,
            seq_lens,
            block_tables,
            results,
        ),
    )
