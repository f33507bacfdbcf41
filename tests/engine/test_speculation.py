"""Guessed tokens: they change when tokens come, never which, and leave nothing behind when they were wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.engine.request import Request
from pagemill.engine.scheduler_output import SchedulerOutput, StepResult
from pagemill.engine.speculation import NgramProposer, Speculation
from pagemill.engine.speculation_gain import DraftGain
from tests.engine.invented import EOS, VOCABULARY, Bench, invent, make
from tests.engine.test_scheduler_properties import NO_SHRINK, Arrival, Conditions, arrivals, conditions, play

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


@settings(max_examples=200, deadline=None, derandomize=True)
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


# -- whatever is guessed -------------------------------------------------------------------------------------------


class Adversary:
    """Guesses the truth up to a random place, and nonsense from there on."""

    def __init__(self, request: Request, window: int, rng: random.Random) -> None:
        self._request, self._window, self._rng = request, window, rng

    def read(self, token_ids: Sequence[int]) -> None:
        pass

    def propose(self, count: int) -> list[int]:
        request, rng = self._request, self._rng
        tokens, right = request.tokens(0, request.num_tokens), rng.randrange(count + 1)
        guess: list[int] = []
        for place in range(count):
            token = invent(tokens[-self._window :], request.seed, len(request.output_token_ids) + place, request.index)
            guess.append(token if place < right else rng.randrange(VOCABULARY))
            tokens.append(guess[-1])
        return guess


class Reckless(DraftGain):
    """Drafts whatever it likes, paying or not."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def may_pay(self, decodes: int, most: int) -> bool:
        return True

    def choose(self, decodes: int, guesses: Sequence[tuple[int, float]], limit: int) -> list[int]:
        counts = []
        for length, _ in guesses:
            counts.append(self._rng.randint(0, min(length, limit)))
            limit -= counts[-1]
        return counts


def reckless(seed: int, window: int = 0, drafts: int = 5) -> Speculation:
    rng = random.Random(seed)
    return Speculation(drafts, lambda request: Adversary(request, window, rng), Reckless(rng), [EOS])


drafted = 0


@settings(max_examples=250, deadline=None, derandomize=True, phases=NO_SHRINK)
@given(traffic=st.lists(arrivals(), min_size=1, max_size=10), conditions=conditions, seed=st.integers(0, 2**32))
def test_guesses_change_no_token(traffic: list[Arrival], conditions: Conditions, seed: int) -> None:
    speculation = reckless(seed, conditions.window)
    play(traffic, conditions, conditions.bench(speculation))
    assert not speculation._guessers, "a sequence that is over is remembered"


def test_blocks_and_cache_are_those_of_the_twin() -> None:
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
        assert bench.cache.pool.num_used == 0
    common = seen[False].keys() & seen[True].keys()
    assert len(common) > 50
    assert {key: seen[True][key] for key in common} == {key: seen[False][key] for key in common}
    assert known[True] == known[False]
    assert steps[True] < 0.6 * steps[False]


def outputs(bench: Bench) -> list[SchedulerOutput]:
    """Every step's output, with the drafts that it was given to compute."""
    seen: list[SchedulerOutput] = []
    execute = bench.model.execute

    def spy(output: SchedulerOutput) -> StepResult:
        seen.append(output)
        for item in output.scheduled:
            given.append((output.step, item.request.request_id, len(item.drafts)))
        return execute(output)

    given: list[tuple[int, str, int]] = []
    bench.given = given  # type: ignore[attr-defined]
    bench.model.execute = spy  # type: ignore[method-assign]
    return seen
