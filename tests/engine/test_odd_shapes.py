"""Shapes that no checkpoint has yet: widths that fit no vector, tile or word, one head or many, tiny and long blocks.

Weights are random, so a model is a sum over every element: one that is left out or counted twice changes the answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from pagemill.engine.llm import LLM
from pagemill.engine.outputs import CompletionOutput
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.tiny_models import save_model

NEW_TOKENS = 10
LONGEST = 160


def _shape(kind: Callable[..., PreTrainedConfig], **fields: Any) -> PreTrainedConfig:
    common = {
        "max_position_embeddings": LONGEST,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return kind(**common | fields)


def _sizes(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int
) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


SHAPES: dict[str, tuple[PreTrainedConfig, int]] = {  # with a block size
    # Odd widths are multiplied in float32 also in bfloat16, operation by operation.
    "odd hidden, one key head with a norm": (_shape(Qwen3Config, **_sizes(1021, 127, 130, 2, 2, 1, 34)), 24),
    "odd inner, one key head with a norm": (_shape(Qwen3Config, **_sizes(320, 64, 257, 2, 7, 1, 128)), 16),
    "odd everything, biased": (
        _shape(LlamaConfig, attention_bias=True, mlp_bias=True, **_sizes(33, 63, 31, 2, 3, 3, 18)),
        8,
    ),
    "one inner feature": (_shape(LlamaConfig, tie_word_embeddings=True, **_sizes(17, 96, 1, 1, 8, 8, 80)), 256),
    "thirty-two heads on one": (_shape(LlamaConfig, **_sizes(50257, 96, 47, 1, 32, 1, 48)), 64),
    "widest heads, window of one": (_shape(MistralConfig, sliding_window=1, **_sizes(320, 100, 97, 2, 3, 1, 256)), 32),
    "seven on one, biased, windows above": (
        _shape(
            Qwen2Config,
            use_sliding_window=True,
            sliding_window=7,
            max_window_layers=1,
            **_sizes(32003, 130, 49, 2, 14, 2, 112),
        ),
        128,
    ),
    "narrowest heads": (_shape(Qwen3Config, **_sizes(1000, 33, 95, 3, 6, 2, 4)), 16),
}


def _prompts(vocab: int) -> list[list[int]]:
    rng = random.Random(vocab)
    first, *others = ([rng.randrange(vocab) for _ in range(length)] for length in (70, 1, 16, 45))
    return [first, first[:40] + others[2], *others]  # two begin alike


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_log_probabilities_are_those_of_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    config, block_size = SHAPES[name]
    path = save_model(config, tmp_path)
    prompts = _prompts(config.vocab_size)
    llm = LLM(
        path,
        dtype=dtype,
        device="cpu",
        threads=2,
        skip_tokenizer_init=True,
        num_blocks_override=640 // block_size + 10,
        max_num_batched_tokens=37,
        block_size=block_size,
    )
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    answers = [output.outputs[0] for output in llm.generate(prompts, params)]
    llm.check()
    exact = _read_by_transformers(path, prompts, answers, torch.float32)
    ours = torch.cat([_told(answer) for answer in answers])
    if dtype == "float32":
        assert (
            exact.max(dim=1).values - _chosen(exact, answers)
        ).max() < 1e-4  # nothing but a tie was decided otherwise
        assert (ours - _chosen(exact, answers)).abs().max() < 1e-4
    else:
        rounded = _chosen(_read_by_transformers(path, prompts, answers, torch.bfloat16), answers)
        distances = [(each - _chosen(exact, answers)).abs() for each in (ours, rounded)]
        assert distances[0].mean() < 1.2 * distances[1].mean() + 1e-3
        assert distances[0].max() < 2 * distances[1].max() + 1e-2


def _read_by_transformers(
    path: Path, prompts: list[list[int]], answers: list[CompletionOutput], dtype: torch.dtype
) -> torch.Tensor:
    """Log-probabilities float64 [answers * NEW_TOKENS, V] at every token of the answers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + list(answer.token_ids)]), use_cache=False).logits[0]
        rows.append(logits[len(prompt) - 1 : -1].double().log_softmax(dim=-1))
    return torch.cat(rows)


def _chosen(logprobs: torch.Tensor, answers: list[CompletionOutput]) -> torch.Tensor:
    ids = torch.tensor([token_id for answer in answers for token_id in answer.token_ids])
    return logprobs.gather(1, ids[:, None])[:, 0]


def _told(answer: CompletionOutput) -> torch.Tensor:
    assert answer.logprobs is not None
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return torch.tensor([place[token_id].logprob for token_id, place in pairs], dtype=torch.float64)
