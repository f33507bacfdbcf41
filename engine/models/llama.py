"""The Llama family: Llama, SmolLM2, TinyLlama, Mistral. RMS norm, rotary positions, grouped queries, gated SiLU.

Query, key and value projections are one matrix, gate and up projections another. The residual stream is float32 also
for 16-bit weights: rounding it after every layer costs more accuracy than all other roundings together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagemill.engine.loader import ModelFolder
from pagemill.engine.models.base import Loading
from pagemill.engine.models.rope import cos_sin_table, inverse_frequencies
from pagemill.engine.models.spec import ConfigReader, ModelSpec, eos_within
from pagemill.kernels.layout import LayerKV
from pagemill.kernels.metadata import AttentionMetadata

# Old checkpoints store the rotary frequencies, which follow from the configuration.
_DERIVED = r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
_ROPE_DIVISORS = "rope_freqs.weight"  # left in a converted GGUF by Llama 3's rope scaling


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Any
    output: Any
    post_norm: torch.Tensor
    gate_up: Any
    down: Any


class LlamaModel:
    """`LlamaForCausalLM` and `MistralForCausalLM`. Raises `ConfigError` on a configuration that it cannot follow."""

    def __init__(self, folder: ModelFolder, loading: Loading, max_model_len: int | None = None) -> None:
        config = ConfigReader(folder)
        mistral = folder.architecture == "MistralForCausalLM"
        hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
        kv_heads = config.size("num_key_value_heads", heads)
        head_dim = config.size("head_dim", max(1, hidden // heads))
        if heads % kv_heads:
            raise config.error(f"{heads} heads cannot share {kv_heads} key/value heads")
        if head_dim % 2:
            raise config.error(f"head_dim must be even for rotary positions, got {head_dim}")
        config.one_of("hidden_act", ("silu", "swish"), "silu")
        longest = config.size("max_position_embeddings", 131072 if mistral else 2048)
        self.spec = ModelSpec(
            architecture=folder.architecture,
            num_layers=config.size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            hidden_size=hidden,
            vocab_size=config.size("vocab_size"),
            max_model_len=config.max_model_len(max_model_len, longest),
            eos_token_ids=eos_within(folder, config.size("vocab_size")),
            sliding_window=config.size("sliding_window") if mistral and folder.config.get("sliding_window") else None,
        )
        self._eps = config.number("rms_norm_eps", 1e-6)
        self._scale = head_dim**-0.5
        self._ops = loading.ops
        self._load(config, loading, longest)

    def _load(self, config: ConfigReader, loading: Loading, longest: int) -> None:
        spec, checkpoint = self.spec, loading.checkpoint
        hidden, inner = spec.hidden_size, config.size("intermediate_size")
        query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        attention_bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
        frequencies = inverse_frequencies(config, spec.head_dim, longest)
        if _ROPE_DIVISORS in checkpoint:
            frequencies /= checkpoint.take(_ROPE_DIVISORS, frequencies.shape, dtype=torch.float32, device="cpu")
        self._cos_sin = cos_sin_table(frequencies, spec.max_model_len, loading.device)
        self._embedding, self._head = loading.embedding_and_head(
            "embed_tokens.weight", spec.vocab_size, hidden, tied=config.flag("tie_word_embeddings", False)
        )
        self._layers = []
        for index in range(spec.num_layers):
            at, attn, mlp = f"layers.{index}", f"layers.{index}.self_attn", f"layers.{index}.mlp"
            projections = (f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj")
            self._layers.append(
                _Layer(
                    loading.vector(f"{at}.input_layernorm.weight", hidden),
                    loading.linear(projections, (query, key, key), hidden, bias=attention_bias),
                    loading.linear((f"{attn}.o_proj",), (hidden,), query, bias=attention_bias),
                    loading.vector(f"{at}.post_attention_layernorm.weight", hidden),
                    loading.linear((f"{mlp}.gate_proj", f"{mlp}.up_proj"), (inner, inner), hidden, bias=mlp_bias),
                    loading.linear((f"{mlp}.down_proj",), (hidden,), inner, bias=mlp_bias),
                )
            )
        self._norm = loading.vector("norm.weight", hidden)
        checkpoint.ignore(_DERIVED)
        checkpoint.finish()

    def forward(
        self, token_ids: torch.Tensor, meta: AttentionMetadata, kv: Sequence[LayerKV], rows: torch.Tensor
    ) -> torch.Tensor:
        spec, ops = self.spec, self._ops
        widths = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim]
        x = self._embedding.index_select(0, token_ids)
        residual = x.float()
        x = ops.rms_norm(x, self._layers[0].input_norm, self._eps)
        for index, layer in enumerate(self._layers):
            q, k, v = torch.split(ops.linear(x, layer.qkv), widths, dim=-1)
            q, k, v = (part.view(len(part), -1, spec.head_dim) for part in (q, k, v))
            ops.rotary_embedding(q, k, meta.positions, self._cos_sin)
            ops.write_kv(k, v, kv[index], meta.slot_mapping)
            last = index == spec.num_layers - 1
            if last and not len(rows):
                return x[:0]
            x = ops.paged_attention(q, kv[index], meta, scale=self._scale, sliding_window=spec.sliding_window or 0)
            x = x.flatten(1)
            if last:
                # Nothing attends to what the last layer makes of the other tokens.
                x, residual = x.index_select(0, rows), residual.index_select(0, rows)
            x = ops.linear(x, layer.output)
            x, residual = ops.add_rms_norm(x, residual, layer.post_norm, self._eps)
            x = ops.linear(ops.silu_and_mul(ops.linear(x, layer.gate_up)), layer.down)
            following = self._norm if last else self._layers[index + 1].input_norm
            x, residual = ops.add_rms_norm(x, residual, following, self._eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._ops.linear(hidden, self._head).float()
