"""Norms, rotary embedding, activation and the KV write on the CPU. Arithmetic is float32; rows are independent."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.simd import exp32, narrow, widen
from pagemill.kernels.cpu.team import run

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
def rms_norm(board: int, x: Any, weight: Any, eps: Any, out: Any) -> None:
    run(board, _PARTS, _rms_norm_rows, (x, weight, eps, out))


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
def add_rms_norm(board: int, x: Any, residual: Any, weight: Any, eps: Any, out: Any, total: Any) -> None:
    run(board, _PARTS, _add_rms_norm_rows, (x, residual, weight, eps, out, total))


@helper
def _silu_and_mul_rows(part: int, parts: int, gate_up: Any, out: Any) -> None:
    size = out.shape[1]
    rows = out.shape[0]
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        for i in range(size):
            gate = widen(gate_up[row, i])
            out[row, i] = narrow(gate / (_ONE + exp32(-gate)) * widen(gate_up[row, size + i]), out[row, i])


@kernel
def silu_and_mul(board: int, gate_up: Any, out: Any) -> None:
    run(board, _PARTS, _silu_and_mul_rows, (gate_up, out))


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
    query: Any,
    query_heads: int,
    query_stride: int,
    key: Any,
    key_heads: int,
    key_stride: int,
    positions: Any,
    cos_sin: Any,
) -> None:
    """query and key are flat arrays whose rows lie their stride apart."""
    run(board, _PARTS, _rotary_rows, (query, query_heads, query_stride, key, key_heads, key_stride, positions, cos_sin))


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
def write_kv(board: int, key: Any, key_stride: int, value: Any, value_stride: int, k: Any, v: Any, slots: Any) -> None:
    """key and value are flat arrays whose rows lie their stride apart; k and v are `LayerKV.words`."""
    run(board, _PARTS, _write_kv_rows, (key, key_stride, value, value_stride, k, v, slots))
