"""Tiny configurations of the decoders of transformers that are served without a native model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.engine.tiny_models import LONGEST, VOCAB

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}


def tiny(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The tiny shape as a model of this type; None leaves a field to its default."""
    kind = CONFIG_MAPPING[model_type]
    known = kind().to_dict().keys() | getattr(kind, "attribute_map", {}).keys()
    return kind(**{name: value for name, value in _SIZES.items() if name in known} | changes)


GENERIC: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma": lambda: tiny("gemma", head_dim=24),
    "gemma2": lambda: tiny(
        "gemma2",
        head_dim=16,
        sliding_window=8,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3_text": lambda: tiny("gemma3_text", head_dim=16, sliding_window=8, num_hidden_layers=3),
    "gpt_neox": lambda: tiny("gpt_neox", rotary_pct=0.25),
    "gpt_oss": lambda: tiny("gpt_oss", head_dim=16, sliding_window=8, num_local_experts=4),
    "phi": lambda: tiny("phi", partial_rotary_factor=0.5),
    "phi3": lambda: tiny("phi3", sliding_window=12),
    "phi3-longrope": lambda: tiny(
        "phi3",
        original_max_position_embeddings=80,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0 + number / 8 for number in range(8)],
            "long_factor": [3.0 + number for number in range(8)],
        },
    ),
    "stablelm": lambda: tiny("stablelm", hidden_size=80, use_qkv_bias=True, partial_rotary_factor=0.4),
    "olmo2": lambda: tiny("olmo2"),
    "cohere": lambda: tiny("cohere", logit_scale=0.25),
    "starcoder2": lambda: tiny("starcoder2"),
    "granite": lambda: tiny("granite", embedding_multiplier=3.0, residual_multiplier=0.7, logits_scaling=4.0),
    "gptj": lambda: tiny("gptj", rotary_dim=8),
    "mixtral": lambda: tiny("mixtral", num_local_experts=4),
    "qwen3_moe": lambda: tiny("qwen3_moe", head_dim=20, num_experts=4, **_EXPERTS),
    "deepseek_v3": lambda: tiny(
        "deepseek_v3",
        num_key_value_heads=4,
        head_dim=8,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        **_EXPERTS,
    ),
}
