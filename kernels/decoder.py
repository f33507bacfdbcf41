"""A stack of decoder layers as one thing that a back end may run in one go.

The Llama family's layer: norm, projections, norms of the heads where a member has them, rotation, attention,
projection, sum and norm, gated feed-forward. `engine.models.llama` computes the same operation by operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pagemill.kernels.layout import LayerKV
from pagemill.kernels.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Norm weights [H], of the heads [D] each; prepared linears: `qkv` is of queries, keys and values one under
    another, `gate_up` is gated. rotates: whether queries and keys are rotated; window: in tokens, 0 for none."""

    input_norm: torch.Tensor
    qkv: Any
    head_norms: Sequence[torch.Tensor]  # of queries and keys, or none
    output: Any
    post_norm: torch.Tensor
    gate_up: Any
    down: Any
    rotates: bool
    window: int


@dataclass(frozen=True, slots=True)
class DecoderStack:
    """Layers, what they share, and the norm behind them. cos_sin float32 [positions, D], see `Ops.rotary_embedding`."""

    layers: Sequence[DecoderLayer]
    final_norm: torch.Tensor
    cos_sin: torch.Tensor
    eps: float
    scale: float
    num_heads: int
    num_kv_heads: int
    head_dim: int


class CompiledDecoder(Protocol):
    """What a back end made of a stack."""

    def forward(
        self, x: torch.Tensor, meta: AttentionMetadata, kv: Sequence[LayerKV], rows: torch.Tensor
    ) -> torch.Tensor:
        """From embedded tokens x [T, H] to the normed hidden states [R, H] of the tokens `rows`, int64 [R].

        Keys and values are written to the pool, one entry of `kv` for each layer. With fewer entries only the first
        layers run, and what comes out is of use to nobody.
        """
        ...
