"""The whole engine against transformers: fp32 greedy tokens are the same whatever the engine does to get there.

Block sizes, prefix cache on and off, prefixes that arrive together, a prompt of exactly k blocks sent twice, a budget
of seven tokens, a pool that forces preemptions, and requests aborted beside it in every phase.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagemill.engine.assembly import EngineParts, build
from pagemill.engine.config import EngineConfig
from pagemill.engine.loader import resolve_model
from pagemill.engine.prompt import TokenIds, make_request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.tokenizer import Tokenizer
from tests.engine.tiny_models import CONFIGS, VOCAB, generated_by_transformers, save_model

TINY = ("llama-gqa", "llama-mha-tied", "mistral-window", "opt-norm-before")
NEW_TOKENS = 32
REAL_NEW_TOKENS = 16

REAL_PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Water boils at",
    "Q: What is 17 + 25?\nA:",
    "The three primary colours are",
    "Dear customer,\n\nThank you for your order. We are sorry to tell you that",
    "SELECT name, price FROM products WHERE",
    "Die Hauptstadt von Deutschland ist",
    "1, 1, 2, 3, 5, 8, 13,",
    "In 1969, Neil Armstrong",
    "To make pancakes you need flour,",
    "The opposite of hot is",
    "Roses are red,",
    "A list of five fruits:\n1. Apple\n2.",
    "The mitochondria is the",
    "She opened the letter and read:",
    "HTTP status 404 means",
    "Photosynthesis turns light into",
    "My favourite season is autumn because the leaves",
]


@dataclass
class Case:
    """A model folder, prompts, and what transformers answers to them."""

    path: Path
    prompts: list[list[int]]
    answers: list[list[int]]
    new_tokens: int
    lets_go: bool = False


def drive(parts: EngineParts, prompts: list[list[int]], new_tokens: int, *, aborts: int = 0) -> list[list[int]]:
    """Run all prompts at once, with `aborts` more requests that are ended at random moments; then check and empty."""
    rng = random.Random(1)
    core = parts.core
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)

    def add(name: str, prompt: list[int]) -> None:
        core.add(make_request(name, TokenIds(prompt), params, parts.limits, None))

    doomed = {}
    for index in range(aborts):
        doomed[f"doomed{index}"] = rng.randrange(0, 30)
    tokens: dict[str, list[int]] = {f"r{index}": [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        add(f"r{index}", prompt)
        if index < aborts:
            add(f"doomed{index}", [*prompts[-1 - index][:-3], 5, 6, 7])
    step = 0
    while core.has_requests:
        for name, when in doomed.items():
            if when == step:
                core.abort(name)
        for output in core.step():
            if output.request_id in tokens:
                tokens[output.request_id] += output.token_ids
        step += 1
    core.check()
    assert core.scheduler.statistics().cache.pool.used == 0
    return [tokens[f"r{index}"] for index in range(len(prompts))]


def engine(path: Path, **settings: object) -> EngineParts:
    fields: dict[str, object] = {
        "model": str(path),
        "dtype": "float32",
        "device": "cpu",
        "skip_tokenizer_init": True,
        "num_blocks_override": 600,
        "threads": 1,
    }
    return build(EngineConfig(**(fields | settings)))  # type: ignore[arg-type]


def pressed(path: Path, **settings: object) -> EngineParts:
    """An engine that admits without looking ahead, so that a small pool preempts, and without guesses, which come when
    time allows."""
    parts = engine(path, num_speculative_tokens=0, **settings)
    parts.core.scheduler.promises.forecast = None
    return parts


def tiny_prompts() -> list[list[int]]:
    rng = random.Random(11)
    shared = [rng.randrange(VOCAB) for _ in range(32)]
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (1, 7, 8, 9, 16, 31, 33, 40)]
    prompts += [shared + [rng.randrange(VOCAB) for _ in range(n)] for n in (1, 2, 9)]
    return [*prompts, shared, list(shared)]


@pytest.fixture(scope="module", params=TINY)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = save_model(CONFIGS[request.param](), tmp_path_factory.mktemp("tiny"))
    prompts = tiny_prompts()
    answers = generated_by_transformers(path, prompts, NEW_TOKENS)
    return Case(path, prompts, answers, NEW_TOKENS, lets_go=request.param == "mistral-window")


@pytest.fixture(scope="module")
def real() -> Case:
    folder = resolve_model("smollm2-135m")
    tokenizer = Tokenizer.from_folder(folder.path)
    prompts = [tokenizer.encode(text) for text in REAL_PROMPTS]
    answers = generated_as_a_batch(folder.path, prompts, REAL_NEW_TOKENS)
    return Case(folder.path, prompts, answers, REAL_NEW_TOKENS)


def generated_as_a_batch(path: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """transformers' greedy answers in one left-padded `generate`, which takes a twentieth of the time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0)
    return [row.tolist() for row in output[:, longest:]]


def usual(case: Case, **settings: object) -> EngineParts:
    """Twice the same prompts: cold, then with whatever the cache kept."""
    parts = engine(case.path, **settings)
    assert drive(parts, case.prompts, case.new_tokens) == case.answers
    assert drive(parts, case.prompts, case.new_tokens) == case.answers
    return parts


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_tiny_models(tiny: Case, block_size: int, caching: bool) -> None:
    parts = usual(tiny, block_size=block_size, enable_prefix_caching=caching)
    hits = parts.core.scheduler.statistics().cache.hit_tokens
    assert (hits > 0) == caching


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_tiny_models_under_pressure(tiny: Case, block_size: int) -> None:
    """A budget of seven tokens, a pool for little more than the longest prompt, and aborts in every phase."""
    longest = max(map(len, tiny.prompts)) + NEW_TOKENS
    blocks = 1 + -(-longest // block_size)
    parts = pressed(tiny.path, block_size=block_size, max_num_batched_tokens=7, num_blocks_override=blocks)
    assert drive(parts, tiny.prompts, tiny.new_tokens, aborts=8) == tiny.answers
    if not tiny.lets_go:  # a model with a window gives blocks back as it goes, and fits
        assert parts.core.scheduler.statistics().preemptions > (1 if block_size < 32 else 0)


@pytest.mark.parametrize(("block_size", "caching"), [(1, True), (8, False), (16, True), (32, True)])
def test_smollm2(real: Case, block_size: int, caching: bool) -> None:
    parts = engine(real.path, block_size=block_size, enable_prefix_caching=caching, num_blocks_override=1200)
    assert drive(parts, real.prompts, real.new_tokens) == real.answers


def test_smollm2_with_a_budget_of_seven(real: Case) -> None:
    parts = engine(real.path, max_num_batched_tokens=7)
    assert drive(parts, real.prompts[:8], real.new_tokens) == real.answers[:8]


@pytest.mark.parametrize("block_size", [1, 8])
def test_smollm2_preempted_and_with_aborts_beside(real: Case, block_size: int) -> None:
    blocks = 1 + 5 * -(-40 // block_size)
    parts = pressed(real.path, block_size=block_size, num_blocks_override=blocks)
    assert drive(parts, real.prompts, real.new_tokens, aborts=6) == real.answers
    assert parts.core.scheduler.statistics().preemptions > 1


def test_smollm2_same_prompt_of_whole_blocks_twice_and_together(real: Case) -> None:
    parts = engine(real.path, block_size=4)
    prompt = real.prompts[6][:16]
    [alone] = drive(parts, [prompt], 8)
    assert drive(parts, [prompt, prompt, [*prompt, 5]], 8)[:2] == [alone, alone]
    fresh = engine(real.path, block_size=4, enable_prefix_caching=False)
    assert drive(fresh, [prompt], 8) == [alone]
