"""Random-weight models small enough to run in milliseconds, saved as transformers saves them, and naive schedules."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from pagemill.engine.logit_rules import LogitRules
from pagemill.engine.model_runner import ModelRunner
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduler_output import ScheduledSequence, SchedulerOutput

VOCAB = 320
LONGEST = 128


def _llama(**changes: Any) -> PreTrainedConfig:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LONGEST,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return LlamaConfig(**shape | changes)


def _as(kind: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    """The tiny Llama's shape as another member of its family."""
    fields = _llama().to_dict()
    for name in ("model_type", "architectures", "attention_bias", "mlp_bias", "pretraining_tp", "head_dim"):
        fields.pop(name, None)
    return kind(**fields | changes)


def _mistral(**changes: Any) -> PreTrainedConfig:
    return _as(MistralConfig, **changes)


def _opt(**changes: Any) -> PreTrainedConfig:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 64,
        "max_position_embeddings": LONGEST,
        "init_std": 0.15,
        "pad_token_id": 1,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return OPTConfig(**shape | changes)


def _gpt2(**changes: Any) -> PreTrainedConfig:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": LONGEST,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return GPT2Config(**shape | changes)


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama-gqa": _llama,
    "llama-mha-tied": lambda: _llama(num_key_value_heads=4, tie_word_embeddings=True),
    "llama-wide-heads-biased": lambda: _llama(head_dim=32, attention_bias=True, mlp_bias=True),
    "llama-one-kv-head": lambda: _llama(num_key_value_heads=1, rms_norm_eps=1e-5),
    "llama3-rope": lambda: _llama(rope_parameters=dict(LLAMA3_ROPE)),
    "llama-dynamic-rope": lambda: _llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 5e3, "factor": 2.0}),
    "llama-linear-rope": lambda: _llama(rope_parameters={"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0}),
    "mistral-window": lambda: _mistral(sliding_window=8, head_dim=16),
    "mistral-no-window": lambda: _mistral(sliding_window=None, head_dim=24),
    "qwen2": lambda: _as(Qwen2Config),
    "qwen2-tied-some-windows": lambda: _as(
        Qwen2Config, tie_word_embeddings=True, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "qwen3": lambda: _as(Qwen3Config, head_dim=24),
    "smollm3": lambda: _as(SmolLM3Config, no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=12),
    "gpt2": _gpt2,
    "gpt2-untied-scaled": lambda: _gpt2(
        tie_word_embeddings=False, n_inner=96, activation_function="gelu", scale_attn_by_inverse_layer_idx=True
    ),
    "opt-norm-before": _opt,
    "opt-norm-after-projected": lambda: _opt(do_layer_norm_before=False, word_embed_proj_dim=32),
    "opt-bare": lambda: _opt(enable_bias=False, layer_norm_elementwise_affine=False, activation_function="gelu"),
}


def save_model(config: PreTrainedConfig, folder: Path, **kwargs: Any) -> Path:
    """A model of this shape with random weights; biases and norms are random too, so that none goes unnoticed."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, **kwargs)
    return folder


def generated_by_transformers(folder: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy continuations in float32, one prompt at a time: the truth that the engine is held against."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    results = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, pad_token_id=0
        )
        results.append(output[0, len(prompt) :].tolist())
    return results


@dataclass
class Driver:
    """Drives a runner without a scheduler. Blocks are handed out in random order: none is where a bug expects it."""

    runner: ModelRunner
    steps: int = 0

    def __post_init__(self) -> None:
        self._free = list(range(1, self.runner.num_blocks))
        random.Random(5).shuffle(self._free)

    def request(self, prompt: list[int], params: SamplingParams, seed: int = 0) -> Request:
        spec = self.runner.spec
        rules = LogitRules.of(params, spec.vocab_size, spec.eos_token_ids)
        return Request("r", list(prompt), params, seed=seed, max_tokens=1 << 20, rules=rules)

    def blocks(self, tokens: int) -> list[int]:
        """Blocks for so many tokens, taken for good."""
        return [self._free.pop() for _ in range(-(-tokens // self.runner.block_size))]

    def step(self, *scheduled: ScheduledSequence) -> list[int]:
        self.steps += 1
        total = sum(item.num_tokens for item in scheduled)
        result = self.runner.execute(SchedulerOutput(self.steps, list(scheduled), num_tokens=total))
        return result.drawn or [token_id for drawn in result.sampled for token_id in drawn.tokens]

    def chunks(self, request: Request, block_ids: list[int], start: int, size: int) -> Iterator[ScheduledSequence]:
        """What is known of the request from `start` on, `size` tokens at a time; only the last chunk samples."""
        while start < request.num_tokens:
            count = min(size, request.num_tokens - start)
            yield ScheduledSequence(request, start, count, block_ids, start + count == request.num_tokens)
            start += count

    def generate(
        self,
        prompt: list[int],
        new_tokens: int,
        *,
        chunk: int = 1 << 20,
        params: SamplingParams | None = None,
        seed: int = 0,
    ) -> list[int]:
        """Prefill in chunks, then decode one token at a time; the blocks go back afterwards."""
        request = self.request(prompt, params or SamplingParams(temperature=0.0), seed)
        block_ids = self.blocks(len(prompt) + new_tokens)
        computed = 0
        for _ in range(new_tokens):
            for item in self.chunks(request, block_ids, computed, chunk):
                sampled = self.step(item)
                assert len(sampled) == item.samples
            computed = request.num_tokens
            request.output_token_ids += sampled
        self._free += block_ids
        return request.output_token_ids
