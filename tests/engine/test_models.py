"""Models against transformers: the same greedy tokens in float32, however the prompt is cut and the memory paged."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pagemill.engine.batch import BatchBuilder
from pagemill.engine.config import EngineConfig
from pagemill.engine.loader import resolve_model
from pagemill.engine.model_runner import ModelRunner
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduler_output import ScheduledSequence
from tests.engine.naive_batch import naive_batch, told
from tests.engine.tiny_models import CONFIGS, VOCAB, Driver, generated_by_transformers, save_model

NEW_TOKENS = 12
KERNELS = ("reference", "torch", "cpu")
WHOLE = 1 << 20


def _prompt(length: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


PROMPTS = [_prompt(length) for length in (1, 16, 33)]


@dataclass(frozen=True)
class Saved:
    name: str
    path: Path
    expected: list[list[int]]


@pytest.fixture(scope="module", params=list(CONFIGS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    path = save_model(CONFIGS[request.param](), tmp_path_factory.mktemp("model"))
    return Saved(request.param, path, generated_by_transformers(path, PROMPTS, NEW_TOKENS))


def make_runner(path: Path, kernels: str, **settings: Any) -> ModelRunner:
    fields: dict[str, Any] = {
        "model": str(path),
        "dtype": "float32",
        "device": "cpu",
        "num_blocks_override": 200,
        "threads": 1,
    }
    config = EngineConfig(**fields | settings)
    return ModelRunner(config, resolve_model(config.model), kernels=kernels)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("block_size", "chunks"), [(1, [7]), (8, [WHOLE, 7]), (16, [WHOLE, 1])])
def test_greedy_tokens_equal_transformers(saved: Saved, kernels: str, block_size: int, chunks: list[int]) -> None:
    driver = Driver(make_runner(saved.path, kernels, block_size=block_size))
    for chunk in chunks:
        actual = [driver.generate(prompt, NEW_TOKENS, chunk=chunk) for prompt in PROMPTS]
        assert actual == saved.expected, f"chunk {chunk}"


@pytest.mark.parametrize("kernels", KERNELS)
def test_sequences_in_one_batch_do_not_touch_each_other(saved: Saved, kernels: str) -> None:
    """All prompts at once, each in chunks of another size, so that steps mix prefill, chunks and decode."""
    driver = Driver(make_runner(saved.path, kernels, block_size=8))
    driver.runner._pool._pool.fill_(float("nan"))  # what was never written must never be read
    greedy = SamplingParams(temperature=0.0)
    requests = [driver.request(prompt, greedy) for prompt in PROMPTS]
    tables = [driver.blocks(len(prompt) + NEW_TOKENS) for prompt in PROMPTS]
    computed = [0] * len(requests)
    while any(len(request.output_token_ids) < NEW_TOKENS for request in requests):
        scheduled, who = [], []
        for index, request in enumerate(requests):
            if len(request.output_token_ids) < NEW_TOKENS:
                count = min(3 + 2 * index, request.num_tokens - computed[index])
                samples = computed[index] + count == request.num_tokens
                scheduled.append(ScheduledSequence(request, computed[index], count, tables[index], samples))
                computed[index] += count
                who += [request] * samples
        for request, token_id in zip(who, driver.step(*scheduled), strict=True):
            request.output_token_ids.append(token_id)
    assert [request.output_token_ids for request in requests] == saved.expected


def _logits(runner: ModelRunner, prompt: list[int]) -> torch.Tensor:
    """float64 [vocab_size] after the last token of a prompt."""
    captured: list[torch.Tensor] = []
    logits = runner._model.logits
    runner._model.logits = lambda hidden: captured.append(logits(hidden)) or captured[-1]  # type: ignore
    try:
        # A step that only draws never shows its logits.
        Driver(runner).generate(prompt, 1, params=SamplingParams(temperature=0.0, logprobs=0))
    finally:
        runner._model.logits = logits  # type: ignore[method-assign]
    return captured[0][0].double()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_in_one_call_have_the_bits_of_operation_by_operation(saved: Saved, dtype: str) -> None:
    """Also for steps that mix a prefill, a chunk and decodes, and those of which no token, or few, go on to logits."""
    runner = make_runner(saved.path, "cpu", dtype=dtype, block_size=8, threads=2)
    model: Any = runner._model
    if model.compiled is None:
        pytest.skip("not of the Llama family")
    params = SamplingParams(temperature=0.0)
    driver = Driver(runner)
    requests = [driver.request(_prompt(length), params) for length in (33, 5, 40, 1)]
    tables = [driver.blocks(40) for _ in requests]
    steps = [
        [(0, 0, 33, True), (1, 0, 5, False), (2, 0, 21, False)],
        [(1, 0, 5, False)],
        [(2, 21, 19, True), (3, 0, 1, True)],
    ]
    found = []
    for compiled in (model.compiled, None):
        model.compiled = compiled
        runner._pool._pool.fill_(float("nan"))
        for step in steps:
            scheduled = [ScheduledSequence(requests[i], at, n, tables[i], samples) for i, at, n, samples in step]
            batch = BatchBuilder(block_size=8, vocab_size=VOCAB, device="cpu").build(scheduled)
            with torch.inference_mode():
                found.append(model.forward(batch.token_ids, batch.meta, runner._pool.layers, batch.wanted))
        found.append(runner._pool._pool[:, 1:].clone())
    half = len(found) // 2
    for one, other in zip(found[:half], found[half:], strict=True):
        assert one.shape == other.shape
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    assert [len(each) for each in found[:3]] == [1, 0, 2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_in_one_call_draw_what_their_operations_draw(saved: Saved, dtype: str) -> None:
    runner = make_runner(saved.path, "cpu", dtype=dtype, block_size=8, threads=2)
    model, ops = runner._model, runner.ops
    if model.compiled is None:
        pytest.skip("not of the Llama family")
    driver = Driver(runner)
    requests = [
        driver.request(_prompt(length), SamplingParams(temperature=heat, top_p=0.875), seed=length)
        for length, heat in ((33, 0.0), (5, 1.0), (40, 0.75), (1, 2.0))
    ]
    tables = [driver.blocks(80) for _ in requests]
    steps = [
        [(0, 0, 33, True), (1, 0, 5, False), (2, 0, 21, False), (3, 0, 1, True)],
        [(1, 0, 5, True), (2, 21, 19, True)],
        [(2, 40, 1, True), (0, 33, 1, True), (3, 1, 1, True)],
        *([(2, at, 1, True), (0, at - 7, 1, True), (3, at - 39, 1, True)] for at in range(41, 54)),
        [(1, 5, 1, True)],
        *([(1, at, 1, True), (3, at + 9, 1, True)] for at in range(6, 9)),
    ]
    found: list[list[Any]] = []
    left = 0
    for whole in (True, False):
        builder = BatchBuilder(block_size=8, vocab_size=VOCAB, device="cpu")
        runner._pool._pool.fill_(0)
        drawn: list[Any] = []
        for request in requests:
            request.output_token_ids.clear()
        for step in steps:
            scheduled = [ScheduledSequence(requests[i], at, n, tables[i], samples) for i, at, n, samples in step]
            batch = builder.build(scheduled)
            assert batch.only_draws
            with torch.inference_mode():
                place = (batch.meta, runner._pool.layers, batch.wanted)
                if whole:
                    advance = batch.advance is not None
                    tokens = model.compiled.draw(batch.token_ids, *place, batch.sampling, advance=advance)
                    builder.drawn = tokens
                    left += advance
                    assert told(batch, 8) == naive_batch(scheduled, 8)
                else:
                    logits = model.logits(model.forward(batch.token_ids, *place))
                    tokens = ops.sample(logits, batch.sampling).tolist()
            drawn.append(tokens)
            for item, token_id in zip([item for item in scheduled if item.samples], tokens, strict=True):
                item.request.output_token_ids.append(token_id)
        found.append([drawn, runner._pool._pool[:, 1:].clone()])
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert left == 13 + 2, "which steps are the last one again, a token further"


def test_draws_of_another_type_or_number_are_refused_by_a_step_in_one_call(tmp_path: Path) -> None:
    """They are read by address: nothing else would notice."""
    runner = make_runner(save_model(CONFIGS["llama-gqa"](), tmp_path), "cpu", block_size=8)
    driver = Driver(runner)
    compiled: Any = runner._model.compiled
    item = ScheduledSequence(driver.request([3, 2], SamplingParams(temperature=0.0)), 0, 2, driver.blocks(8), True)
    batch = BatchBuilder(block_size=8, vocab_size=VOCAB, device="cpu").build([item])
    place = (batch.token_ids, batch.meta, runner._pool.layers, batch.wanted)
    for wrong in ({"position": np.zeros(1, np.int32)}, {"seed": np.zeros(2, np.uint64)}):
        with pytest.raises(ValueError, match="for each of 1 rows"):
            compiled.draw(*place, dataclasses.replace(batch.sampling, **wrong))
    assert len(compiled.draw(*place, batch.sampling)) == 1
    with pytest.raises(ValueError, match="drawn from last"):
        compiled.draw(*place, batch.sampling, advance=True)  # two tokens, not one


def test_ids_that_the_vocabulary_has_not_are_refused_by_a_step_in_one_call(tmp_path: Path) -> None:
    runner = make_runner(save_model(CONFIGS["llama-gqa"](), tmp_path), "cpu", block_size=8)
    driver = Driver(runner)
    with pytest.raises(IndexError, match=f"0 .. {VOCAB - 1}"):
        driver.generate([3, VOCAB, 2], 1)
    with pytest.raises(IndexError, match="-1"):
        driver.generate([3, -1, 2], 1)
    assert driver.generate([3, 2], 1)


def _logits_of_transformers(path: Path, dtype: torch.dtype) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    with torch.no_grad():
        return [model(torch.tensor([prompt])).logits[0, -1].double() for prompt in PROMPTS]


def _error(actual: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return max(float((a - e).norm() / e.norm()) for a, e in zip(actual, exact, strict=True))


def test_logits_are_close_to_transformers(saved: Saved) -> None:
    """In bfloat16 texts differ at near ties, so the distance to float32 counts: about as small as transformers' own."""
    exact = _logits_of_transformers(saved.path, torch.float32)
    assert _error([_logits(make_runner(saved.path, "cpu"), prompt) for prompt in PROMPTS], exact) < 1e-5
    runner = make_runner(saved.path, "cpu", dtype="bfloat16")
    theirs = _error(_logits_of_transformers(saved.path, torch.bfloat16), exact)
    assert _error([_logits(runner, prompt) for prompt in PROMPTS], exact) < 1.3 * theirs
