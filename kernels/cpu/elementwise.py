"""Norms, rotary embedding, activation and the KV write on the CPU. Arithmetic is float32; rows are independent."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.norm import norm_row, norm_sum_row
from pagemill.kernels.cpu.rotation import rotate
from pagemill.kernels.cpu.simd import exp32, fetch_to_write, narrow, widen
from pagemill.kernels.cpu.team import run
from pagemill.kernels.cpu.views import matrix, vector

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_WORD = np.uint32(0)
_PARTS = 4  # of the rows, for each thread


@helper
def _rms_norm_rows(part: int, parts: int, x: Any, weight: Any, eps: Any, out: Any) -> None:
    rows = x.shape[0]
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        norm_row(x[row], weight, eps, out[row])


@kernel
def rms_norm(board: int, x: int, weight: int, eps: Any, out: int, rows: int, size: int, like: Any) -> None:
    """x, out [rows, size] and weight [size] of stored elements like `like`, by address."""
    arrays = (matrix(x, rows, size, like), vector(weight, size, like), eps, matrix(out, rows, size, like))
    run(board, _PARTS, _rms_norm_rows, arrays)


@helper
def _add_rms_norm_rows(
    part: int, parts: int, x: Any, residual: Any, weight: Any, eps: Any, out: Any, total: Any
) -> None:
    rows = x.shape[0]
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        norm_sum_row(x[row], residual[row], weight, eps, out[row], total[row])


@kernel
def add_rms_norm(
    board: int,
    x: int,
    residual: int,
    weight: int,
    eps: Any,
    out: int,
    total: int,
    rows: int,
    size: int,
    like: Any,
    residual_like: Any,
) -> None:
    """x, out [rows, size] and weight [size] like `like`, residual and total [rows, size] like theirs, by address."""
    arrays = (
        matrix(x, rows, size, like),
        matrix(residual, rows, size, residual_like),
        vector(weight, size, like),
        eps,
        matrix(out, rows, size, like),
        matrix(total, rows, size, residual_like),
    )
    run(board, _PARTS, _add_rms_norm_rows, arrays)


@helper
def _silu_and_mul_rows(part: int, parts: int, gate_up: Any, out: Any) -> None:
    size = out.shape[1]
    rows = out.shape[0]
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        for i in range(size):
            gate = widen(gate_up[row, i])
            out[row, i] = narrow(gate / (_ONE + exp32(-gate)) * widen(gate_up[row, size + i]), out[row, i])


@kernel
def silu_and_mul(board: int, gate_up: int, out: int, rows: int, size: int, like: Any) -> None:
    """gate_up [rows, 2 * size] and out [rows, size] of stored elements like `like`, by address."""
    run(board, _PARTS, _silu_and_mul_rows, (matrix(gate_up, rows, 2 * size, like), matrix(out, rows, size, like)))


@helper
def _rotary_rows(
    part: int,
    parts: int,
    query: Any,
    query_heads: int,
    query_stride: int,
    key: Any,
    key_heads: int,
    key_stride: int,
    positions: Any,
    cos_sin: Any,
) -> None:
    rows = positions.shape[0]
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        rotate(query, row * query_stride, query_heads, cos_sin, positions[row])
        rotate(key, row * key_stride, key_heads, cos_sin, positions[row])


@kernel
def rotary(
    board: int,
    query: int,
    query_heads: int,
    query_stride: int,
    key: int,
    key_heads: int,
    key_stride: int,
    positions: int,
    rows: int,
    cos_sin: int,
    longest: int,
    dim: int,
    like: Any,
) -> None:
    """query and key by address, their rows of heads * dim elements like `like` a stride apart.

    positions int64 [rows] and cos_sin float32 [longest, dim] by address.
    """
    arrays = (
        vector(query, rows * query_stride, like),
        query_heads,
        query_stride,
        vector(key, rows * key_stride, like),
        key_heads,
        key_stride,
        vector(positions, rows, np.int64(0)),
        matrix(cos_sin, longest, dim, _ZERO),
    )
    run(board, _PARTS, _rotary_rows, arrays)


@helper
def store_kv(
    key: int, value: int, heads: int, words: int, slot: int, k: int, v: int, block_bytes: int, block_size: int
) -> None:
    """One token's key and value, by address, to their slot: keys are scattered by words of 32 bits ("k_major")."""
    block = slot // block_size * block_bytes
    offset = slot % block_size
    for head in range(heads):
        source = vector(key + 4 * head * words, words, _WORD)
        target = vector(k + block + 4 * (head * words * block_size + offset), words * block_size, _WORD)
        for word in range(words):
            target[word * block_size] = source[word]
    for head in range(heads):
        source = vector(value + 4 * head * words, words, _WORD)
        target = vector(v + block + 4 * (head * block_size + offset) * words, words, _WORD)
        for word in range(words):
            target[word] = source[word]


@helper
def fetch_keys(slot: int, heads: int, words: int, k: int, block_bytes: int, block_size: int, num_blocks: int) -> None:
    """Ask for the cache lines that a token's key will be scattered to; in a decode nothing else is written to them."""
    if 0 <= slot < num_blocks * block_size:
        place = k + slot // block_size * block_bytes + 4 * (slot % block_size)
        for word in range(heads * words):
            fetch_to_write(place + 4 * word * block_size)


@helper
def _write_kv_rows(
    part: int,
    parts: int,
    key: int,
    key_bytes: int,
    value: int,
    value_bytes: int,
    heads: int,
    words: int,
    k: int,
    v: int,
    block_bytes: int,
    block_size: int,
    num_blocks: int,
    slots: Any,
) -> None:
    rows = slots.shape[0]
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        slot = slots[row]
        if 0 <= slot < num_blocks * block_size:
            here, there = key + row * key_bytes, value + row * value_bytes
            store_kv(here, there, heads, words, slot, k, v, block_bytes, block_size)


@kernel
def write_kv(
    board: int,
    key: int,
    key_bytes: int,
    value: int,
    value_bytes: int,
    heads: int,
    words: int,
    k: int,
    v: int,
    block_bytes: int,
    block_size: int,
    num_blocks: int,
    slots: int,
    rows: int,
) -> None:
    """Everything by address: rows of keys and values, heads * words words of 32 bits, so many bytes apart; block 0's
    keys and values in the pool, blocks block_bytes apart; slots int64 [rows]."""
    place = (k, v, block_bytes, block_size, num_blocks, vector(slots, rows, np.int64(0)))
    run(board, _PARTS, _write_kv_rows, (key, key_bytes, value, value_bytes, heads, words, *place))


@helper
def _place_rows(
    part: int,
    parts: int,
    qkv: Any,
    address: int,
    heads: int,
    kv_heads: int,
    dim: int,
    norms: bool,
    query_norm: Any,
    key_norm: Any,
    eps: Any,
    rotates: bool,
    positions: Any,
    cos_sin: Any,
    k: int,
    v: int,
    block_bytes: int,
    block_size: int,
    num_blocks: int,
    slots: Any,
) -> None:
    rows, stride = slots.shape[0], (heads + 2 * kv_heads) * dim
    words = dim * qkv.itemsize // 4
    last = rows * (part + 1) // parts
    for row in range(rows * part // parts, last):
        start = row * stride
        if norms:
            for head in range(heads + kv_heads):
                each = qkv[start + head * dim : start + (head + 1) * dim]
                norm_row(each, query_norm if head < heads else key_norm, eps, each)
        if rotates:
            rotate(qkv, start, heads + kv_heads, cos_sin, positions[row])
        slot = slots[row]
        if row + 1 < last and slots[row + 1] // block_size != slot // block_size:
            fetch_keys(slots[row + 1], kv_heads, words, k, block_bytes, block_size, num_blocks)
        if 0 <= slot < num_blocks * block_size:
            key = address + (start + heads * dim) * qkv.itemsize
            store_kv(key, key + 4 * kv_heads * words, kv_heads, words, slot, k, v, block_bytes, block_size)


@kernel
def place_qkv(
    board: int,
    qkv: int,
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    query_norm: int,
    key_norm: int,
    eps: Any,
    rotates: bool,
    positions: int,
    cos_sin: int,
    longest: int,
    k: int,
    v: int,
    block_bytes: int,
    block_size: int,
    num_blocks: int,
    slots: int,
    like: Any,
) -> None:
    """All that lies between the projection and attention, in one pass over the rows of queries, keys and values
    [rows, (heads + 2 * kv_heads) * dim]: norms of the heads (addresses 0: none), rotation, both in place, and the write
    of keys and values. Addresses as in `rotary` and `write_kv`."""
    norms = query_norm != 0
    arrays = (
        vector(qkv, rows * (heads + 2 * kv_heads) * dim, like),
        qkv,
        heads,
        kv_heads,
        dim,
        norms,
        vector(query_norm, dim, like),
        vector(key_norm, dim, like),
        eps,
        rotates,
        vector(positions, rows, np.int64(0)),
        matrix(cos_sin, longest, dim, _ZERO),
        k,
        v,
        block_bytes,
        block_size,
        num_blocks,
        vector(slots, rows, np.int64(0)),
    )
    run(board, _PARTS, _place_rows, arrays)


@helper
def _widen_rows(part: int, parts: int, x: Any, out: Any) -> None:
    count = x.shape[0]
    for i in range(count * part // parts, count * (part + 1) // parts):
        out[i] = widen(x[i])


@kernel
def widen_all(board: int, x: int, out: int, count: int, like: Any) -> None:
    """float32 of count stored elements, both by address."""
    run(board, _PARTS, _widen_rows, (vector(x, count, like), vector(out, count, _ZERO)))


@helper
def _pick_rows(part: int, parts: int, x: Any, rows: Any, out: Any) -> None:
    count = rows.shape[0]
    for index in range(count * part // parts, count * (part + 1) // parts):
        source, target = x[rows[index]], out[index]
        for i in range(source.shape[0]):
            target[i] = source[i]


@kernel
def pick_rows(board: int, x: int, total: int, size: int, rows: int, count: int, out: int, like: Any) -> None:
    """Rows int64 [count] of x [total, size], to out [count, size]; all by address."""
    run(
        board,
        _PARTS,
        _pick_rows,
        (matrix(x, total, size, like), vector(rows, count, np.int64(0)), matrix(out, count, size, like)),
    )
