"""OPT: learned positions, layer norm before (or, in the 350m, after) attention and feed-forward, biases, ReLU.

The residual stream and the layer norms are float32 also for 16-bit weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from pagemill.engine.loader import ModelFolder
from pagemill.engine.models.base import Loading
from pagemill.engine.models.layer_norm import LayerNorm
from pagemill.engine.models.layer_norm_blocks import LayerNormBlock, LayerNormBlocks
from pagemill.engine.models.spec import ConfigReader, ModelSpec, eos_within
from pagemill.kernels.layout import LayerKV
from pagemill.kernels.metadata import AttentionMetadata

_IGNORED = r"decoder\.version"  # left in by fairseq, from which the first checkpoints were converted
_POSITION_OFFSET = 2  # the first rows of the position table belong to padding


class OPTModel:
    """`OPTForCausalLM`. Raises `ConfigError` on a configuration that it cannot follow."""

    compiled = None

    def __init__(self, folder: ModelFolder, loading: Loading, max_model_len: int | None = None) -> None:
        config = ConfigReader(folder)
        hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
        if hidden % heads:
            raise config.error(f"hidden_size {hidden} is not a multiple of {heads} heads")
        self._positions = config.size("max_position_embeddings", 2048)
        self.spec = ModelSpec(
            architecture=folder.architecture,
            num_layers=config.size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            hidden_size=hidden,
            vocab_size=config.size("vocab_size"),
            max_model_len=config.max_model_len(max_model_len, self._positions),
            eos_token_ids=eos_within(folder, config.size("vocab_size")),
        )
        self._dtype = loading.dtype
        self._ops = loading.ops
        self._load(config, loading)

    def _load(self, config: ConfigReader, loading: Loading) -> None:
        spec = self.spec
        hidden, inner = spec.hidden_size, config.size("ffn_dim")
        width = config.size("word_embed_proj_dim", hidden)
        bias, affine = config.flag("enable_bias", True), config.flag("layer_norm_elementwise_affine", True)
        norm_first = config.flag("do_layer_norm_before", True)
        self._embedding, self._head = loading.embedding_and_head(
            "decoder.embed_tokens.weight", spec.vocab_size, width, tied=config.flag("tie_word_embeddings", True)
        )
        table = loading.matrix("decoder.embed_positions.weight", self._positions + _POSITION_OFFSET, hidden)
        self._position_embedding = table[_POSITION_OFFSET:]
        self._project_in = self._project_out = None
        if width != hidden:
            self._project_in = loading.linear(("decoder.project_in",), (hidden,), width, bias=False)
            self._project_out = loading.linear(("decoder.project_out",), (width,), hidden, bias=False)
        layers = []
        for index in range(spec.num_layers):
            at, attn = f"decoder.layers.{index}", f"decoder.layers.{index}.self_attn"
            projections = (f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj")
            layers.append(
                LayerNormBlock(
                    LayerNorm(loading, f"{at}.self_attn_layer_norm", hidden, affine=affine),
                    loading.linear(projections, (hidden, hidden, hidden), hidden, bias=bias),
                    loading.linear((f"{attn}.out_proj",), (hidden,), hidden, bias=bias),
                    LayerNorm(loading, f"{at}.final_layer_norm", hidden, affine=affine),
                    loading.linear((f"{at}.fc1",), (inner,), hidden, bias=bias),
                    loading.linear((f"{at}.fc2",), (hidden,), inner, bias=bias),
                    scale=spec.head_dim**-0.5,
                )
            )
        gelu = config.one_of("activation_function", ("relu", "gelu"), "relu") == "gelu"
        self._blocks = LayerNormBlocks(
            layers,
            spec.num_heads,
            functional.gelu if gelu else functional.relu,
            loading.dtype,
            loading.ops,
            norm_first=norm_first,
        )
        self._final_norm = None
        if norm_first and not config.flag("_remove_final_layer_norm", False):
            self._final_norm = LayerNorm(loading, "decoder.final_layer_norm", hidden, affine=affine)
        loading.checkpoint.ignore(_IGNORED)
        loading.checkpoint.finish()

    def forward(
        self, token_ids: torch.Tensor, meta: AttentionMetadata, kv: Sequence[LayerKV], rows: torch.Tensor
    ) -> torch.Tensor:
        ops = self._ops
        x = self._embedding(token_ids)
        if self._project_in is not None:
            x = ops.linear(x, self._project_in)
        residual = x.float() + self._position_embedding.index_select(0, meta.positions)
        residual = self._blocks.forward(residual, meta, kv, rows)
        hidden = (residual if self._final_norm is None else self._final_norm(residual)).to(self._dtype)
        return hidden if self._project_out is None else ops.linear(hidden, self._project_out)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._ops.logits(hidden, self._head)
