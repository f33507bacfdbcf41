"""Writing keys and values into the paged pool, rotating queries and keys, and copying blocks, in Triton."""

# Parameters of a kernel are Triton values and constants, which Python annotations cannot say.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_slots"])
def write_kv_kernel(
    key,
    value,
    key_pool,
    value_pool,
    slot_mapping,
    num_slots,
    key_token_stride: tl.int64,
    key_head_stride: tl.int64,
    value_token_stride: tl.int64,
    value_head_stride: tl.int64,
    block_stride: tl.int64,
    slot_stride: tl.int64,
    head_stride: tl.int64,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """One program per token. A slot outside the pool is skipped: -1 marks padding."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if (slot >= 0) & (slot < num_slots):
        heads = tl.arange(0, HEADS_PAD)[:, None]
        dims = tl.arange(0, D_PAD)[None, :]
        mask = (heads < KV_HEADS) & (dims < HEAD_DIM)
        keys = tl.load(key + token * key_token_stride + heads * key_head_stride + dims, mask=mask)
        values = tl.load(value + token * value_token_stride + heads * value_head_stride + dims, mask=mask)
        at = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride + heads * head_stride + dims
        tl.store(key_pool + at, keys.to(key_pool.dtype.element_ty), mask=mask)
        tl.store(value_pool + at, values.to(value_pool.dtype.element_ty), mask=mask)


@triton.jit
def rotary_kernel(
    query,
    key,
    positions,
    cos_sin,
    query_token_stride: tl.int64,
    query_head_stride: tl.int64,
    key_token_stride: tl.int64,
    key_head_stride: tl.int64,
    cos_sin_stride: tl.int64,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
):
    """One program per token and block of heads, in place. Grid (tokens, query blocks + key blocks)."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    query_blocks: tl.constexpr = (QUERY_HEADS + HEADS_BLOCK - 1) // HEADS_BLOCK
    dims = tl.arange(0, HALF_PAD)
    table = cos_sin + tl.load(positions + token) * cos_sin_stride
    cos = tl.load(table + dims, mask=dims < HALF_DIM, other=0.0)[None, :]
    sin = tl.load(table + HALF_DIM + dims, mask=dims < HALF_DIM, other=0.0)[None, :]
    if block < query_blocks:
        heads = block * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
        at = query + token * query_token_stride + heads.to(tl.int64)[:, None] * query_head_stride + dims[None, :]
        _rotate(at, cos, sin, (heads < QUERY_HEADS)[:, None] & (dims < HALF_DIM)[None, :], HALF_DIM)
    else:
        heads = (block - query_blocks) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
        at = key + token * key_token_stride + heads.to(tl.int64)[:, None] * key_head_stride + dims[None, :]
        _rotate(at, cos, sin, (heads < KV_HEADS)[:, None] & (dims < HALF_DIM)[None, :], HALF_DIM)


@triton.jit
def _rotate(at, cos, sin, mask, HALF_DIM: tl.constexpr):
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF_DIM, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (first * cos - second * sin).to(at.dtype.element_ty), mask=mask)
    tl.store(at + HALF_DIM, (second * cos + first * sin).to(at.dtype.element_ty), mask=mask)


@triton.jit
def copy_blocks_kernel(
    pool, pairs, layer_stride: tl.int64, block_stride: tl.int64, WORDS: tl.constexpr, CHUNK: tl.constexpr
):
    """Copies each layer's WORDS words of block pairs[i, 0] to pairs[i, 1]. Grid (pairs, layers, chunks of words)."""
    pair = pairs + tl.program_id(0).to(tl.int64) * 2
    words = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    mask = words < WORDS
    layer = pool + tl.program_id(1).to(tl.int64) * layer_stride
    source = layer + tl.load(pair) * block_stride
    destination = layer + tl.load(pair + 1) * block_stride
    tl.store(destination + words, tl.load(source + words, mask=mask), mask=mask)
