"""How long a step of so many tokens takes, learned from steps."""

from __future__ import annotations

import random

import pytest

from pagemill.engine.forecast import (
    MIN_STEPS,
    StepTimes,
)


def test_step_times_are_fitted_and_follow_a_change() -> None:
    rng = random.Random(2)
    times = StepTimes()
    for _ in range(200):
        tokens = rng.randrange(1, 2000)
        times.observe(tokens, (0.01 + 2e-5 * tokens) * rng.uniform(0.8, 1.2))
    assert times.seconds(2000) == pytest.approx(0.05, rel=0.1)
    assert times.seconds(1) == pytest.approx(0.01, rel=0.15)
    for _ in range(600):
        tokens = rng.randrange(1, 2000)
        times.observe(tokens, 0.02 + 4e-5 * tokens)
    assert times.seconds(2000) == pytest.approx(0.1, rel=0.05)


def test_step_times_are_unknown_at_first_and_on_a_clock_that_stands() -> None:
    times, standing = StepTimes(), StepTimes()
    for number in range(MIN_STEPS):
        assert times.seconds(10) is None, number
        times.observe(10, 0.01)
        standing.observe(10, 0.0)
    times.observe(0, 5.0)
    assert times.seconds(10) == pytest.approx(0.01)
    assert standing.seconds(10) is None


def test_steps_of_one_size_tell_no_slope() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        times = StepTimes()
        for _ in range(100):
            times.observe(64 + rng.randrange(2), 0.02 * rng.uniform(0.7, 1.3))
        assert times.seconds(4096) == pytest.approx(0.02, rel=0.15)


@pytest.mark.parametrize("when", [0, 3, 100])
def test_a_kernel_compiled_in_a_step_is_no_measure(when: int) -> None:
    times = StepTimes()
    for number in range(150):
        times.observe(100, 20.0 if number == when else 0.02)
        known = times.seconds(100)
        assert known is None or known < 0.025 or when < MIN_STEPS
        assert number < 2 * MIN_STEPS or known is not None
    assert times.seconds(100) == pytest.approx(0.02, rel=0.05)
