"""A GGUF file of a tiny model, as llama.cpp's converter would write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file
from transformers import AutoConfig

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Every kind that occurs side by side in real files and that gguf can write.
_KINDS = ("Q8_0", "Q4_1", "F16", "Q4_0", "F32", "Q5_0")


def write_gguf(
    folder: Path,
    path: Path,
    *,
    quantised: bool = True,
    tokenizer: bool = True,
    rope_freqs: np.ndarray[Any, Any] | None = None,
    fields: dict[str, int] | None = None,
) -> Path:
    """Write the Llama, Qwen2 or Qwen3 saved in `folder` to `path`; `fields` are further metadata."""
    config = AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if config.model_type == "llama":
        writer.add_rope_dimension_count(head_dim)
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_vocab_size(config.vocab_size)
    for name, value in (fields or {}).items():
        writer.add_uint32(name, value)
    if tokenizer:
        _add_tokenizer(writer, config.vocab_size)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for index, (name, weights) in enumerate(sorted(load_file(folder / "model.safetensors").items())):
        projection = name.split(".")[-2]
        if projection in heads and config.model_type == "llama":
            weights = _permute(weights, heads[projection])
        kind = gguf.GGMLQuantizationType[_KINDS[index % len(_KINDS)] if quantised and weights.ndim > 1 else "F32"]
        writer.add_tensor(_gguf_name(name), gguf.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    stem, _, part = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, inside = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[inside]}.{part}"
    return f"{_NAMES[stem]}.{part}"


def _permute(weights: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(chr(code) for code in range(33, 127)), "ab"]
    tokens += [f"<extra_{number}>" for number in range(vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
