"""Fewer threads beside a busy neighbour: the decision by invented measurements, and a team that does with fewer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import torch

from pagemill.kernels.cpu.ops import CpuOps
from pagemill.kernels.cpu.team import Team
from pagemill.kernels.cpu.watchdog import LONGEST_PAUSE_S, LOST_SHARE, TRIAL_S, Watchdog
from tests.kernels.test_team import asleep, count_parts, meet

Machine = Callable[[float, int], tuple[float, float]]
"""(now, threads) -> what a step takes, and what of it is lost."""


def run(watchdog: Watchdog, begin: float, end: float, machine: Machine, tokens: int = 1) -> Counter[int]:
    """Steps from one moment to another; seconds spent with each number of threads."""
    spent: Counter[int] = Counter()
    now = begin
    while now < end:
        threads = watchdog.threads
        seconds, lost = machine(now, threads)
        now += seconds
        spent[threads] += seconds  # type: ignore[assignment]
        watchdog.observe(now, seconds, lost, tokens)
    return spent


def quiet(now: float, threads: int) -> tuple[float, float]:
    return (0.0105, 0.0) if threads == 2 else (0.017, 0.0)


def beside_a_burner(now: float, threads: int) -> tuple[float, float]:
    """As measured on two cores: 57 tokens/s with both, 77 with one."""
    return (1 / 57, 0.4 / 57) if threads == 2 else (1 / 77, 0.0)


def test_where_nobody_disturbs_nothing_is_tried() -> None:
    assert set(run(Watchdog(2), 0, 1000, quiet)) == {2}


def test_a_neighbour_costs_a_thread_soon_and_it_is_tried_again_ever_more_rarely() -> None:
    watchdog = Watchdog(2)
    run(watchdog, 0, 10, quiet)
    run(watchdog, 10, 11.5, beside_a_burner)
    assert watchdog.settled == 1
    spent = run(watchdog, 11.5, 311.5, beside_a_burner)
    assert watchdog.settled == 1
    assert 0 < spent[2] / spent[1] < 0.02


def test_the_thread_comes_back_when_the_neighbour_has_gone() -> None:
    watchdog = Watchdog(2)
    run(watchdog, 0, 300, beside_a_burner)
    run(watchdog, 300, 300 + LONGEST_PAUSE_S + 3 * TRIAL_S, quiet)
    assert watchdog.settled == watchdog.threads == 2
    # And a neighbour that comes back is met as quickly as the first.
    run(watchdog, 340, 341.5, beside_a_burner)
    assert watchdog.settled == 1


def test_waiting_that_fewer_threads_do_not_cure_keeps_them_all() -> None:
    """A busy event loop, a neighbour of a moment: two threads lose time, and are faster than one all the same."""
    watchdog = Watchdog(2)
    spent = run(watchdog, 0, 300, lambda now, threads: (0.013, 0.004) if threads == 2 else (0.017, 0.0))
    assert watchdog.settled == 2
    assert spent[1] / spent[2] < 0.02


def test_many_threads_come_back_one_by_one() -> None:
    """One of 16 more brings little, less than a trial can see: where nobody disturbs that is no reason against it."""
    watchdog = Watchdog(16)

    def crowded(now: float, threads: int) -> tuple[float, float]:
        return (0.01, 0.0) if threads <= 13 else (0.02 + 0.01 * (threads - 13), 0.012)

    run(watchdog, 0, 20, crowded)
    assert watchdog.settled == 13
    run(watchdog, 20, 20 + 2 * LONGEST_PAUSE_S, lambda now, threads: (0.16 / threads, 0.0))
    assert watchdog.settled == 16


def test_steps_of_many_tokens_are_not_taken_for_slow_ones() -> None:
    """Decodes while the number is tried that is in use, prompts while it is another: compared by tokens."""
    watchdog = Watchdog(2)

    def work(now: float, threads: int, tokens: int) -> None:
        seconds = max(tokens, 16) * (0.001 if threads == 2 else 0.0018)
        watchdog.observe(now, seconds, seconds * 2 * LOST_SHARE, tokens)

    now = 0.0
    for _ in range(2000):
        now += 0.02
        work(now, watchdog.threads, 1 if watchdog.threads == 2 else 512)
    assert watchdog.settled == 2


def test_a_team_does_with_fewer_and_takes_them_back() -> None:
    team = Team(3)
    for threads in (3, 1, 2, 3, 1, 3):
        team.use(threads)
        assert team.threads == threads
        counts = np.zeros(25, np.int64)
        count_parts(team.board(), counts)
        parts = 8 * threads if threads > 1 else 1
        assert counts[:parts].tolist() == [1] * parts
        assert counts[-1] == parts


def test_a_helper_that_is_not_in_use_sleeps_through_calls() -> None:
    team = Team(3)
    count_parts(team.board(), np.zeros(25, np.int64))
    team.use(2)
    assert asleep(team, 2)
    for _ in range(200):
        count_parts(team.board(), np.zeros(25, np.int64))
    assert asleep(team, 2)
    team.use(3)
    counts = np.zeros(4, np.int64)
    meet(team.board(), counts)
    assert counts[:3].tolist() == [1] * 3 and counts[3] < 100


def test_steps_are_watched_and_give_the_same_bits_with_any_number_of_threads() -> None:
    ops = CpuOps(threads=2)
    x, weight = torch.randn(200, 576), torch.ones(576)
    expected = ops.rms_norm(x, weight, 1e-5)
    for threads in (1, 2):
        ops._clock._watchdog.threads = threads
        with ops.step(200):
            pass
        assert ops.threads == threads
        with ops.step(200):
            assert torch.equal(ops.rms_norm(x, weight, 1e-5), expected)
