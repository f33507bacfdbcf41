"""Norms, rotary embedding, activation and the KV write on the CPU. Arithmetic is float32; rows are independent."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.simd import exp32, narrow, widen
from pagemill.kernels.cpu.team import run
from pagemill.kernels.cpu.views import matrix, vector

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_PARTS = 4  # of the rows, for each thread


@helper
def _rms_norm_rows(part: int, parts: int, x: Any, weight: Any, eps: Any, out: Any) -> None:
    size = np.float32(x.shape[1])
    rows = x.shape[0]
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        squares = _ZERO
        for i in range(x.shape[1]):
            value = widen(x[row, i])
            squares += value * value
        inverse = _ONE / np.sqrt(squares / size + eps)
        for i in range(x.shape[1]):
            out[row, i] = narrow(widen(x[row, i]) * inverse * widen(weight[i]), out[row, i])


@kernel
def rms_norm(board: int, x: int, weight: int, eps: Any, out: int, rows: int, size: int, like: Any) -> None:
    """x, out [rows, size] and weight [size] of stored elements like `like`, by address."""
    arrays = (matrix(x, rows, size, like), vector(weight, size, like), eps, matrix(out, rows, size, like))
    run(board, _PARTS, _rms_norm_rows, arrays)


@helper
def _add_rms_norm_rows(
    part: int, parts: int, x: Any, residual: Any, weight: Any, eps: Any, out: Any, total: Any
) -> None:
    size = np.float32(x.shape[1])
    rows = x.shape[0]
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        squares = _ZERO
        for i in range(x.shape[1]):
            stored = narrow(widen(x[row, i]) + widen(residual[row, i]), total[row, i])
            total[row, i] = stored
            value = widen(stored)
            squares += value * value
        inverse = _ONE / np.sqrt(squares / size + eps)
        for i in range(x.shape[1]):
            out[row, i] = narrow(widen(total[row, i]) * inverse * widen(weight[i]), out[row, i])


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
def _rotate(heads: Any, start: int, count: int, cos_sin: Any, position: int) -> None:
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[position, :half], cos_sin[position, half:]
    for head in range(count):
        # Slices, because LLVM vectorises a loop only where it sees that no index counts from the end.
        base = start + head * 2 * half
        left, right = heads[base : base + half], heads[base + half : base + 2 * half]
        for i in range(half):
            first, second = widen(left[i]), widen(right[i])
            left[i] = narrow(first * cos[i] - second * sin[i], left[i])
            right[i] = narrow(second * cos[i] + first * sin[i], right[i])


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
        _rotate(query, row * query_stride, query_heads, cos_sin, positions[row])
        _rotate(key, row * key_stride, key_heads, cos_sin, positions[row])


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
def _write_kv_rows(
    part: int, parts: int, key: Any, key_stride: int, value: Any, value_stride: int, k: Any, v: Any, slots: Any
) -> None:
    heads, block_size, dim = v.shape[1], v.shape[2], v.shape[3]
    pack = k.shape[4]
    rows = slots.shape[0]
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        slot = slots[row]
        if slot < 0 or slot >= v.shape[0] * block_size:
            continue
        block, offset = slot // block_size, slot % block_size
        for head in range(heads):
            source = row * key_stride + head * dim
            for word in range(dim // pack):
                for part in range(pack):
                    k[block, head, word, offset, part] = key[source + word * pack + part]
            source = row * value_stride + head * dim
            for d in range(dim):
                v[block, head, offset, d] = value[source + d]


@kernel
def write_kv(
    board: int,
    key: int,
    key_stride: int,
    value: int,
    value_stride: int,
    k: Any,
    v: Any,
    slots: int,
    rows: int,
    like: Any,
) -> None:
    """key and value by address, their rows of elements like `like` a stride apart; k and v are `LayerKV.words`.

    slots int64 [rows] by address.
    """
    arrays = (
        vector(key, rows * key_stride, like),
        key_stride,
        vector(value, rows * value_stride, like),
        value_stride,
        k,
        v,
        vector(slots, rows, np.int64(0)),
    )
    run(board, _PARTS, _write_kv_rows, arrays)
