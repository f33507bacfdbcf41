"""A stack of decoder layers as one thing that a back end may run in one go.

The Llama family's layer: norm, projections, norms of the heads where a member has them, rotation, attention,
projection, sum and norm, gated feed-forward. `engine.models.llama` computes the same operation by operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pagemill.kernels.layout import LayerKV
from pagemill.kernels.metadata import AttentionMetadata

if TYPE_CHECKING:
    from pagemill.kernels.ops import SampleBatch


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
    """Layers, what they share, and what is before and behind them: the prepared tables of embeddings and of the head,
    often the same one, and a norm. cos_sin float32 [positions, D], see `Ops.rotary_embedding`."""

    embedding: Any
    layers: Sequence[DecoderLayer]
    final_norm: torch.Tensor
    head: Any
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

    def draw(
        self,
        token_ids: torch.Tensor,
        meta: AttentionMetadata,
        kv: Sequence[LayerKV],
        rows: torch.Tensor,
        sampling: SampleBatch,
        *,
        advance: bool = False,
    ) -> list[int]:
        """The same from tokens int64 [T] to one drawn for each of the R rows, as `Ops.sample` draws it.

        advance: the same arguments again, after a call that drew one token for each of T = R = S sequences. These are
        the tokens now: what the arrays say is first brought to them, in place, but for the block tables, which cover
        them already. Raises ValueError where the last call was another.
        """
        ...
