"""The definition of right: every operation in plain torch and NumPy, gathered and in float64, without cleverness.

The other back ends are tested against this one.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pagemill.kernels.decoder import DecoderStack
from pagemill.kernels.layout import KVForm, LayerKV
from pagemill.kernels.metadata import AttentionMetadata
from pagemill.kernels.ops import LogitEdits, SampleBatch, TopLogprobs
from pagemill.kernels.quantised_weight import QuantisedWeight
from pagemill.kernels.rng import gumbel, token_bits


@dataclass(frozen=True, slots=True)
class ReferenceLinear:
    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]


class ReferenceOps:
    """`Ops` on whatever device the tensors are on. It reads both orders of the pool."""

    name = "reference"

    def __init__(self, kv_form: KVForm = "k_major") -> None:
        self.kv_form: KVForm = kv_form

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    def step(self, tokens: int) -> AbstractContextManager[None]:
        return nullcontext()

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv: LayerKV, slot_mapping: torch.Tensor) -> None:
        kept = (slot_mapping >= 0) & (slot_mapping < kv.num_blocks * kv.block_size)
        kv.scatter(slot_mapping[kept], key[kept], value[kept])

    def paged_attention(
        self, query: torch.Tensor, kv: LayerKV, meta: AttentionMetadata, *, scale: float, sliding_window: int = 0
    ) -> torch.Tensor:
        out = torch.zeros_like(query)
        group = query.shape[1] // kv.num_kv_heads
        starts = meta.host.query_start.tolist()
        for sequence, seq_len in enumerate(meta.host.seq_lens.tolist()):
            begin, end = starts[sequence], starts[sequence + 1]
            if begin == end:
                continue
            blocks = -(-seq_len // kv.block_size)
            k, v = kv.gather(meta.block_tables[sequence, :blocks].long())
            k = k[:seq_len].double().repeat_interleave(group, dim=1)
            v = v[:seq_len].double().repeat_interleave(group, dim=1)
            scores = torch.einsum("qhd,khd->hqk", query[begin:end].double(), k) * scale
            query_at = torch.arange(seq_len - (end - begin), seq_len, device=query.device)[:, None]
            key_at = torch.arange(seq_len, device=query.device)[None, :]
            visible = key_at <= query_at
            if sliding_window > 0:
                visible &= query_at - key_at < sliding_window
            weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
            out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        exact = x.double()
        norm = exact * torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + eps)
        return (norm * weight.double()).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = (x.double() + residual.double()).to(residual.dtype)
        exact = total.double()
        norm = exact * torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + eps)
        return (norm * weight.double()).to(x.dtype), total

    def rotary_embedding(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> None:
        cos, sin = cos_sin[positions].double().unsqueeze(1).chunk(2, dim=-1)
        for heads in (query, key):
            first, second = heads.double().chunk(2, dim=-1)
            heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.double().chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> ReferenceLinear:
        return ReferenceLinear(weight, bias)

    def linear(self, x: torch.Tensor, prepared: ReferenceLinear) -> torch.Tensor:
        bias = None if prepared.bias is None else prepared.bias.double()
        return torch.nn.functional.linear(x.double(), prepared.weight.double(), bias).to(x.dtype)

    def prepare_gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> ReferenceLinear:
        return ReferenceLinear(weight, bias)

    def prepare_stored(
        self, parts: Iterable[torch.Tensor], bias: torch.Tensor | None, dtype: torch.dtype, *, gated: bool = False
    ) -> None:
        return None

    def prepare_quantised(
        self, weight: QuantisedWeight, bias: torch.Tensor | None, dtype: torch.dtype, *, gated: bool = False
    ) -> ReferenceLinear:
        return ReferenceLinear(torch.from_numpy(weight.dequantise()), bias)

    def gated_linear(self, x: torch.Tensor, prepared: ReferenceLinear) -> torch.Tensor:
        return self.silu_and_mul(self.linear(x.double(), prepared)).to(x.dtype)

    def logits(self, hidden: torch.Tensor, prepared: ReferenceLinear) -> torch.Tensor:
        return self.linear(hidden.double(), prepared).float()

    def embedding(self, token_ids: torch.Tensor, prepared: ReferenceLinear) -> torch.Tensor:
        return prepared.weight.index_select(0, token_ids)

    def compile_decoder(self, stack: DecoderStack, dtype: torch.dtype) -> None:
        return None

    def copy_blocks(self, pool: torch.Tensor, pairs: torch.Tensor) -> None:
        pool[:, pairs[:, 1]] = pool[:, pairs[:, 0]]

    def edit_logits(self, logits: torch.Tensor, edits: LogitEdits) -> None:
        rows, vocab_size = logits.shape
        edits.check_fit(rows, vocab_size)
        named = np.concatenate((edits.mask_rows, edits.ban_rows, edits.bias_rows, edits.penalty_rows))
        for index in np.unique(named).tolist():
            row = logits[index].cpu().numpy().copy()
            edit_row(row, edits, index)
            logits[index] = torch.from_numpy(row)

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> TopLogprobs:
        rows, vocab_size = logits.shape
        highest = logits.amax(dim=1, keepdim=True)
        sound = highest.isfinite()  # NaN and both infinities are not
        exact = torch.where(sound, logits.double(), torch.nan)
        logprobs = exact - exact.logsumexp(dim=1, keepdim=True)
        asked = sound[:, 0] & (token_ids >= 0) & (token_ids < vocab_size)
        at = token_ids.clamp(0, vocab_size - 1).unsqueeze(1)
        rank = (logits > logits.gather(1, at)).sum(dim=1) + 1
        listed = min(top, vocab_size)
        ids = torch.full((rows, top), -1, dtype=torch.int64, device=logits.device)
        values = torch.full((rows, top), torch.nan, dtype=torch.float32, device=logits.device)
        best = logits.sort(dim=1, descending=True, stable=True).indices[:, :listed]
        ids[:, :listed] = torch.where(sound, best, -1)
        values[:, :listed] = logprobs.gather(1, best).float()
        return TopLogprobs(
            torch.where(asked, logprobs.gather(1, at).squeeze(1), torch.nan).float(),
            torch.where(asked, rank, 0),
            ids,
            values,
        )

    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        rows = logits.detach().float().cpu().numpy()
        chosen = [sample_row(row, batch, index) for index, row in enumerate(rows)]
        return torch.tensor(chosen, dtype=torch.int64, device=logits.device)


def edit_row(row: npt.NDArray[np.float32], edits: LogitEdits, index: int) -> None:
    """Apply to one row of logits [V], in place, what `edits` say of row `index`."""
    vocab = np.arange(row.size)
    for mask in edits.masks[edits.mask_rows == index]:
        row[(mask[vocab // 32] >> (vocab % 32).astype(np.uint32)) & 1 == 0] = -np.inf
    for token in edits.ban_ids[edits.ban_rows == index].tolist():
        if 0 <= token < row.size:
            row[token] = -np.inf
    biased = edits.bias_rows == index
    for token, bias in zip(edits.bias_ids[biased].tolist(), edits.bias[biased], strict=True):
        if 0 <= token < row.size:
            row[token] += bias
    for entry in np.flatnonzero(edits.penalty_rows == index).tolist():
        repetition, presence = float(edits.repetition[entry]), float(edits.presence[entry])
        listed = slice(edits.starts[entry], edits.starts[entry + 1])
        for token, count in zip(edits.ids[listed].tolist(), edits.counts[listed].tolist(), strict=True):
            if 0 <= token < row.size:
                logit = float(row[token])
                logit = logit / repetition if logit > 0 else logit * repetition
                row[token] = logit - float(edits.frequency[entry]) * count - presence * (count > 0)


def sample_row(row: npt.NDArray[np.float32], batch: SampleBatch, index: int) -> int:
    """The token of one row of logits [V] under entry `index` of the batch; -1 for NaN or a row of -inf."""
    if np.isnan(row).any() or np.max(row) == -np.inf:
        return -1
    temperature = float(batch.temperature[index])
    if temperature == 0.0 or np.max(row) == np.inf:
        return int(np.argmax(row))
    scaled = row.astype(np.float64) / temperature
    top = scaled.max()
    kept = np.isfinite(scaled)
    min_p = float(batch.min_p[index])
    if min_p > 0.0:
        kept &= scaled >= top + np.log(min_p)
    top_k = int(batch.top_k[index])
    if 0 < top_k < kept.sum():
        kept &= scaled >= np.sort(scaled[kept])[-top_k]
    top_p = float(batch.top_p[index])
    if top_p < 1.0:
        descending = np.sort(scaled[kept])[::-1]
        mass = np.cumsum(np.exp(descending - top))
        kept &= scaled >= descending[np.searchsorted(mass, top_p * mass[-1])]
    noise = gumbel(token_bits(int(batch.seed[index]), int(batch.position[index]), int(batch.index[index]), row.size))
    return int(np.argmax(np.where(kept, scaled + noise, -np.inf)))
