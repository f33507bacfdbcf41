"""`Ops` in plain torch, for a CPU where numba cannot be used: torch's own products and attention, a sequence at a time.

What costs little in a step (sampling, edits, log-probabilities) is the reference's. In float32 the differences to the
compiled kernels are those of the order of sums; in bfloat16 torch also chooses its algorithms by the number of rows, so
that a row's bits may depend on what stands beside it.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from pagemill.kernels.layout import LayerKV
from pagemill.kernels.metadata import AttentionMetadata
from pagemill.kernels.reference import ReferenceLinear, ReferenceOps


class TorchOps(ReferenceOps):
    """`Ops` on the CPU without numba, some times slower than with it."""

    name = "torch"

    def paged_attention(
        self, query: torch.Tensor, kv: LayerKV, meta: AttentionMetadata, *, scale: float, sliding_window: int = 0
    ) -> torch.Tensor:
        out = torch.zeros_like(query)
        starts = meta.host.query_start.tolist()
        for sequence, seq_len in enumerate(meta.host.seq_lens.tolist()):
            begin, end = starts[sequence], starts[sequence + 1]
            if begin == end:
                continue
            first_query = seq_len - (end - begin)
            # Whole blocks before the window of the first query are read by nobody.
            skipped = max(0, first_query - sliding_window + 1) // kv.block_size if sliding_window > 0 else 0
            table = meta.block_tables[sequence, skipped : -(-seq_len // kv.block_size)]
            first_key = skipped * kv.block_size
            k, v = (part[: seq_len - first_key].transpose(0, 1) for part in kv.gather(table.long()))
            query_at = torch.arange(first_query, seq_len)[:, None]
            key_at = torch.arange(first_key, seq_len)[None, :]
            visible = key_at <= query_at
            if sliding_window > 0:
                visible &= query_at - key_at < sliding_window
            attended = functional.scaled_dot_product_attention(
                query[begin:end].transpose(0, 1), k, v, attn_mask=visible, scale=scale, enable_gqa=True
            )
            out[begin:end] = attended.transpose(0, 1)
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        norm = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (norm * weight.float()).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = (x.float() + residual.float()).to(residual.dtype)
        return self.rms_norm(total, weight, eps).to(x.dtype), total

    def rotary_embedding(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> None:
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        for heads in (query, key):
            first, second = heads.float().chunk(2, dim=-1)
            heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (functional.silu(gate) * up).to(gate_up.dtype)

    def linear(self, x: torch.Tensor, prepared: ReferenceLinear) -> torch.Tensor:
        dtype = prepared.weight.dtype
        bias = None if prepared.bias is None else prepared.bias.to(dtype)
        return functional.linear(x.to(dtype), prepared.weight, bias).to(x.dtype)
