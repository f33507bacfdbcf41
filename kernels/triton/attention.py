"""Paged attention in Triton: one kernel fed by a work list (`plan.py`), and the merge of split key ranges.

Rows of a tile are tokens x query heads of one KV head (packed GQA), so each byte of K and V is read once for the whole
group. Blocks are combined by running maximum and sum (log-sum-exp), in base 2. The key loop is split into whole tiles
without any mask and edge tiles with all of them: the masks cost a fifth to a half of a tile's instructions.

Offsets into the pool are int64: an int32 offset wraps at 2^31 elements of one layer, a few million tokens.
"""

# Parameters of a kernel are Triton values and constants, which Python annotations cannot say.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _attend_tile(
    accumulator,
    row_max,
    row_sum,
    query,
    key,
    value,
    table_row,
    start,
    kv_lo,
    kv_hi,
    positions,
    window,
    score_scale,
    block_stride,
    slot_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Adds the keys at positions [start, start + TILE) to the running softmax of every row."""
    offsets = tl.arange(0, TILE)
    dims = tl.arange(0, D_PAD)
    key_positions = start + offsets
    live = key_positions < kv_hi
    if WINDOWED:
        live = live & (key_positions >= kv_lo)

    if BLOCK_SIZE % TILE == 0:
        # The tile lies within one block: one scalar table read, constant offsets behind it.
        block = tl.load(table_row + start // BLOCK_SIZE).to(tl.int64)
        slots = block * block_stride + (start % BLOCK_SIZE + offsets).to(tl.int64) * slot_stride
    else:
        if MASKED:
            blocks = tl.load(table_row + key_positions // BLOCK_SIZE, mask=live, other=0)
        else:
            blocks = tl.load(table_row + key_positions // BLOCK_SIZE)
        slots = blocks.to(tl.int64) * block_stride + (key_positions % BLOCK_SIZE).to(tl.int64) * slot_stride

    # Slots beyond the sequence hold anything, NaN included, and 0 * NaN is NaN: they are never loaded.
    if MASKED:
        key_mask = live[None, :]
        value_mask = live[:, None]
        if D_PAD != HEAD_DIM:
            key_mask = key_mask & (dims < HEAD_DIM)[:, None]
            value_mask = value_mask & (dims < HEAD_DIM)[None, :]
        keys = tl.load(key + slots[None, :] + dims[:, None], mask=key_mask, other=0.0)
        values = tl.load(value + slots[:, None] + dims[None, :], mask=value_mask, other=0.0)
    elif D_PAD != HEAD_DIM:
        keys = tl.load(key + slots[None, :] + dims[:, None], mask=(dims < HEAD_DIM)[:, None], other=0.0)
        values = tl.load(value + slots[:, None] + dims[None, :], mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        keys = tl.load(key + slots[None, :] + dims[:, None])
        values = tl.load(value + slots[:, None] + dims[None, :])

    scores = tl.dot(query, keys.to(DOT_DTYPE), input_precision="ieee") * score_scale
    if MASKED:
        visible = live[None, :] & (key_positions[None, :] <= positions[:, None])
        if WINDOWED:
            visible = visible & (positions[:, None] - key_positions[None, :] < window)
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen no key yet keeps maximum -inf, and -inf - (-inf) is NaN.
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        reference = new_max
    weights = tl.exp2(scores - reference[:, None])
    decay = tl.exp2(row_max - reference)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    accumulator = accumulator * decay[:, None]
    accumulator = tl.dot(weights.to(DOT_DTYPE), values.to(DOT_DTYPE), accumulator, input_precision="ieee")
    return accumulator, new_max, row_sum


@triton.jit(do_not_specialize=["window"])
def paged_attention_kernel(
    output,
    part_output,
    part_lse,
    query,
    key,
    value,
    block_table,
    work,
    score_scale,
    window,
    query_token_stride: tl.int64,
    query_head_stride: tl.int64,
    block_stride: tl.int64,
    slot_stride: tl.int64,
    head_stride: tl.int64,
    table_stride: tl.int64,
    output_token_stride: tl.int64,
    output_head_stride: tl.int64,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """One program: one work item x one KV head. Grid (items * KV_HEADS,); `score_scale` includes log2(e)."""
    program = tl.program_id(0)
    kv_head = program % KV_HEADS
    record = work + (program // KV_HEADS) * 8
    sequence = tl.load(record)
    first_token = tl.load(record + 1)
    tokens = tl.load(record + 2)
    first_position = tl.load(record + 3)
    kv_lo = tl.load(record + 4)
    kv_hi = tl.load(record + 5)
    part = tl.load(record + 6)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, D_PAD)
    row_token = rows // GROUP
    row_head = kv_head * GROUP + rows % GROUP
    row_live = row_token < tokens
    positions = first_position + row_token
    row_mask = row_live[:, None]
    if D_PAD != HEAD_DIM:
        row_mask = row_mask & (dims < HEAD_DIM)[None, :]
    tokens_at = (first_token + row_token).to(tl.int64)
    query_at = tokens_at * query_token_stride + row_head.to(tl.int64) * query_head_stride
    queries = tl.load(query + query_at[:, None] + dims[None, :], mask=row_mask, other=0.0).to(DOT_DTYPE)

    table_row = block_table + sequence.to(tl.int64) * table_stride
    key_head = key + kv_head.to(tl.int64) * head_stride
    value_head = value + kv_head.to(tl.int64) * head_stride

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, D_PAD], tl.float32)

    begin = kv_lo // TILE * TILE
    whole_end = tl.maximum(tl.minimum(first_position + 1, kv_hi) // TILE * TILE, begin)
    whole_begin = begin
    if WINDOWED:
        seen_by_all = tl.maximum(first_position + tokens - window, kv_lo)
        whole_begin = tl.minimum((seen_by_all + TILE - 1) // TILE * TILE, whole_end)
        for start in range(begin, whole_begin, TILE):
            accumulator, row_max, row_sum = _attend_tile(
                accumulator, row_max, row_sum, queries, key_head, value_head, table_row, start, kv_lo, kv_hi,
                positions, window, score_scale, block_stride, slot_stride,
                BLOCK_SIZE, HEAD_DIM, D_PAD, TILE, True, WINDOWED, DOT_DTYPE,
            )  # fmt: skip
    for start in range(whole_begin, whole_end, TILE):
        accumulator, row_max, row_sum = _attend_tile(
            accumulator, row_max, row_sum, queries, key_head, value_head, table_row, start, kv_lo, kv_hi,
            positions, window, score_scale, block_stride, slot_stride,
            BLOCK_SIZE, HEAD_DIM, D_PAD, TILE, False, WINDOWED, DOT_DTYPE,
        )  # fmt: skip
    for start in range(whole_end, kv_hi, TILE):
        accumulator, row_max, row_sum = _attend_tile(
            accumulator, row_max, row_sum, queries, key_head, value_head, table_row, start, kv_lo, kv_hi,
            positions, window, score_scale, block_stride, slot_stride,
            BLOCK_SIZE, HEAD_DIM, D_PAD, TILE, True, WINDOWED, DOT_DTYPE,
        )  # fmt: skip

    # A row that saw no key has accumulator 0 and sum 0: its result is 0.
    result = accumulator / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    if part < 0:
        output_at = tokens_at * output_token_stride + row_head.to(tl.int64) * output_head_stride
        tl.store(output + output_at[:, None] + dims[None, :], result.to(output.dtype.element_ty), mask=row_mask)
    else:
        scratch_rows = (part.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_M + rows
        lse = tl.where(row_sum > 0.0, row_max + tl.log2(tl.where(row_sum > 0.0, row_sum, 1.0)), float("-inf"))
        tl.store(part_output + scratch_rows[:, None] * D_PAD + dims[None, :], result, mask=row_live[:, None])
        tl.store(part_lse + scratch_rows, lse, mask=row_live)


@triton.jit
def merge_parts_kernel(
    output,
    part_output,
    part_lse,
    merge,
    output_token_stride: tl.int64,
    output_head_stride: tl.int64,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PART_TILE: tl.constexpr,
):
    """Combines the parts of one token and query head by their log-sum-exp. Grid (merged tokens * query heads,)."""
    program = tl.program_id(0)
    head = program % (KV_HEADS * GROUP)
    record = merge + (program // (KV_HEADS * GROUP)) * 4
    token = tl.load(record)
    first_part = tl.load(record + 1)
    parts = tl.load(record + 2)
    row = tl.load(record + 3) * GROUP + head % GROUP

    dims = tl.arange(0, D_PAD)
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    accumulator = tl.zeros([D_PAD], tl.float32)
    for base in range(0, parts, PART_TILE):
        ordinal = base + tl.arange(0, PART_TILE)
        live = ordinal < parts
        scratch_rows = ((first_part + ordinal).to(tl.int64) * KV_HEADS + head // GROUP) * BLOCK_M + row
        lse = tl.load(part_lse + scratch_rows, mask=live, other=float("-inf"))
        outputs = tl.load(part_output + scratch_rows[:, None] * D_PAD + dims[None, :], mask=live[:, None], other=0.0)
        new_largest = tl.maximum(largest, tl.max(lse, 0))
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(lse - reference)
        decay = tl.exp2(largest - reference)
        total = total * decay + tl.sum(weights, 0)
        accumulator = accumulator * decay + tl.sum(weights[:, None] * outputs, 0)
        largest = new_largest

    result = accumulator / tl.where(total > 0.0, total, 1.0)
    at = token.to(tl.int64) * output_token_stride + head.to(tl.int64) * output_head_stride
    tl.store(output + at + dims, result.to(output.dtype.element_ty), mask=dims < HEAD_DIM)
