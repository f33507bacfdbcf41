"""`Ops` on CUDA devices: Triton kernels, and torch's own matrix product. Triton's interpreter runs it on a CPU."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from pagemill.kernels.decoder import DecoderStack
from pagemill.kernels.layout import KVForm, LayerKV
from pagemill.kernels.metadata import AttentionMetadata
from pagemill.kernels.ops import LogitEdits, SampleBatch, TopLogprobs
from pagemill.kernels.quantised_weight import QuantisedWeight
from pagemill.kernels.reference import ReferenceOps
from pagemill.kernels.triton.attention import merge_parts_kernel, paged_attention_kernel
from pagemill.kernels.triton.configs import INTERPRETED_DEVICE, DeviceFacts, next_power_of_two, padded_head_dim
from pagemill.kernels.triton.device_work import device_works
from pagemill.kernels.triton.edits import edit_logits
from pagemill.kernels.triton.elementwise import rms_norm_kernel, silu_and_mul_kernel
from pagemill.kernels.triton.kv import copy_blocks_kernel, rotary_kernel, write_kv_kernel
from pagemill.kernels.triton.logprobs import LONGEST_LIST, logprobs
from pagemill.kernels.triton.sampling import sample

_TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_LOG2_E = math.log2(math.e)
_PARTS_AT_ONCE = 16
_ROTARY_ELEMENTS = 256  # of one half, per program of one warp: 16 bytes a thread in 16-bit types
_ACTIVATION_BLOCK = 1024
_COPY_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """A weight [N, K] and bias [N] as they were loaded."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def in_features(self) -> int:
        return int(self.weight.shape[1])

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[0])


class TritonOps:
    """`Ops` by Triton. Raises RuntimeError where `interpret` and the environment's TRITON_INTERPRET disagree.

    Triton decides when a kernel's module is imported whether it is compiled or interpreted, so the interpreter must be
    asked for (TRITON_INTERPRET=1) before the process starts. The interpreter is for checking logic: it is slow, and
    its bfloat16 arithmetic is wrong, which is why the kernels widen bfloat16 before they compute.
    """

    kv_form: KVForm = "token_major"

    def __init__(self, *, interpret: bool = False) -> None:
        if interpret != bool(triton.knobs.runtime.interpret):
            state = os.environ.get("TRITON_INTERPRET", "unset")
            wanted = "needs TRITON_INTERPRET=1" if interpret else "needs TRITON_INTERPRET unset"
            raise RuntimeError(f"these kernels: Triton {wanted} in the environment from the start, it is {state}")
        self.name = "interpret" if interpret else "triton"
        self._interpret = interpret
        self._reference = ReferenceOps()
        self._facts: dict[torch.device, DeviceFacts] = {}

    @property
    def threads(self) -> int:
        return 1

    def step(self, tokens: int) -> AbstractContextManager[None]:
        return nullcontext()

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv: LayerKV, slot_mapping: torch.Tensor) -> None:
        _require_rows(key, value)
        heads_pad, d_pad = next_power_of_two(kv.num_kv_heads), next_power_of_two(kv.head_dim)
        row_bytes = heads_pad * d_pad * key.element_size()
        self._launch(
            write_kv_kernel,
            (key.shape[0],),
            key,
            value,
            kv.k,
            kv.v,
            slot_mapping,
            kv.num_blocks * kv.block_size,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            *_pool_strides(kv),
            KV_HEADS=kv.num_kv_heads,
            HEAD_DIM=kv.head_dim,
            BLOCK_SIZE=kv.block_size,
            HEADS_PAD=heads_pad,
            D_PAD=d_pad,
            num_warps=min(max(row_bytes // (16 * 32), 1), 8),
        )

    def paged_attention(
        self, query: torch.Tensor, kv: LayerKV, meta: AttentionMetadata, *, scale: float, sliding_window: int = 0
    ) -> torch.Tensor:
        _require_rows(query)
        pool_strides = _pool_strides(kv)
        group = query.shape[1] // kv.num_kv_heads
        facts = self._device_facts(query.device)
        shape: dict[str, Any] = {
            "group": group,
            "kv_heads": kv.num_kv_heads,
            "head_dim": kv.head_dim,
            "dtype": kv.k.dtype,
            "window": sliding_window,
        }
        works = meta.plan(
            f"triton {shape}",
            lambda host: device_works(facts, host.query_start, host.seq_lens, query.device, **shape),
        )
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        output[meta.num_tokens :].zero_()
        widen = self._interpret and query.dtype == torch.bfloat16
        for work in works:
            block_m = work.config.shape.block_m
            rows = (work.num_parts, kv.num_kv_heads, block_m)
            d_pad = padded_head_dim(kv.head_dim)
            part_output = torch.empty((*rows, d_pad), dtype=torch.float32, device=query.device)
            part_lse = torch.empty(rows, dtype=torch.float32, device=query.device)
            self._launch(
                paged_attention_kernel,
                (work.work.shape[0] * kv.num_kv_heads,),
                output,
                part_output,
                part_lse,
                query,
                kv.k,
                kv.v,
                meta.block_tables,
                work.work,
                scale * _LOG2_E,
                sliding_window,
                query.stride(0),
                query.stride(1),
                *pool_strides,
                meta.block_tables.stride(0),
                output.stride(0),
                output.stride(1),
                KV_HEADS=kv.num_kv_heads,
                GROUP=group,
                HEAD_DIM=kv.head_dim,
                D_PAD=d_pad,
                BLOCK_SIZE=kv.block_size,
                BLOCK_M=block_m,
                TILE=work.config.shape.tile,
                WINDOWED=sliding_window > 0,
                DOT_DTYPE=tl.float32 if widen else _TRITON_DTYPES[query.dtype],
                num_warps=work.config.num_warps,
                num_stages=work.config.num_stages,
            )
            self._launch(
                merge_parts_kernel,
                (work.merge.shape[0] * query.shape[1],),
                output,
                part_output,
                part_lse,
                work.merge,
                output.stride(0),
                output.stride(1),
                KV_HEADS=kv.num_kv_heads,
                GROUP=group,
                HEAD_DIM=kv.head_dim,
                D_PAD=d_pad,
                BLOCK_M=block_m,
                PART_TILE=_PARTS_AT_ONCE,
                num_warps=4,
            )
        return output

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._norm(output, output, x, x, weight, eps, with_residual=False)
        return output

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        total = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
        self._norm(output, total, x, residual, weight, eps, with_residual=True)
        return output, total

    def rotary_embedding(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> None:
        _require_rows(query, key)
        half = query.shape[2] // 2
        heads = max(_ROTARY_ELEMENTS // next_power_of_two(half), 1)
        blocks = -(-query.shape[1] // heads) + -(-key.shape[1] // heads)
        self._launch(
            rotary_kernel,
            (query.shape[0], blocks),
            query,
            key,
            positions,
            cos_sin,
            query.stride(0),
            query.stride(1),
            key.stride(0),
            key.stride(1),
            cos_sin.stride(0),
            QUERY_HEADS=query.shape[1],
            KV_HEADS=key.shape[1],
            HALF_DIM=half,
            HALF_PAD=next_power_of_two(half),
            HEADS_BLOCK=heads,
            num_warps=1,
        )

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
        self._launch(
            silu_and_mul_kernel,
            (tokens, -(-width // _ACTIVATION_BLOCK)),
            output,
            _rows(gate_up),
            gate_up.stride(0),
            WIDTH=width,
            BLOCK=_ACTIVATION_BLOCK,
            num_warps=4,
        )
        return output

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> DenseLinear:
        return DenseLinear(weight, bias)

    def linear(self, x: torch.Tensor, prepared: DenseLinear) -> torch.Tensor:
        return torch.nn.functional.linear(x, prepared.weight, prepared.bias)

    def prepare_gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> DenseLinear:
        return DenseLinear(weight, bias)

    def prepare_stored(
        self, parts: Iterable[torch.Tensor], bias: torch.Tensor | None, dtype: torch.dtype, *, gated: bool = False
    ) -> None:
        return None

    def prepare_quantised(
        self, weight: QuantisedWeight, bias: torch.Tensor | None, dtype: torch.dtype, *, gated: bool = False
    ) -> DenseLinear:
        raise ValueError("products with quantised weights are built for the CPU only")

    def gated_linear(self, x: torch.Tensor, prepared: DenseLinear) -> torch.Tensor:
        return self.silu_and_mul(self.linear(x, prepared))

    def logits(self, hidden: torch.Tensor, prepared: DenseLinear) -> torch.Tensor:
        return self.linear(hidden, prepared).float()

    def embedding(self, token_ids: torch.Tensor, prepared: DenseLinear) -> torch.Tensor:
        return prepared.weight.index_select(0, token_ids)

    def compile_decoder(self, stack: DecoderStack, dtype: torch.dtype) -> None:
        return None

    def copy_blocks(self, pool: torch.Tensor, pairs: torch.Tensor) -> None:
        """Pairs on the host whose sources are no destinations are copied in place; others through a gathered copy."""
        if pairs.device.type != "cpu" or np.intersect1d(pairs[:, 0].numpy(), pairs[:, 1].numpy()).size:
            on_device = pairs.to(pool.device)
            pool.index_copy_(1, on_device[:, 1], pool.index_select(1, on_device[:, 0]))
            return
        words = pool.view(torch.int16 if pool.element_size() == 2 else torch.int32)
        self._launch(
            copy_blocks_kernel,
            (pairs.shape[0], words.shape[0], -(-words.shape[2] // _COPY_BLOCK)),
            words,
            pairs.to(pool.device),
            words.stride(0),
            words.stride(1),
            WORDS=words.shape[2],
            CHUNK=_COPY_BLOCK,
            num_warps=4,
        )

    def edit_logits(self, logits: torch.Tensor, edits: LogitEdits) -> None:
        edits.check_fit(*logits.shape)
        edit_logits(self._launch, _rows(logits), edits)

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> TopLogprobs:
        if top > LONGEST_LIST:
            return self._reference.logprobs(logits, token_ids, top)
        return logprobs(self._launch, _rows(logits), token_ids, top)

    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        return sample(self._launch, _rows(logits), batch)

    def _norm(
        self,
        output: torch.Tensor,
        total: torch.Tensor,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        with_residual: bool,
    ) -> None:
        hidden = x.shape[1]
        block = next_power_of_two(hidden)
        self._launch(
            rms_norm_kernel,
            (x.shape[0],),
            output,
            total,
            _rows(x),
            _rows(residual),
            weight,
            eps,
            x.stride(0),
            residual.stride(0),
            HIDDEN=hidden,
            WITH_RESIDUAL=with_residual,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )

    def _device_facts(self, device: torch.device) -> DeviceFacts:
        facts = self._facts.get(device)
        if facts is None:
            facts = self._facts[device] = self._query_device(device)
        return facts

    def _query_device(self, device: torch.device) -> DeviceFacts:
        if device.type != "cuda":
            return INTERPRETED_DEVICE
        properties = torch.cuda.get_device_properties(device)
        return DeviceFacts(properties.major * 10 + properties.minor, properties.multi_processor_count)

    def _launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if 0 in grid:
            return
        if self._interpret:
            kernel[grid](*args, **options)
            return
        with torch.cuda.device(args[0].device):
            # Fusing a multiply and an add is the default that Triton is about to change; it must not move silently.
            kernel[grid](*args, **options, enable_fp_fusion=True)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x, if its rows are contiguous. Raises ValueError otherwise: the kernels read rows with unit stride."""
    _require_rows(x)
    return x


def _require_rows(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"the last axis must be contiguous, got strides {tensor.stride()}")


def _pool_strides(kv: LayerKV) -> tuple[int, int, int]:
    """Block, slot and head stride in elements. Raises ValueError on a pool in another order."""
    if kv.form != "token_major":
        raise ValueError(f"the Triton kernels read a token_major pool, this one is {kv.form}")
    return kv.k.stride(0), kv.k.stride(1), kv.k.stride(2)
