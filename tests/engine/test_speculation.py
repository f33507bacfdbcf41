"""Guessed tokens: they change when tokens come, never which, and leave nothing behind when they were wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.engine.assembly import EngineParts, build
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError
from pagemill.engine.llm import _settings
from pagemill.engine.prompt import TokenIds, make_request
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduler_output import SchedulerOutput, StepResult
from pagemill.engine.speculation import NgramProposer, Speculation
from tests.engine.guessing import Reckless, reckless
from tests.engine.invented import EOS, Bench, make, twin
from tests.engine.test_scheduler_properties import NO_SHRINK, Arrival, Conditions, arrivals, conditions, play
from tests.engine.tiny_models import CONFIGS, VOCAB, save_model

# -- the look-up ---------------------------------------------------------------------------------------------------


def naive_guess(tokens: Sequence[int], longest: int, shortest: int, count: int) -> list[int]:
    """The look-up by searching everything, as if the text went on repeating."""
    for length in range(longest, shortest - 1, -1):
        run = list(tokens[-length:])
        for place in range(len(tokens) - 1, length - 1, -1):
            if list(tokens[place - length : place]) == run:
                guess = list(tokens)
                while len(guess) < len(tokens) + count:
                    guess.append(guess[len(guess) - (len(tokens) - place)])
                return guess[len(tokens) :]
    return []


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=0, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    longest=st.integers(1, 4),
    shorter=st.integers(0, 3),
    count=st.integers(1, 6),
)
def test_the_index_finds_what_a_search_finds(
    tokens: list[int], cuts: list[int], longest: int, shorter: int, count: int
) -> None:
    shortest = max(1, longest - shorter)
    proposer, start = NgramProposer(longest, shortest), 0
    for end in [*sorted(cuts), len(tokens)]:
        proposer.read(tokens[start:end])
        start = max(start, end)
        assert proposer.propose(count) == naive_guess(tokens[:end], longest, shortest, count)


def test_the_index_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It forgets what is long past, and what it still knows is right."""
    monkeypatch.setattr("pagemill.engine.speculation.REMEMBERED", 100)
    rng = random.Random(0)
    proposer = NgramProposer(3, 2)
    for _ in range(100):
        proposer.read([rng.randrange(10_000) for _ in range(20)])
        assert len(proposer._index) + len(proposer._older) < 2 * 140
    proposer.read([1, 2, 3, 4, 5, 6, 1, 2])
    assert proposer.propose(3) == [3, 4, 5]


@settings(max_examples=150, deadline=None, derandomize=True, phases=NO_SHRINK)
@given(traffic=st.lists(arrivals(), min_size=1, max_size=10), conditions=conditions, seed=st.integers(0, 2**32))
def test_guesses_change_no_token(traffic: list[Arrival], conditions: Conditions, seed: int) -> None:
    speculation = reckless(seed, conditions.window)
    play(traffic, conditions, conditions.bench(speculation))
    assert not speculation._guessers, "a sequence that is over is remembered"


@pytest.mark.parametrize("reserve", [False, True])
def test_blocks_and_cache_are_those_of_the_twin(reserve: bool) -> None:
    """With drafts a sequence of so many tokens holds the blocks and promises that it holds without, and in the end the
    prefix cache knows the same blocks."""
    seen: dict[bool, dict[tuple[str, int, int], tuple[int, int]]] = {False: {}, True: {}}
    known: dict[bool, set[bytes]] = {}
    steps: dict[bool, int] = {}
    for with_drafts in (False, True):
        bench = Bench(
            num_blocks=400,
            block_size=4,
            max_num_batched_tokens=200,
            reserve=reserve,
            speculation=reckless(1) if with_drafts else None,
        )
        requests: list[Request] = []
        for index in range(6):
            requests.append(
                bench.add(make(f"r{index}", [index + 1] * (5 + index), 60, seed=index, ignore_eos=index % 2 > 0))
            )
        bench.add(make("choices", [9, 9, 9], 40, n=3, seed=4))
        while bench.core.has_requests:
            bench.step()
            for request in bench.scheduler.requests():
                state = len(request.block_table), request.promised_blocks
                seen[with_drafts][request.request_id, request.index, request.num_tokens] = state
        known[with_drafts], steps[with_drafts] = set(bench.cache.pool._by_hash), bench.model.steps
        statistics = bench.scheduler.statistics()
        assert (0 < statistics.accepted_tokens < statistics.draft_tokens) == with_drafts
        bills = [end.metrics for end in bench.ends.values() if end.metrics is not None]
        assert sum(bill.draft_tokens for bill in bills) == statistics.draft_tokens
        assert sum(bill.accepted_tokens for bill in bills) == statistics.accepted_tokens
        assert bench.cache.pool.num_used == 0
    common = seen[False].keys() & seen[True].keys()
    assert len(common) > 50
    assert {key: seen[True][key] for key in common} == {key: seen[False][key] for key in common}
    assert known[True] == known[False]
    assert steps[True] < 0.6 * steps[False]


@dataclass
class Seen:
    """One sequence of a step, as the runner saw it."""

    step: int
    name: str
    num_tokens: int
    drafts: list[int]
    generated: int
    max_tokens: int
    available: int  # blocks free and promised to nobody


def watch(bench: Bench) -> list[Seen]:
    """Everything that is computed from now on."""
    seen: list[Seen] = []
    execute = bench.model.execute

    def spy(output: SchedulerOutput) -> StepResult:
        for item in output.scheduled:
            request = item.request
            seen.append(
                Seen(
                    output.step,
                    request.request_id,
                    item.num_tokens,
                    list(item.drafts),
                    len(request.output_token_ids),
                    request.max_tokens,
                    bench.cache.num_available,
                )
            )
        return execute(output)

    bench.model.execute = spy  # type: ignore[method-assign]
    return seen


def test_guesses_get_what_decodes_prefills_and_admissions_leave() -> None:
    bench = Bench(num_blocks=300, block_size=4, max_num_batched_tokens=12, speculation=reckless(2))
    for index in range(3):
        bench.add(make(f"decode{index}", [index + 1, 2], 60, seed=index, ignore_eos=True))
    bench.step()
    seen = watch(bench)
    bench.add(make("long", [5] * 90, 1))
    bench.add(make("next", [6] * 50, 1))
    while "next" not in bench.ends:
        bench.step()
    crowded = range(seen[0].step, seen[0].step + 15)  # (90 + 50) / (12 - 3)
    assert not any(each.drafts for each in seen if each.step in crowded)
    assert {each.num_tokens for each in seen if each.name == "long"} <= {6, 9, 3}
    bench.run()
    assert any(each.drafts for each in seen)
    for step in range(seen[-1].step):
        assert sum(each.num_tokens for each in seen if each.step == step) <= 12


@pytest.mark.parametrize("reserve", [False, True])
def test_no_guess_preempts(reserve: bool) -> None:
    """The pool holds exactly what the requests need in the end."""
    bench = Bench(num_blocks=1 + 5 * 8, block_size=4, reserve=reserve, speculation=reckless(3))
    for index in range(5):
        bench.add(make(f"r{index}", [index + 1] * 3, 30, seed=index, ignore_eos=True))
    bench.run()
    statistics = bench.scheduler.statistics()
    assert statistics.preemptions == 0 and statistics.accepted_tokens > 20


def test_guesses_leave_the_watermark_free() -> None:
    """One token a block, and more guesses than blocks."""
    bench = Bench(num_blocks=1 + 300, block_size=1, max_num_batched_tokens=1000, speculation=reckless(3, drafts=400))
    seen = watch(bench)
    bench.add(make("r", [1], 400, ignore_eos=True))
    bench.run()
    assert bench.scheduler.promises.watermark == 3
    assert min(each.available for each in seen if each.drafts) == 3


def test_guesses_end_where_the_request_does() -> None:
    bench = Bench(num_blocks=300, block_size=4, speculation=reckless(4, drafts=20))
    seen = watch(bench)
    for index in range(8):
        bench.add(make(f"r{index}", [index + 1], 1 + 3 * index, seed=index, ignore_eos=index % 2 > 0))
    bench.run()
    assert any(each.drafts for each in seen)
    assert all(each.generated + len(each.drafts) < each.max_tokens for each in seen)
    assert not any(EOS in each.drafts for each in seen if int(each.name[1:]) % 2 == 0), "nothing follows an end"


def test_a_stop_token_is_an_end_too() -> None:
    text = twin([3], 1, 30, ignore_eos=True)
    bench = Bench(num_blocks=300, block_size=4, speculation=reckless(5))
    seen = watch(bench)
    bench.add(make("r", [3], 30, seed=1, ignore_eos=True, stop_token_ids=[text[20]]))
    bench.run()
    assert bench.tokens["r"] == text[: text.index(text[20]) + 1]
    assert not any(text[20] in each.drafts for each in seen)


def test_a_row_of_drafts_without_usable_logits_ends_that_request_alone() -> None:
    bench = Bench(num_blocks=100, block_size=4, speculation=reckless(6))
    execute = bench.model.execute

    def broken(output: SchedulerOutput) -> StepResult:
        result = execute(output)
        rows = (item for item in output.scheduled if item.samples)
        for item, sampled in zip(rows, result.sampled, strict=True):
            if item.request.request_id == "bad" and item.drafts:
                sampled.tokens[-1] = -1
        return result

    bench.model.execute = broken  # type: ignore[method-assign]
    bench.add(make("good", [1], 20, ignore_eos=True))
    bench.add(make("bad", [2], 20, ignore_eos=True))
    bench.run()
    error = bench.ends["bad"].error
    assert error is not None and error.code == "engine_error"
    told = bench.tokens["bad"]
    assert told == twin([2], 0, 20, ignore_eos=True)[: len(told)]
    assert bench.tokens["good"] == twin([1], 0, 20, ignore_eos=True)


# -- the real runner -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(CONFIGS["llama-gqa"](), tmp_path_factory.mktemp("llama"))


class Guesser:
    """Knows the texts of another run, and is wrong one time in three."""

    def __init__(self, texts: dict[tuple[str, int], list[int]], request: Request, rng: random.Random) -> None:
        self._texts, self._request, self._rng = texts, request, rng

    def read(self, token_ids: Sequence[int]) -> None:
        pass

    def propose(self, count: int) -> list[int]:
        done = len(self._request.output_token_ids)
        text = self._texts[self._request.request_id, self._request.index][done : done + count]
        return [token if self._rng.random() < 0.67 else self._rng.randrange(VOCAB) for token in text]


def drive(parts: EngineParts, speculation: Speculation | None) -> dict[tuple[str, int], list[int]]:
    """Requests of every kind at once, greedy and drawn, with rules and without."""
    parts.core.scheduler._speculation = speculation
    rng = random.Random(0)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 7, "top_p": 0.9},
        {"temperature": 1.0, "seed": 8, "n": 3},
        {"temperature": 1.0, "seed": 9, "top_k": 20, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
        {"temperature": 0.7, "seed": 10, "logit_bias": {5: 3.0, 6: -100.0}, "min_tokens": 20},
        {"temperature": 0.0, "logprobs": 2},
    ]
    texts: dict[tuple[str, int], list[int]] = {}
    logprobs: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for index, kind in enumerate(kinds * 2):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 25))]
        params = SamplingParams(max_tokens=40, ignore_eos=True, **kind)
        parts.core.add(make_request(f"r{index}", TokenIds(prompt), params, parts.limits, None))
    while parts.core.has_requests:
        for output in parts.core.step():
            key = output.request_id, output.index
            texts.setdefault(key, []).extend(output.token_ids)
            logprobs.setdefault(key, []).extend(
                (each.chosen.token_id, round(each.chosen.logprob, 3)) for each in output.logprobs or ()
            )
        parts.core.check()
    for key, told in logprobs.items():
        assert [token for token, _ in told] == (texts[key] if int(key[0][1:]) % 6 == 5 else [])
    return texts


def test_the_real_engine_says_the_same_with_guesses(folder: Path) -> None:
    parts = build(
        EngineConfig(
            model=str(folder),
            dtype="float32",
            device="cpu",
            threads=1,
            skip_tokenizer_init=True,
            block_size=4,
            num_blocks_override=600,
        )
    )
    expected = drive(parts, None)
    rng = random.Random(5)
    speculation = Speculation(5, lambda request: Guesser(expected, request, rng), Reckless(rng))
    assert drive(parts, speculation) == expected
    assert 0 < speculation.num_accepted < speculation.num_drafted
    looked_up = Speculation(7, lambda request: NgramProposer(3, 1), Reckless(rng))
    assert drive(parts, looked_up) == expected
    assert looked_up.num_drafted > 0


# -- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (None, (EngineConfig().num_speculative_tokens, 4, 2)),
        ({"method": "ngram", "num_speculative_tokens": 5}, (5, 4, 2)),
        ({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 6, "prompt_lookup_min": 3}, (5, 6, 3)),
        ({"model": "[ngram]", "num_speculative_tokens": 3, "prompt_lookup_max": 5}, (3, 5, 5)),
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "disable_logprobs": None}, (3, 1, 1)),
    ],
)
def test_vllms_speculative_config(given: object, taken: tuple[int, int, int]) -> None:
    config = EngineConfig(**_settings("m", {"speculative_config": given}))
    assert (config.num_speculative_tokens, config.prompt_lookup_max, config.prompt_lookup_min) == taken


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"method": "eagle", "num_speculative_tokens": 5}, "method must be ngram, got 'eagle'"),
        ({"model": "facebook/opt-125m", "num_speculative_tokens": 5}, "model must be ngram"),
        ({"method": "ngram", "draft_tensor_parallel_size": 1}, "draft_tensor_parallel_size"),
        ({"method": "ngram", "num_speculative_tokens": 65}, r"num_speculative_tokens must be in \[0, 64\], got 65"),
        ({"method": "ngram", "num_speculative_tokens": "many"}, "num_speculative_tokens must be an integer"),
        ({"prompt_lookup_max": 17}, r"prompt_lookup_max must be in \[1, 16\], got 17"),
        (
            {"prompt_lookup_max": 2, "prompt_lookup_min": 3},
            "prompt_lookup_min must be at most prompt_lookup_max, got 3 and 2",
        ),
        ("ngram", "speculative_config must be a mapping, got 'ngram'"),
    ],
)
def test_a_wrong_speculative_config_is_refused_by_name(given: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineConfig(**_settings("m", {"speculative_config": given}))
