"""GPT-2: learned positions, layer norm before attention and feed-forward, biases, GELU, one query-key-value weight.

Its projections are stored the other way round ([in, out], as a convolution of width one). The residual stream and the
layer norms are float32 also for 16-bit weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn import functional

from pagemill.engine.loader import ModelFolder
from pagemill.engine.models.base import Loading
from pagemill.engine.models.layer_norm import LayerNorm
from pagemill.engine.models.layer_norm_blocks import LayerNormBlock, LayerNormBlocks
from pagemill.engine.models.spec import ConfigReader, ModelSpec, eos_within
from pagemill.kernels.layout import LayerKV
from pagemill.kernels.metadata import AttentionMetadata

_MASKS = r"h\.\d+\.attn\.(masked_)?bias"  # causal masks, which old checkpoints hold
_TANH_GELU = partial(functional.gelu, approximate="tanh")
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_new": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "gelu": functional.gelu,
    "relu": functional.relu,
}


class GPT2Model:
    """`GPT2LMHeadModel`. Raises `ConfigError` on a configuration that is not plausible, `UnfollowedError` on one that
    it does not compute."""

    compiled = None

    def __init__(self, folder: ModelFolder, loading: Loading, max_model_len: int | None = None) -> None:
        config = ConfigReader(folder)
        hidden, heads = config.size("n_embd", 768), config.size("n_head", 12)
        if hidden % heads:
            raise config.error(f"n_embd {hidden} is not a multiple of {heads} heads")
        if config.flag("add_cross_attention", False):
            raise config.unfollowed("cross-attention is not supported")
        self._positions = config.size("n_positions", 1024)
        self.spec = ModelSpec(
            architecture=folder.architecture,
            num_layers=config.size("n_layer", 12),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            hidden_size=hidden,
            vocab_size=config.size("vocab_size", 50257),
            max_model_len=config.max_model_len(max_model_len, self._positions),
            eos_token_ids=eos_within(folder, config.size("vocab_size", 50257)),
        )
        self._dtype = loading.dtype
        self._ops = loading.ops
        self._load(config, loading)

    def _load(self, config: ConfigReader, loading: Loading) -> None:
        spec = self.spec
        hidden, eps = spec.hidden_size, config.number("layer_norm_epsilon", 1e-5)
        inner = config.size("n_inner", 4 * hidden)
        scale = spec.head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
        by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
        self._embedding, self._head = loading.embedding_and_head(
            "wte.weight", spec.vocab_size, hidden, tied=config.flag("tie_word_embeddings", True)
        )
        self._position_embedding = loading.matrix("wpe.weight", self._positions, hidden)
        layers = [
            LayerNormBlock(
                attention_norm=LayerNorm(loading, f"h.{index}.ln_1", hidden, eps=eps),
                qkv=loading.transposed_linear(f"h.{index}.attn.c_attn", hidden, 3 * hidden),
                output=loading.transposed_linear(f"h.{index}.attn.c_proj", hidden, hidden),
                feed_forward_norm=LayerNorm(loading, f"h.{index}.ln_2", hidden, eps=eps),
                up=loading.transposed_linear(f"h.{index}.mlp.c_fc", hidden, inner),
                down=loading.transposed_linear(f"h.{index}.mlp.c_proj", inner, hidden),
                scale=scale / (index + 1 if by_layer else 1),
            )
            for index in range(spec.num_layers)
        ]
        activation = _ACTIVATIONS[config.one_of("activation_function", tuple(_ACTIVATIONS), "gelu_new")]
        self._blocks = LayerNormBlocks(layers, spec.num_heads, activation, loading.dtype, loading.ops)
        self._final_norm = LayerNorm(loading, "ln_f", hidden, eps=eps)
        loading.checkpoint.ignore(_MASKS)
        loading.checkpoint.finish()

    def forward(
        self, token_ids: torch.Tensor, meta: AttentionMetadata, kv: Sequence[LayerKV], rows: torch.Tensor
    ) -> torch.Tensor:
        residual = self._embedding(token_ids).float()
        residual = residual + self._position_embedding.index_select(0, meta.positions)
        return self._final_norm(self._blocks.forward(residual, meta, kv, rows)).to(self._dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._ops.logits(hidden, self._head)
