"""What the simulator is compared with: contiguous reservations, and a naive engine on blocks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.engine.simulator.baseline import simulate_contiguous, simulate_naive
from pagemill.engine.simulator.simulation import simulate
from pagemill.engine.simulator.trace import Trace
from tests.engine.simulated import BACKLOG, drawn, setup, trace_of


def test_contiguous_runs_what_its_reservations_leave() -> None:
    trace = trace_of(*[(100, 28)] * 40)
    engine = simulate(trace, setup(pool_tokens=2048), BACKLOG)
    by_size = {
        size: simulate_contiguous(trace, setup(pool_tokens=2048), BACKLOG, size) for size in (512, "pow2", "exact")
    }
    assert [by_size[size].running_peak for size in (512, "pow2", "exact")] == [4, 16, 16]
    assert by_size[512].running_backlogged == pytest.approx(4)
    assert engine.running_peak > 16
    held, reserved = sum(range(100, 128)), 512 * 28
    assert by_size[512].waste_life_percent == pytest.approx(100 * (1 - held / reserved))
    assert all(result.preemptions == 0 and result.output_tokens == 40 * 28 for result in by_size.values())


def test_contiguous_rounds_up_and_refuses() -> None:
    trace = trace_of((64, 1), (300, 213), (600, 1))
    exact = simulate_contiguous(trace, setup(pool_tokens=1024), BACKLOG, "exact")
    assert exact.refused == {} and exact.waste_end_percent == pytest.approx(100 * 3 / (65 + 513 + 601))
    rounded = simulate_contiguous(trace, setup(pool_tokens=1024), BACKLOG, "pow2")
    assert rounded.waste_end_percent == pytest.approx(100 * (1 - (64 + 512 + 600) / (128 + 1024 + 1024)))
    short = simulate_contiguous(trace, setup(pool_tokens=1024), BACKLOG, 512)
    assert short.refused == {"never_fits": 2} and short.finished == 1


def test_the_naive_twin_preempts_whoever_came_last() -> None:
    # Of 8 blocks of 4 the first has 5 at 17 tokens, when the second needs a fourth for its 13th.
    trace = trace_of((12, 10), (8, 14))
    result = simulate_naive(trace, setup(pool_tokens=32, block_size=4), BACKLOG)
    assert (result.preemptions, result.recomputed_tokens) == (1, 12)
    assert result.finished == 2 and result.output_tokens == 24
    assert simulate_naive(trace, setup(pool_tokens=48, block_size=4), BACKLOG).preemptions == 0


def naive_by_counting(trace: Trace, blocks: int, size: int) -> tuple[int, int]:
    """The naive twin in a few lines, without clocks: preemptions and steps."""
    waiting = [[r.prompt_tokens, r.output_tokens, 0, 0] for r in trace.requests]
    running: list[list[int]] = []
    free, keep, preemptions, steps, has_preempted = blocks, int(blocks * 0.01), 0, 0, False
    while waiting or running:
        while waiting and not has_preempted:
            prompt, _, generated, _ = waiting[0]
            need = -(-(prompt + generated) // size)
            if free - need < (keep if running else 0):
                break
            free -= need
            running.append([*waiting.pop(0)[:3], need])
        steps, has_preempted, place, ended = steps + 1, False, 0, []
        while place < len(running):
            sequence = running[place]
            need = -(-(sequence[0] + sequence[2]) // size) - sequence[3]
            while need > free and sequence in running:
                victim = running.pop()
                free += victim[3]
                waiting.insert(0, [*victim[:3], 0])
                preemptions, has_preempted = preemptions + 1, True
            if len(running) <= place:
                break
            free -= max(need, 0)
            sequence[3] += max(need, 0)
            sequence[2] += 1
            if sequence[2] == sequence[1]:
                free += sequence[3]
                ended.append(sequence)
            place += 1
        running = [sequence for sequence in running if sequence not in ended]
    return preemptions, steps


@pytest.mark.parametrize("seed", range(5))
def test_the_naive_twin_counts_right(seed: int) -> None:
    trace = drawn(60, seed, prompts=70, outputs=150)
    result = simulate_naive(trace, setup(pool_tokens=1808, max_num_seqs=1000), BACKLOG)
    assert (result.preemptions, result.steps) == naive_by_counting(trace, 113, 16)
    assert result.preemptions > 5


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([1, 4, 16]), st.sampled_from([None, 64]))
def test_twins_serve_everybody(seed: int, size: int, budget: int | None) -> None:
    trace = drawn(25, seed, prompts=80, outputs=80)
    small = setup(pool_tokens=320, block_size=size, max_num_batched_tokens=budget or 256)
    tokens = sum(r.output_tokens for r in trace.requests)
    for result in (
        simulate_naive(trace, small, BACKLOG, budget),
        simulate_contiguous(trace, small, BACKLOG, "pow2"),
        simulate(trace, small, BACKLOG),
    ):
        assert result.finished == 25 and result.output_tokens == tokens
        least = sum(r.prompt_tokens + r.output_tokens - 1 for r in trace.requests)
        assert result.computed_tokens == least + result.recomputed_tokens
        assert result.used_percent <= 100
