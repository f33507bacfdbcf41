"""What the runner asks of a model, and what models are built with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from pagemill.engine.errors import ConfigError
from pagemill.engine.models.spec import ModelSpec
from pagemill.engine.quantization import Scheme
from pagemill.engine.weights import Checkpoint
from pagemill.kernels.decoder import CompiledDecoder
from pagemill.kernels.layout import LayerKV
from pagemill.kernels.metadata import AttentionMetadata
from pagemill.kernels.ops import Ops, PreparedLinear
from pagemill.kernels.quantised_weight import QuantisedWeight, can_quantise, quantise

_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token ids int64 [T] -> [T, hidden_size] of `dtype`, from a prepared table."""

    table: Any
    ops: Ops
    dtype: torch.dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.ops.embedding(token_ids, self.table).to(self.dtype)


class Model(Protocol):
    """A decoder over a paged KV pool. Tensors lie on the device the model was loaded to."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def compiled(self) -> CompiledDecoder | None:
        """The whole of it as a single call, where the back end has that for such a model."""
        ...

    def forward(
        self, token_ids: torch.Tensor, meta: AttentionMetadata, kv: Sequence[LayerKV], rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute one step's tokens, int64 [T], writing their keys and values into the pool.

        `kv` has one entry per layer, or `ModelSpec.typical_layers`: then only these run. Returns the final hidden
        state, [R, hidden_size], of the tokens `rows`, int64 [R], of the batch: only these go on to `logits`.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [R, vocab_size] of hidden states [R, hidden_size]."""
        ...


@dataclass(frozen=True, slots=True)
class Loading:
    """Where the weights come from and where they go: a checkpoint, the kernels, a dtype and a device; and whether
    projections, embedding and head are quantised."""

    checkpoint: Checkpoint
    ops: Ops
    dtype: torch.dtype
    device: str
    quantization: Scheme = "none"
    loaded: Counter[str] = field(default_factory=Counter)
    """Bytes of what has been loaded, by form: a dtype, 4-bit or 8-bit."""

    def vector(self, name: str, size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A weight [size]."""
        return self._counted(self.checkpoint.take(name, (size,), dtype=dtype or self.dtype, device=self.device))

    def matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """A weight [rows, columns]."""
        return self._counted(self.checkpoint.take(name, (rows, columns), dtype=self.dtype, device=self.device))

    def _counted(self, tensor: torch.Tensor) -> torch.Tensor:
        self._count(tensor.dtype, tensor.numel())
        return tensor

    def _count(self, dtype: torch.dtype, elements: int) -> None:
        self.loaded[str(dtype).removeprefix("torch.")] += elements * dtype.itemsize

    def _prepared(
        self, weight: QuantisedWeight, bias: torch.Tensor | None = None, *, gated: bool = False
    ) -> PreparedLinear:
        self.loaded[f"{weight.bits}-bit"] += weight.num_bytes
        return self.ops.prepare_quantised(weight, bias, self.dtype, gated=gated)

    def linear(self, names: Sequence[str], sizes: Sequence[int], columns: int, *, bias: bool) -> Any:
        """Projections from `columns` features, one under another, prepared as a single one for `ops.linear`."""
        return self._projection(names, sizes, columns, bias=bias, gated=False)

    def gated_linear(self, gate: str, up: str, rows: int, columns: int, *, bias: bool) -> Any:
        """Two projections from `columns` to `rows` features, prepared as a single one for `ops.gated_linear`."""
        return self._projection((gate, up), (rows, rows), columns, bias=bias, gated=True)

    def _projection(
        self, names: Sequence[str], sizes: Sequence[int], columns: int, *, bias: bool, gated: bool
    ) -> PreparedLinear:
        added = self._stack(names, "bias", sizes, ()) if bias else None
        quantised = self._quantised([f"{name}.weight" for name in names], sizes, columns)
        if quantised is not None:
            return self._prepared(quantised, added, gated=gated)
        return self._packed([f"{name}.weight" for name in names], sizes, columns, added, gated=gated)

    def _packed(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        columns: int,
        bias: torch.Tensor | None = None,
        *,
        gated: bool = False,
    ) -> PreparedLinear:
        """Matrices one under another that are not quantised, by way of a tensor of them all where the back end wants
        that."""
        stored = self.checkpoint.parts(names, sizes, (columns,))
        prepared = self.ops.prepare_stored(stored, bias, self.dtype, gated=gated)
        if prepared is not None:
            self._count(self.dtype, sum(sizes) * columns)
            return prepared
        weight = self.checkpoint.stack(names, sizes, (columns,), dtype=self.dtype, device=self.device)
        self._count(weight.dtype, weight.numel())
        return (self.ops.prepare_gated_linear if gated else self.ops.prepare_linear)(weight, bias)

    def transposed_linear(self, name: str, columns: int, rows: int) -> Any:
        """A projection from `columns` to `rows` features with a bias, whose weight is stored as [columns, rows]."""
        added = self.vector(f"{name}.bias", rows)
        if self._bits is not None and can_quantise(columns):
            exact = self.checkpoint.take(f"{name}.weight", (columns, rows), dtype=torch.float32, device="cpu")
            return self._prepared(self._rounded(exact.t().contiguous(), name, self._bits), added)
        weight = self.matrix(f"{name}.weight", columns, rows).t().contiguous()
        return self.ops.prepare_linear(weight, added)

    @property
    def _bits(self) -> int | None:
        """Of the weights that are quantised here; None where none are."""
        return {"int8": 8, "int4": 4}.get(self.quantization)

    def _quantised(
        self, names: Sequence[str], sizes: Sequence[int], columns: int, bits: int | None = None
    ) -> QuantisedWeight | None:
        """Matrices one under another as they are stored, or rounded to `bits` (default: the scheme's); None where they
        are not to be quantised, or cannot be."""
        if self.quantization == "gguf":
            return self.checkpoint.stack_quantised(names, sizes, columns)
        bits = bits or self._bits
        if bits is None or not can_quantise(columns):
            return None
        exact = self.checkpoint.stack(names, sizes, (columns,), dtype=torch.float32, device="cpu")
        return self._rounded(exact, names[0], bits)

    def _rounded(self, weight: torch.Tensor, name: str, bits: int) -> QuantisedWeight:
        if not weight.isfinite().all():
            raise ConfigError(f"weight {name} holds what is no finite number, which {self.quantization} cannot round")
        return quantise(weight.numpy(), bits)

    def _stack(self, names: Sequence[str], part: str, sizes: Sequence[int], tail: Sequence[int]) -> torch.Tensor:
        full_names = [f"{name}.{part}" for name in names]
        return self._counted(self.checkpoint.stack(full_names, sizes, tail, dtype=self.dtype, device=self.device))

    def embedding_and_head(self, name: str, vocab_size: int, width: int, *, tied: bool) -> tuple[Embedding, Any]:
        """The token embedding [vocab_size, width] called `name`, and the prepared projection to the vocabulary.

        Where they are the same, the projection's weight is all that is kept. A checkpoint with a tied head may hold
        either of the two or both. Where it holds both and they differ, they were not tied after all (transformers
        decides alike).
        """
        if tied and name not in self.checkpoint and _HEAD in self.checkpoint:
            name = _HEAD
        separate = name != _HEAD and (not tied or _HEAD in self.checkpoint)
        if separate and tied:
            one, other = (
                self.checkpoint.take(each, (vocab_size, width), dtype=self.dtype, device=self.device)
                for each in (_HEAD, name)
            )
            separate = not torch.equal(one, other)
        table = self._table(name, vocab_size, width)
        head = self._table(_HEAD, vocab_size, width) if separate else table
        return Embedding(table, self.ops, self.dtype), head

    def _table(self, name: str, vocab_size: int, width: int) -> PreparedLinear:
        """An embedding or a head. Rounded ones have 8 bits: every token's logits are only as good as they are."""
        quantised = self._quantised((name,), (vocab_size,), width, None if self._bits is None else 8)
        if quantised is not None:
            return self._prepared(quantised)
        return self._packed((name,), (vocab_size,), width)
