"""`Ops` on the CPU, with numba. Takes float32 and bfloat16 tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pagemill.kernels.cpu import attention, elementwise, sampler
from pagemill.kernels.cpu.jit import keep_compiled
from pagemill.kernels.cpu.linear import CpuLinear, prepare_linear
from pagemill.kernels.cpu.plan import attention_items
from pagemill.kernels.cpu.team import Team
from pagemill.kernels.cpu.threads import set_threads
from pagemill.kernels.layout import KVForm, LayerKV
from pagemill.kernels.metadata import AttentionMetadata, HostMetadata
from pagemill.kernels.ops import SampleBatch

# Elements below which a second thread costs more to start than it saves.
_PARALLEL_ELEMENTS = 16384


def _array(tensor: torch.Tensor) -> Any:
    """The tensor's memory as a NumPy array of stored elements: float32 as it is, bfloat16 as uint16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    if tensor.dtype == torch.float32:
        return tensor.numpy()
    raise ValueError(f"the CPU kernels take float32 and bfloat16, got {tensor.dtype}")


def _rows(tensor: torch.Tensor) -> tuple[Any, int]:
    """A [T, heads, dim] tensor whose rows may be parts of longer ones, as a flat array and the distance of its rows."""
    tokens, heads, dim = tensor.shape
    stride = tensor.stride(0) if tokens > 1 else heads * dim
    if tensor.stride(2) != 1 or (heads > 1 and tensor.stride(1) != dim) or stride < heads * dim:
        raise ValueError(f"heads must lie side by side, got strides {tensor.stride()}")
    span = (tokens - 1) * stride + heads * dim if tokens else 0
    return _array(tensor.as_strided((span,), (1,))), stride


class CpuOps:
    """`Ops` for the CPU. `threads` of None means the cores that this process may use; compiled code is kept on disk."""

    name = "cpu"
    kv_form: KVForm = "k_major"

    def __init__(self, *, threads: int | None = None, cache_dir: str | None = None) -> None:
        self._team = Team(set_threads(threads))
        self.compiled_folder = keep_compiled(cache_dir)

    @property
    def threads(self) -> int:
        return self._team.threads

    def _board(self, elements: int) -> int:
        """What to run a kernel on so many elements on: the team, or 0 for this thread alone."""
        return 0 if elements < _PARALLEL_ELEMENTS else self._team.board()

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv: LayerKV, slot_mapping: torch.Tensor) -> None:
        keys, key_stride = _rows(key)
        values, value_stride = _rows(value)
        k, v = kv.words
        board = self._board(key.numel())
        elementwise.write_kv(board, keys, key_stride, values, value_stride, k, v, slot_mapping.numpy())

    def paged_attention(
        self, query: torch.Tensor, kv: LayerKV, meta: AttentionMetadata, *, scale: float, sliding_window: int = 0
    ) -> torch.Tensor:
        tokens, heads, dim = query.shape
        group = heads // kv.num_kv_heads
        out = torch.empty((tokens, heads, dim), dtype=query.dtype)

        def make(host: HostMetadata) -> Any:
            tile_tokens = max(1, attention.TILE_ROWS // group)
            return attention_items(host, tile_tokens=tile_tokens, num_kv_heads=kv.num_kv_heads, threads=self.threads)

        items = meta.plan(f"cpu {group} {kv.num_kv_heads}", make)
        queries, stride = _rows(query)
        k, v = kv.words
        host = meta.host
        work = int(host.seq_lens.sum()) * kv.num_kv_heads * dim if items.shape[0] > 1 else 0
        attention.attention(
            self._board(work),
            items,
            group,
            np.float32(scale),
            sliding_window,
            queries,
            stride,
            k,
            v,
            host.query_start,
            host.seq_lens,
            host.block_tables,
            _array(out).reshape(-1),
        )
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        elementwise.rms_norm(self._board(x.numel()), _array(x), _array(weight), np.float32(eps), _array(out))
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, total = torch.empty_like(x), torch.empty_like(residual)
        elementwise.add_rms_norm(
            self._board(x.numel()),
            _array(x),
            _array(residual),
            _array(weight),
            np.float32(eps),
            _array(out),
            _array(total),
        )
        return out, total

    def rotary_embedding(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> None:
        queries, query_stride = _rows(query)
        keys, key_stride = _rows(key)
        elementwise.rotary(
            self._board(query.numel()),
            queries,
            query.shape[1],
            query_stride,
            keys,
            key.shape[1],
            key_stride,
            positions.numpy(),
            cos_sin.numpy(),
        )

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype)
        elementwise.silu_and_mul(self._board(out.numel()), _array(gate_up), _array(out))
        return out

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> CpuLinear:
        return prepare_linear(weight, bias)

    def linear(self, x: torch.Tensor, prepared: CpuLinear) -> torch.Tensor:
        return prepared.apply(x, self._team)

    def copy_blocks(self, pool: torch.Tensor, pairs: torch.Tensor) -> None:
        pool[pairs[:, 1]] = pool[pairs[:, 0]]

    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        sampler.sample(
            self._board(logits.numel()) if logits.shape[0] > 1 else 0,
            logits.contiguous().numpy(),
            batch.temperature,
            batch.top_k,
            batch.top_p,
            batch.min_p,
            batch.seed,
            batch.position,
            batch.index,
            out.numpy(),
        )
        return out
