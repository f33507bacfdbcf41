"""Output lengths: the life table against a naive twin, without survivor bias, by tenant, in a bounded window."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from pagemill.engine.lengths import (
    MAX_TENANTS,
    MIN_OUTPUTS,
    PRIOR_MEAN,
    PRIOR_OUTPUTS,
    REBUILD_EVERY,
    SPAN,
    TABLE,
    WINDOW,
    OutputLengths,
)

NOTHING = np.zeros(0, dtype=np.int64)


def ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def refreshed(lengths: OutputLengths, running: Sequence[int] = (), rows: Sequence[int] | None = None) -> OutputLengths:
    lengths.update(ints(rows if rows is not None else [0] * len(running)), ints(running))
    return lengths


def naive_survival(ended: Sequence[int], cut: Sequence[int], running: Sequence[int], length: int) -> float:
    """P(length > x), one token after the other."""
    alive = 1.0
    for x in range(1, length + 1):
        ends = sum(value == x for value in ended) if x < TABLE else 0
        reached = sum(value >= x for value in [*ended, *cut, *running])
        if x < TABLE:
            alive *= 1.0 - (ends + PRIOR_OUTPUTS / PRIOR_MEAN) / (reached + PRIOR_OUTPUTS)
        else:
            alive *= 1.0 - 1.0 / PRIOR_MEAN
    return alive


def test_the_table_is_that_of_the_naive_twin() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        lengths = OutputLengths()
        ended, cut = [], []
        for _ in range(rng.randrange(60)):
            length, by_itself = rng.randrange(1, 80), rng.random() < 0.7
            (ended if by_itself else cut).append(length)
            lengths.observe("a", length, ended=by_itself)
        running = [rng.randrange(90) for _ in range(rng.randrange(40))]
        lengths._all.fresh = REBUILD_EVERY  # whatever came last counts
        refreshed(lengths, running)
        for x in (0, 1, 5, 30, 79, 80, 100, 400):
            expected = naive_survival(ended, cut, running, x)
            assert lengths.survival(ints([0]), ints([x]))[0] == pytest.approx(expected, rel=1e-9), (seed, x)


def test_expected_remaining_is_the_quantile_of_the_table() -> None:
    rng = random.Random(3)
    lengths = OutputLengths()
    for _ in range(500):
        lengths.observe("a", int(rng.expovariate(1 / 120)) + 1, ended=True)
    refreshed(lengths)

    def chance(length: int) -> float:
        return float(lengths.survival(ints([lengths.row_of("a")]), ints([length]))[0])

    for generated in (0, 1, 17, 100, 333):
        for quantile in (0.1, 0.5, 0.9):
            brute = next(r for r in range(1, 5000) if chance(generated + r) <= chance(generated) * (1 - quantile))
            assert lengths.expected_remaining("a", generated, 100_000, quantile) == brute


def test_what_is_left_is_never_more_than_max_tokens_leaves_and_never_nothing() -> None:
    lengths = OutputLengths()
    for generated, max_tokens in ((0, 5), (4, 5), (5, 5), (9, 5), (100, 101)):
        left = lengths.expected_remaining("a", generated, max_tokens, 0.99)
        assert 1 <= left <= max(1, max_tokens - generated)


@pytest.mark.parametrize("generated", [0, TABLE - 1, TABLE, SPAN - 1, SPAN, 10 * SPAN])
def test_beyond_what_was_seen_the_prior_speaks(generated: int) -> None:
    lengths = OutputLengths()
    left = lengths.expected_remaining("nobody", generated, 10**9, 0.5)
    assert left == pytest.approx(PRIOR_MEAN * math.log(2), rel=0.02)


def test_outputs_of_one_length_are_foreseen_to_the_token() -> None:
    lengths = OutputLengths()
    for _ in range(200):
        lengths.observe("a", 100, ended=True)
    refreshed(lengths)
    assert lengths.expected_remaining("a", 0, 4096, 0.5) == 100
    assert lengths.expected_remaining("a", 60, 4096, 0.5) == 40


DISTRIBUTIONS: dict[str, Callable[[random.Random], float]] = {
    "exponential": lambda rng: rng.expovariate(1 / 300),
    "log-normal": lambda rng: rng.lognormvariate(5.3, 0.9),
    "two kinds": lambda rng: rng.gauss(30, 5) if rng.random() < 0.5 else rng.gauss(600, 60),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("age", [100, 200, 400])
def test_the_short_ones_that_finish_first_do_not_mislead(name: str, age: int) -> None:
    """400 requests start together. After `age` steps only the shorter ones have finished; the table still tells what
    share of all passes `age`: within 0.03, where the finished ones alone say that nobody does."""
    rng = random.Random(age)
    true = [max(1, int(DISTRIBUTIONS[name](rng))) for _ in range(400)]
    lengths = OutputLengths()
    for length in sorted(true):
        if length <= age:
            lengths.observe("a", length, ended=True)
    refreshed(lengths, [age] * sum(length > age for length in true))
    share = sum(length > age for length in true) / len(true)
    estimate = float(lengths.survival(ints([0]), ints([age]))[0])
    assert estimate == pytest.approx(share, abs=0.03)
    assert share > 0.05


def test_outputs_cut_off_by_max_tokens_do_not_count_as_short() -> None:
    """Half of the requests allow 100 tokens only. The others' median is foreseen within 10 %."""
    rng = random.Random(1)
    lengths = OutputLengths()
    for number in range(WINDOW):
        length = int(rng.expovariate(1 / 300)) + 1
        cut = number % 2 == 0 and length > 100
        lengths.observe("a", 100 if cut else length, ended=not cut)
    refreshed(lengths)
    assert lengths.expected_remaining("a", 0, 4096, 0.5) == pytest.approx(300 * math.log(2), rel=0.1)


def test_a_tenant_is_judged_by_its_own_outputs_once_there_are_enough() -> None:
    lengths = OutputLengths()
    for _ in range(300):
        lengths.observe("talker", 500, ended=True)
    for number in range(MIN_OUTPUTS):
        assert lengths.row_of("terse") == 0, number
        lengths.observe("terse", 5, ended=True)
        refreshed(lengths)
    assert lengths.expected_remaining("terse", 0, 4096, 0.5) == 5
    assert lengths.expected_remaining("talker", 0, 4096, 0.5) == 500
    assert lengths.expected_remaining("stranger", 0, 4096, 0.5) == 500


def test_running_outputs_count_for_their_own_tenant() -> None:
    """A tenant whose outputs have become long shows it before the first of them ends."""
    lengths = OutputLengths()
    for tenant in ("a", "b"):
        for _ in range(100):
            lengths.observe(tenant, 50, ended=True)
        refreshed(lengths)
    for tenant in ("a", "b"):
        for _ in range(REBUILD_EVERY):
            lengths.observe(tenant, 50, ended=True)
    row = lengths.row_of("a")
    refreshed(lengths, [300] * 132, [row] * 132)
    share = float(lengths.survival(ints([row]), ints([200]))[0])
    assert share == pytest.approx(0.5, abs=0.02 + 1 - (1 - 1 / PRIOR_MEAN) ** 3)
    assert float(lengths.survival(ints([lengths.row_of("b")]), ints([200]))[0]) < 0.02


def test_the_past_is_forgotten() -> None:
    lengths = OutputLengths()
    for _ in range(3 * WINDOW):
        lengths.observe("a", 900, ended=True)
    refreshed(lengths)
    for _ in range(WINDOW):
        lengths.observe("a", 40, ended=True)
    refreshed(lengths)
    assert lengths.num_observed == WINDOW
    assert lengths.expected_remaining("a", 0, 4096, 0.99) == 40


def test_tenants_are_bounded_and_the_least_recent_one_makes_room() -> None:
    lengths = OutputLengths()
    for number in [*range(MAX_TENANTS), 0, MAX_TENANTS]:
        for _ in range(MIN_OUTPUTS):
            lengths.observe(f"t{number}", 10 + number, ended=True)
        refreshed(lengths)
    rows = [lengths.row_of(f"t{number}") for number in range(MAX_TENANTS + 1)]
    assert rows[1] == 0, "it is judged as everybody again"
    assert sorted(row for row in rows if row) == list(range(1, MAX_TENANTS + 1))
    for number in (0, 30, MAX_TENANTS):
        assert lengths.expected_remaining(f"t{number}", 0, 4096, 0.5) == 10 + number


def test_outputs_longer_than_the_table_are_not_taken_for_ones_that_end_with_it() -> None:
    lengths = OutputLengths()
    for _ in range(100):
        lengths.observe("a", TABLE + 2000, ended=True)
    refreshed(lengths)
    assert lengths.expected_remaining("a", 0, 10**6, 0.3) > TABLE


def test_a_table_is_not_made_anew_for_every_output() -> None:
    lengths = OutputLengths()
    for _ in range(WINDOW):
        lengths.observe("a", 50, ended=True)
    refreshed(lengths)
    for number in range(REBUILD_EVERY):
        assert lengths._all.fresh == number
        lengths.observe("a", 50, ended=True)
        refreshed(lengths)
    assert lengths._all.fresh == 0
