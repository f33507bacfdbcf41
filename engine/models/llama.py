"""The Llama family: Llama, SmolLM2 and 3, TinyLlama, Mistral, Qwen2 and 3. RMS norm, rotary positions, grouped queries,
gated SiLU; `llama_shape` knows how the members differ.

Query, key and value projections are one matrix, gate and up projections another. The residual stream is float32 also
for 16-bit weights: rounding it after every layer costs more accuracy than all other roundings together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagemill.engine.loader import ModelFolder
from pagemill.engine.models.base import Loading
from pagemill.engine.models.llama_shape import read_shape
from pagemill.engine.models.rope import cos_sin_table, inverse_frequencies
from pagemill.engine.models.spec import ConfigReader
from pagemill.kernels.decoder import CompiledDecoder, DecoderLayer, DecoderStack
from pagemill.kernels.layout import LayerKV
from pagemill.kernels.metadata import AttentionMetadata

# Old checkpoints store the rotary frequencies, which follow from the configuration.
_DERIVED = r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
_ROPE_DIVISORS = "rope_freqs.weight"  # left in a converted GGUF by Llama 3's rope scaling


class LlamaModel:
    """A member of the family. Raises `ConfigError` on a configuration that is not plausible, `UnfollowedError` on one
    that it does not compute."""

    def __init__(self, folder: ModelFolder, loading: Loading, max_model_len: int | None = None) -> None:
        self._shape = read_shape(folder, max_model_len)
        self.spec = self._shape.spec
        self._ops = loading.ops
        self._load(ConfigReader(folder), loading)

    def _load(self, config: ConfigReader, loading: Loading) -> None:
        shape, spec, checkpoint = self._shape, self.spec, loading.checkpoint
        hidden, inner = spec.hidden_size, shape.intermediate_size
        query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        frequencies = inverse_frequencies(config, spec.head_dim, shape.longest)
        if _ROPE_DIVISORS in checkpoint:
            frequencies /= checkpoint.take(_ROPE_DIVISORS, frequencies.shape, dtype=torch.float32, device="cpu")
        self._embedding, self._head = loading.embedding_and_head(
            "embed_tokens.weight", spec.vocab_size, hidden, tied=shape.tied
        )
        layers = []
        for index in range(spec.num_layers):
            at, attn, mlp = f"layers.{index}", f"layers.{index}.self_attn", f"layers.{index}.mlp"
            projections = (f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj")
            head_norms = (f"{attn}.q_norm.weight", f"{attn}.k_norm.weight") if shape.head_norm else ()
            layers.append(
                DecoderLayer(
                    input_norm=loading.vector(f"{at}.input_layernorm.weight", hidden),
                    qkv=loading.linear(projections, (query, key, key), hidden, bias=shape.qkv_bias),
                    head_norms=[loading.vector(name, spec.head_dim) for name in head_norms],
                    output=loading.linear((f"{attn}.o_proj",), (hidden,), query, bias=shape.output_bias),
                    post_norm=loading.vector(f"{at}.post_attention_layernorm.weight", hidden),
                    gate_up=loading.gated_linear(
                        f"{mlp}.gate_proj", f"{mlp}.up_proj", inner, hidden, bias=shape.mlp_bias
                    ),
                    down=loading.linear((f"{mlp}.down_proj",), (hidden,), inner, bias=shape.mlp_bias),
                    rotates=shape.rotary[index],
                    window=shape.windows[index],
                )
            )
        self._stack = DecoderStack(
            self._embedding.table,
            layers,
            final_norm=loading.vector("norm.weight", hidden),
            head=self._head,
            cos_sin=cos_sin_table(frequencies, spec.max_model_len, loading.device),
            eps=shape.eps,
            scale=spec.head_dim**-0.5,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
        )
        self.compiled: CompiledDecoder | None = loading.ops.compile_decoder(self._stack, loading.dtype)
        checkpoint.ignore(_DERIVED)
        checkpoint.finish()

    def forward(
        self, token_ids: torch.Tensor, meta: AttentionMetadata, kv: Sequence[LayerKV], rows: torch.Tensor
    ) -> torch.Tensor:
        x = self._embedding(token_ids)
        if self.compiled is not None:
            return self.compiled.forward(x, meta, kv, rows)
        return self._by_operation(x, meta, kv, rows)

    def _by_operation(
        self, x: torch.Tensor, meta: AttentionMetadata, kv: Sequence[LayerKV], rows: torch.Tensor
    ) -> torch.Tensor:
        """`CompiledDecoder.forward` for back ends that have none, and what theirs is compared with."""
        spec, stack, ops = self.spec, self._stack, self._ops
        widths = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim]
        residual = x.float()
        x = ops.rms_norm(x, stack.layers[0].input_norm, stack.eps)
        for index, layer in enumerate(stack.layers[: len(kv)]):
            q, k, v = torch.split(ops.linear(x, layer.qkv), widths, dim=-1)
            q, k, v = (part.view(len(part), -1, spec.head_dim) for part in (q, k, v))
            if layer.head_norms:
                q, k = (self._head_norm(*each) for each in zip((q, k), layer.head_norms, strict=True))
            if layer.rotates:
                ops.rotary_embedding(q, k, meta.positions, stack.cos_sin)
            ops.write_kv(k, v, kv[index], meta.slot_mapping)
            last = index == len(kv) - 1
            if last and not len(rows):
                return x[:0]
            x = ops.paged_attention(q, kv[index], meta, scale=stack.scale, sliding_window=layer.window)
            x = x.flatten(1)
            if last:
                # Nothing attends to what the last layer makes of the other tokens.
                x, residual = x.index_select(0, rows), residual.index_select(0, rows)
            x = ops.linear(x, layer.output)
            x, residual = ops.add_rms_norm(x, residual, layer.post_norm, stack.eps)
            x = ops.linear(ops.gated_linear(x, layer.gate_up), layer.down)
            following = stack.final_norm if last else stack.layers[index + 1].input_norm
            x, residual = ops.add_rms_norm(x, residual, following, stack.eps)
        return x

    def _head_norm(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Norm of each head of [T, heads, head_dim]."""
        flat = self._ops.rms_norm(heads.reshape(-1, self.spec.head_dim), weight, self._shape.eps)
        return flat.view(heads.shape)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._ops.logits(hidden, self._head)
