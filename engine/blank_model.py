"""A small Llama without knowledge: for whoever needs a model's shape and not its words, such as compiling kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_HIDDEN, _INNER, _HEADS, _KV_HEADS, _VOCAB = 192, 256, 6, 2, 512
_HEAD_DIM = _HIDDEN // _HEADS


def write_blank_llama(folder: Path) -> None:
    """Write config.json and model.safetensors of a Llama of one layer, all weights zero, for 64 positions."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _VOCAB,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    layer = {
        "input_layernorm": (_HIDDEN,),
        "self_attn.q_proj": (_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.k_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.v_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD_DIM),
        "post_attention_layernorm": (_HIDDEN,),
        "mlp.gate_proj": (_INNER, _HIDDEN),
        "mlp.up_proj": (_INNER, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INNER),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (_VOCAB, _HIDDEN), "norm": (_HIDDEN,)}
    shapes |= {f"layers.0.{name}": shape for name, shape in layer.items()}
    save_file(
        {f"model.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()},
        str(folder / "model.safetensors"),
    )
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
