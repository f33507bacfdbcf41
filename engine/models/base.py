"""What the runner asks of a model, and what models are built with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from pagemill.engine.models.spec import ModelSpec
from pagemill.engine.weights import Checkpoint
from pagemill.kernels.layout import LayerKV
from pagemill.kernels.metadata import AttentionMetadata
from pagemill.kernels.ops import Ops

Embedding = Callable[[torch.Tensor], torch.Tensor]
"""Token ids int64 [T] -> [T, hidden_size]."""

_HEAD = "lm_head.weight"


class Model(Protocol):
    """A decoder over a paged KV pool. Tensors lie on the device the model was loaded to."""

    @property
    def spec(self) -> ModelSpec: ...

    def forward(
        self, token_ids: torch.Tensor, meta: AttentionMetadata, kv: Sequence[LayerKV], rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute one step's tokens, int64 [T], writing their keys and values into the pool.

        `kv` has one entry per layer. Returns the final hidden state, [R, hidden_size], of the tokens `rows`, int64
        [R], of the batch: only these go on to `logits`.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [R, vocab_size] of hidden states [R, hidden_size]."""
        ...


@dataclass(frozen=True, slots=True)
class Loading:
    """Where the weights come from and where they go: a checkpoint, the kernels, a dtype and a device."""

    checkpoint: Checkpoint
    ops: Ops
    dtype: torch.dtype
    device: str

    def vector(self, name: str, size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A weight [size]."""
        return self.checkpoint.take(name, (size,), dtype=dtype or self.dtype, device=self.device)

    def matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """A weight [rows, columns]."""
        return self.checkpoint.take(name, (rows, columns), dtype=self.dtype, device=self.device)

    def linear(self, names: Sequence[str], sizes: Sequence[int], columns: int, *, bias: bool) -> Any:
        """Projections from `columns` features, one under another, prepared as a single one for `ops.linear`."""
        weight = self._stack(names, "weight", sizes, (columns,))
        return self.ops.prepare_linear(weight, self._stack(names, "bias", sizes, ()) if bias else None)

    def gated_linear(self, gate: str, up: str, rows: int, columns: int, *, bias: bool) -> Any:
        """Two projections from `columns` to `rows` features, prepared as a single one for `ops.gated_linear`."""
        weight = self._stack((gate, up), "weight", (rows, rows), (columns,))
        return self.ops.prepare_gated_linear(
            weight, self._stack((gate, up), "bias", (rows, rows), ()) if bias else None
        )

    def transposed_linear(self, name: str, columns: int, rows: int) -> Any:
        """A projection from `columns` to `rows` features with a bias, whose weight is stored as [columns, rows]."""
        weight = self.matrix(f"{name}.weight", columns, rows).t().contiguous()
        return self.ops.prepare_linear(weight, self.vector(f"{name}.bias", rows))

    def _stack(self, names: Sequence[str], part: str, sizes: Sequence[int], tail: Sequence[int]) -> torch.Tensor:
        full_names = [f"{name}.{part}" for name in names]
        return self.checkpoint.stack(full_names, sizes, tail, dtype=self.dtype, device=self.device)

    def embedding_and_head(self, name: str, vocab_size: int, width: int, *, tied: bool) -> tuple[Embedding, Any]:
        """The token embedding [vocab_size, width] called `name`, and the prepared projection to the vocabulary.

        Where they are the same, the projection's weight is all that is kept. A checkpoint with a tied head may hold
        either of the two or both. Where it holds both and they differ, they were not tied after all (transformers
        decides alike).
        """
        if tied and name not in self.checkpoint and _HEAD in self.checkpoint:
            name = _HEAD
        embedding = self.matrix(name, vocab_size, width)
        if name != _HEAD and (not tied or _HEAD in self.checkpoint):
            separate = self.matrix(_HEAD, vocab_size, width)
            if not tied or not torch.equal(separate, embedding):
                return partial(embedding.index_select, 0), self.ops.prepare_linear(separate, None)
        head = self.ops.prepare_linear(embedding, None)
        return lambda token_ids: self.ops.embedding(token_ids, head).to(self.dtype), head
