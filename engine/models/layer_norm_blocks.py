"""The blocks of decoders older than Llama: layer norms, learned positions, one activation, as many key-value heads as
query heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagemill.engine.models.layer_norm import LayerNorm
from pagemill.kernels.layout import LayerKV
from pagemill.kernels.metadata import AttentionMetadata
from pagemill.kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class LayerNormBlock:
    """One layer. The linear weights are as `Ops.prepare_linear` made them; `scale` is the attention's."""

    attention_norm: LayerNorm
    qkv: Any
    output: Any
    feed_forward_norm: LayerNorm
    up: Any
    down: Any
    scale: float


@dataclass(frozen=True, slots=True)
class LayerNormBlocks:
    """All layers. `norm_first`: whether norms stand before attention and feed-forward, or behind what they add."""

    layers: Sequence[LayerNormBlock]
    num_heads: int
    activation: Callable[[torch.Tensor], torch.Tensor]
    dtype: torch.dtype
    ops: Ops
    norm_first: bool = True

    def forward(
        self, residual: torch.Tensor, meta: AttentionMetadata, kv: Sequence[LayerKV], rows: torch.Tensor
    ) -> torch.Tensor:
        """The residual stream behind the last layer at `rows`, float32 [len(rows), hidden].

        `residual` is float32 [tokens, hidden]: embeddings and positions, added.
        """
        ops = self.ops
        for index, layer in enumerate(self.layers):
            x = (layer.attention_norm(residual) if self.norm_first else residual).to(self.dtype)
            q, k, v = ops.linear(x, layer.qkv).view(-1, 3, self.num_heads, x.shape[1] // self.num_heads).unbind(1)
            ops.write_kv(k, v, kv[index], meta.slot_mapping)
            last = index == len(self.layers) - 1
            if last and not len(rows):
                return residual[:0]
            x = ops.paged_attention(q, kv[index], meta, scale=layer.scale).flatten(1)
            if last:
                # Nothing attends to what the last layer makes of the other tokens.
                x, residual = x.index_select(0, rows), residual.index_select(0, rows)
            residual = residual + ops.linear(x, layer.output)
            if not self.norm_first:
                residual = layer.attention_norm(residual)
            x = (layer.feed_forward_norm(residual) if self.norm_first else residual).to(self.dtype)
            residual = residual + ops.linear(self.activation(ops.linear(x, layer.up)), layer.down)
            if not self.norm_first:
                residual = layer.feed_forward_norm(residual)
        return residual
