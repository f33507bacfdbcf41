"""Whether guessing pays, as it is measured, and what a text then takes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from pagemill.engine.request import Request
from pagemill.engine.scheduler_output import SchedulerOutput, StepResult
from pagemill.engine.speculation import Proposer, Speculation
from pagemill.engine.speculation_gain import DecodeTimes, DraftGain
from tests.engine.guessing import Adversary
from tests.engine.invented import Bench, InventedModel, make, twin


def learned(step_s: Callable[[int], float], sizes: Sequence[int]) -> DraftGain:
    gain = DraftGain()
    for _ in range(20):
        for size in sizes:
            gain.times.observe(size, step_s(size))
    return gain


def test_nothing_is_drafted_before_anything_was_measured() -> None:
    gain = DraftGain()
    assert not gain.may_pay(1, 4)
    assert gain.choose(1, [(4, 0.99)], 10) == [0]


def test_cheap_drafts_are_taken_while_they_are_likely() -> None:
    """A step takes 20 ms, and 1 ms a token: a draft pays if it is likelier than 1 in 21, or a little more as the step
    gets longer."""
    gain = learned(lambda tokens: 0.020 + 0.001 * tokens, [1, 2, 4, 8])
    assert gain.may_pay(1, 7)
    assert gain.choose(1, [(7, 0.95)], 100) == [7]
    assert gain.choose(1, [(7, 0.4)], 100) == [2]  # 1.56 tokens in 23 ms, not 1.62 in 24
    assert gain.choose(1, [(7, 0.03)], 100) == [0]
    assert gain.choose(1, [(7, 0.95)], 3) == [3], "no more than the step has left"
    assert gain.choose(2, [(7, 0.3), (7, 0.9)], 5) == [0, 5], "the likelier ones first"


def test_drafts_that_cost_as_much_as_tokens_are_not_taken() -> None:
    gain = learned(lambda tokens: 0.005 * tokens, [1, 4, 16])
    assert not gain.may_pay(1, 7) and not gain.may_pay(16, 100)
    assert gain.choose(4, [(7, 0.99)] * 4, 100) == [0] * 4


def test_sizes_that_the_kernels_like_are_found() -> None:
    """Tiles of four rows: five tokens take as long as eight."""
    gain = learned(lambda tokens: 0.020 + 0.010 * (-(-tokens // 4)), list(range(1, 9)))
    assert gain.choose(1, [(7, 0.6)], 100) == [3]
    assert gain.choose(1, [(7, 0.95)], 100) == [7]


def test_a_size_that_noise_made_look_good_is_not_taken() -> None:
    """With 80 sequences a draft costs nearly a token: only one that is nearly always right pays."""
    gain = learned(lambda tokens: 0.004 + 0.0007 * tokens, list(range(70, 100)))
    for _ in range(4):
        gain.times.observe(84, 0.7 * (0.004 + 0.0007 * 84))
    assert gain.choose(80, [(1, 0.6)] * 20, 100) == [0] * 20


def test_a_size_that_looked_bad_once_is_tried_again() -> None:
    times = DecodeTimes()
    for _ in range(40):
        times.observe(1, 0.020)
        times.observe(8, 0.024)
    times.observe(4, 1.0)
    assert times.most(4) == pytest.approx(1.0)
    for _ in range(300):
        times.observe(1, 0.020)
    later = times.most(4)
    assert later is not None and later < 0.05


def test_the_rate_of_right_guesses_follows_and_newcomers_start_with_what_others_saw() -> None:
    gain = DraftGain()
    first = gain.newcomer()
    for _ in range(400):
        first.observe(right=False)
    assert first.rate < 0.01 and gain.newcomer().rate < 0.02
    for _ in range(20):
        first.observe(right=True)
    assert first.rate > 0.8 > gain.newcomer().rate


class Slow(InventedModel):
    """Takes time by the tokens of a step."""

    def __init__(self, bench: Bench, step_s: Callable[[int], float]) -> None:
        super().__init__(400, 4)
        self._bench, self._step_s = bench, step_s

    def execute(self, output: SchedulerOutput) -> StepResult:
        self._bench._now += self._step_s(output.num_tokens)
        return super().execute(output)


def seconds(step_s: Callable[[int], float], right: float | None) -> float:
    """How long a text takes with guesses of which so many are right, or without guesses."""
    rng = random.Random(1)

    def proposer(request: Request) -> Proposer:
        adversary = Adversary(request, 0, rng)
        adversary.right = right
        return adversary

    speculation = None if right is None else Speculation(4, proposer, DraftGain())
    bench = Bench(num_blocks=400, block_size=4, speculation=speculation)
    bench.model = Slow(bench, step_s)
    bench.core._runner = bench.model
    bench.add(make("r", [1], 600, ignore_eos=True))
    bench.run()
    assert bench.tokens["r"] == twin([1], 0, 600, ignore_eos=True)
    return bench._now


@pytest.mark.parametrize(
    ("overhead", "per_token", "right", "least"),
    [(0.020, 0.001, 1.0, 3.0), (0.020, 0.001, 0.5, 1.8), (0.020, 0.004, 0.0, 0.98), (0.0, 0.050, 1.0, 0.98)],
)
def test_it_switches_itself_off_where_it_does_not_pay(
    overhead: float, per_token: float, right: float, least: float
) -> None:
    """A device with tokens to spare, and guesses that come true or do not; and a device with none to spare."""

    def step_s(tokens: int) -> float:
        return overhead + per_token * tokens

    assert seconds(step_s, None) / seconds(step_s, right) > least
