"""Architectures through the public API against transformers: greedy tokens, and seeded ones drawn from its logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from pagemill import LLM, SamplingParams
from pagemill.engine.models import NATIVE_ARCHITECTURES
from pagemill.engine.models.generic import GenericModel
from pagemill.kernels.rng import gumbel, token_bits
from tests.engine.tiny_decoders import GENERIC, tiny
from tests.engine.tiny_models import CONFIGS, VOCAB, generated_by_transformers, save_model

NATIVE = ("llama-gqa", "mistral-window", "qwen2-tied-some-windows", "qwen3", "smollm3", "gpt2", "opt-norm-before")
ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {name: CONFIGS[name] for name in NATIVE} | GENERIC
NEW_TOKENS = 24
CHUNK = 16
SEED = 2**63 + 5
TEMPERATURE, TOP_P = 0.8, 0.9


def _prompt(length: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


PROMPTS = [_prompt(length) for length in (2, 7, 16, 45)]


def load(path: Path, **settings: Any) -> LLM:
    fields: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "skip_tokenizer_init": True,
        "num_blocks_override": 64,
        "max_num_batched_tokens": CHUNK,
    }
    return LLM(path, **fields | settings)


def model_of(llm: LLM) -> Any:
    return llm._parts.core._runner._model  # type: ignore[attr-defined]


def generate(llm: LLM, params: SamplingParams) -> list[list[list[int]]]:
    """Token ids by prompt and choice."""
    return [[list(each.token_ids) for each in out.outputs] for out in llm.generate(PROMPTS, params)]


def redrawn(model: Any, prompt: list[int], tokens: list[int], choice: int) -> list[int]:
    """The tokens that the documented noise draws from the distributions of a model of transformers after each prefix.

    Nucleus sampling written down directly: the likeliest tokens whose probabilities first add up to `TOP_P`, and the
    largest of logit / temperature + Gumbel noise among them.
    """
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    drawn = []
    for position, row in enumerate(logits.double().numpy() / TEMPERATURE):
        probabilities = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        order = np.argsort(-probabilities)
        kept = order[: np.searchsorted(np.cumsum(probabilities[order]), TOP_P) + 1]
        noise = gumbel(token_bits(SEED, position, choice, len(row)))
        drawn.append(int(kept[np.argmax((row + noise)[kept])]))
    return drawn


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_and_seeded_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = save_model(ARCHITECTURES[name](), tmp_path)
    expected = generated_by_transformers(path, PROMPTS, NEW_TOKENS)
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    drawing = SamplingParams(
        temperature=TEMPERATURE, top_p=TOP_P, seed=SEED, n=2, max_tokens=NEW_TOKENS, ignore_eos=True
    )
    llm = load(path, block_size=8)
    assert isinstance(model_of(llm), GenericModel) == (name in GENERIC)
    assert [choices[0] for choices in generate(llm, greedy)] == expected
    drawn = generate(llm, drawing)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    for prompt, choices in zip(PROMPTS, drawn, strict=True):
        assert choices[0] != choices[1]
        for choice, tokens in enumerate(choices):
            assert redrawn(model, prompt, tokens, choice) == tokens
    other = load(path, block_size=16, enable_prefix_caching=False)
    assert [choices[0] for choices in generate(other, greedy)] == expected
    assert generate(other, drawing) == drawn


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "deepseek_v3"])
def test_preempted_and_recomputed(name: str, tmp_path: Path) -> None:
    path = save_model(ARCHITECTURES[name](), tmp_path)
    expected = generated_by_transformers(path, PROMPTS, NEW_TOKENS)
    llm = load(path, block_size=8, num_blocks_override=10, num_speculative_tokens=0)
    llm._parts.core.scheduler.promises.forecast = None  # admit without foresight
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    assert [choices[0] for choices in generate(llm, greedy)] == expected
    assert llm._parts.core.scheduler.statistics().preemptions > 0


@pytest.mark.parametrize("name", ["qwen2", "gpt_neox"])
def test_every_end_of_sequence_id_of_the_generation_config_ends(name: str, tmp_path: Path) -> None:
    path = save_model((CONFIGS | GENERIC)[name](), tmp_path)
    [free] = generated_by_transformers(path, [PROMPTS[1]], NEW_TOKENS)
    for end in (4, 9):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [VOCAB - 1, free[end]]}))
        llm = load(path)
        (output,) = llm.generate([PROMPTS[1]], SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS))
        assert output.outputs[0].finish_reason == "stop"
        assert list(output.outputs[0].token_ids) == free[: free.index(free[end]) + 1]
        assert llm.info.eos_token_ids == tuple(sorted({VOCAB - 1, free[end]}))


@pytest.mark.parametrize("head_dim", [20, 80, 96, 128])
@pytest.mark.parametrize("model_type", ["qwen3", "gemma"])
def test_heads_of_any_width(model_type: str, head_dim: int, tmp_path: Path) -> None:
    path = save_model(tiny(model_type, head_dim=head_dim), tmp_path)
    expected = generated_by_transformers(path, PROMPTS[1:3], 8)
    llm = load(path)
    outputs = llm.generate(PROMPTS[1:3], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "stablelm", "deepseek_v3"])
def test_logits_in_bfloat16_are_as_close_as_transformers_own(name: str, tmp_path: Path) -> None:
    path = save_model(GENERIC[name](), tmp_path)
    prompt = torch.tensor([PROMPTS[3]])

    def theirs(dtype: torch.dtype) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
        with torch.no_grad():
            return model(prompt, use_cache=False).logits[0].double()

    exact = theirs(torch.float32)
    ours = _teacher_forced(load(path, dtype="bfloat16"))
    distances = [(logits - exact).norm(dim=-1) / exact.norm(dim=-1) for logits in (ours, theirs(torch.bfloat16))]
    # Rounding sends a token to another expert now and then: the median is not moved by it.
    assert distances[0].median() < 1.2 * distances[1].median() < 0.1


def _teacher_forced(llm: LLM) -> torch.Tensor:
    """float64 logits after every token of the longest prompt, in chunks on the pool of the engine."""
    rows = []
    model = model_of(llm)
    forward, logits = model.forward, model.logits

    def all_rows(token_ids: torch.Tensor, meta: Any, kv: Any, wanted: torch.Tensor) -> torch.Tensor:
        hidden = forward(token_ids, meta, kv, torch.arange(len(token_ids)))
        rows.append(logits(hidden).double())
        return hidden.index_select(0, wanted)

    model.forward = all_rows
    llm.generate([PROMPTS[3]], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    return torch.cat(rows)


def test_native_architectures_are_all_tried_here() -> None:
    tried = {type(CONFIGS[name]()).__name__ for name in NATIVE}
    assert len(tried) == len(NATIVE_ARCHITECTURES) == len(NATIVE)
