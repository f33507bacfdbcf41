"""Choices that share their prompt, blocks copied when written, and blocks swapped out and in."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.engine.host_pool import HostPool
from pagemill.engine.preemption import PreemptionCost
from pagemill.engine.request import RequestStatus
from pagemill.engine.scheduler_output import SchedulerOutput, StepResult
from tests.engine.invented import Bench, make, twin


def moves(bench: Bench) -> list[str]:
    """Kinds of all block moves, in order, as the runner makes them."""
    kinds: list[str] = []
    execute = bench.model.execute

    def spy(output: SchedulerOutput) -> StepResult:
        kinds.extend(move.kind for move in output.moves)
        return execute(output)

    bench.model.execute = spy  # type: ignore[method-assign]
    return kinds


@pytest.mark.parametrize(("prompt", "copies"), [(10, 3), (8, 0), (9, 3), (4, 0)])
def test_choices_share_the_prompt_and_copy_its_last_block_when_they_write(prompt: int, copies: int) -> None:
    bench = Bench(num_blocks=60, block_size=4)
    kinds = moves(bench)
    bench.add(make("r", range(1, prompt + 1), 9, n=4, seed=5, ignore_eos=True))
    bench.step()
    bench.step()
    full = prompt // 4
    assert bench.cache.pool.statistics().shared == full
    assert bench.cache.pool.num_used == full + 4
    bench.run()
    assert kinds == ["copy"] * copies == ["copy"] * bench.cache.statistics().copied_blocks
    for choice in range(4):
        assert bench.choices["r", choice] == twin(range(1, prompt + 1), 5, 9, ignore_eos=True, choice=choice)
    assert bench.model.computed_tokens == prompt + 4 * 8, "the prompt is computed once"


def test_choices_differ_and_end_on_their_own() -> None:
    bench = Bench(num_blocks=60, block_size=4)
    bench.add(make("r", [1, 2], 40, n=8, seed=1))
    bench.run()
    texts = [tuple(bench.choices["r", choice]) for choice in range(8)]
    assert texts == [tuple(twin([1, 2], 1, 40, choice=choice)) for choice in range(8)]
    assert len({len(text) for text in texts}) > 1
    assert sum(end.final for end in bench.choice_ends.values()) == 1
    assert {end.finish_reason for end in bench.choice_ends.values()} <= {"stop", "length"}


def test_choices_resume_where_each_of_them_was() -> None:
    whole = [twin([4, 4], 3, 10, ignore_eos=True, choice=choice) for choice in range(3)]
    bench = Bench(num_blocks=60, block_size=4)
    bench.add(make("r", [4, 4], 10, n=3, seed=3, ignore_eos=True), [whole[0][:4], whole[1], whole[2][:1]])
    bench.run()
    assert [bench.choices["r", choice] for choice in range(3)] == whole


def pressed(mode: Any, host_blocks: int = 100, **settings: Any) -> Bench:
    bench = Bench(num_blocks=1 + 12, block_size=2, num_host_blocks=host_blocks, preemption_mode=mode, **settings)
    for index in range(6):
        bench.add(make(f"r{index}", [index + 1, 9], 20, seed=index, ignore_eos=True))
    return bench


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_both_ways_of_preempting_give_the_same_tokens(mode: str) -> None:
    bench = pressed(mode)
    kinds = moves(bench)
    bench.run()
    for index in range(6):
        assert bench.tokens[f"r{index}"] == twin([index + 1, 9], index, 20, ignore_eos=True)
    statistics = bench.scheduler.statistics()
    assert statistics.preemptions > 0
    billed = sum(end.metrics.swapped_blocks for end in bench.ends.values() if end.metrics)
    if mode == "swap":
        assert statistics.swap_preemptions == statistics.preemptions and statistics.recomputed_tokens == 0
        assert statistics.swapped_blocks == kinds.count("out") == kinds.count("in") == billed > 0
        assert bench.model.computed_tokens == 6 * 21, "nothing is computed twice"
    else:
        assert statistics.swap_preemptions == statistics.swapped_blocks == billed == 0
        assert not kinds
    assert bench.cache.statistics().host_blocks_used == 0


def test_a_full_host_pool_falls_back_to_recomputing() -> None:
    bench = pressed("swap", host_blocks=5)
    bench.run()
    statistics = bench.scheduler.statistics()
    assert 0 < statistics.swap_preemptions < statistics.preemptions
    assert statistics.recomputed_tokens > 0
    for index in range(6):
        assert bench.tokens[f"r{index}"] == twin([index + 1, 9], index, 20, ignore_eos=True)


def test_abort_while_swapped_out_frees_the_host_blocks() -> None:
    bench = pressed("swap")
    victim = None
    while victim is None:
        bench.step()
        victim = next((r for r in bench.scheduler.requests() if r.status is RequestStatus.SWAPPED), None)
    assert bench.cache.statistics().host_blocks_used > 0
    bench.abort(victim.request_id)
    bench.core.check()
    assert bench.ends[victim.request_id].finish_reason == "cancelled"
    bench.run()


def test_the_cheaper_way_is_taken() -> None:
    cost = PreemptionCost()
    assert cost.prefers_swap(100, 10), "not measured: swapping measures itself"
    cost.observe_tokens(100, 1.0)
    cost.observe_moves(10, 0.1)
    assert cost.prefers_swap(100, 10)  # 0.2 s against 1 s
    assert not cost.prefers_swap(10, 10)  # 0.2 s against 0.1 s
    for _ in range(60):
        cost.observe_moves(1, 1.0)
    assert not cost.prefers_swap(100, 10)


def test_reserved_admission_never_preempts() -> None:
    bench = pressed("auto", reserve=True)
    bench.run()
    assert bench.scheduler.statistics().preemptions == 0
    for index in range(6):
        assert bench.tokens[f"r{index}"] == twin([index + 1, 9], index, 20, ignore_eos=True)


def test_host_pool_check_sees_a_leak() -> None:
    pool = HostPool(3)
    held = pool.allocate(2)
    pool.check([held])
    with pytest.raises(AssertionError, match="lost or are held twice"):
        pool.check([])
    pool.free(held)
    pool.check([])
    with pytest.raises(AssertionError, match="asked for"):
        pool.allocate(4)


def test_blocks_behind_the_window_are_let_go() -> None:
    bench = Bench(num_blocks=40, block_size=4, sliding_window=10, max_num_batched_tokens=8)
    request = bench.add(make("r", range(1, 31), 40, ignore_eos=True))
    most = 0
    while bench.core.has_requests:
        bench.step()
        if not request.is_finished and request.num_computed_tokens >= 30:
            most = max(most, sum(block != 0 for block in request.block_table.block_ids))
    assert most <= 4, "10 tokens and the next lie in four blocks of four at most"
    assert bench.tokens["r"] == twin(range(1, 31), 0, 40, ignore_eos=True, window=10)


def test_misses_are_told_by_cause() -> None:
    bench = Bench(num_blocks=1 + 8, block_size=4)
    bench.add(make("a", range(1, 11), 2))
    bench.run()
    statistics = bench.cache.statistics()
    assert (statistics.queried_tokens, statistics.hit_tokens, statistics.missed_new, statistics.missed_partial) == (
        10,
        0,
        8,
        2,
    )
    bench.add(make("evicts", [40] * 30, 2))
    bench.run()
    before = bench.cache.statistics()
    bench.add(make("again", range(1, 11), 2))
    bench.run()
    after = bench.cache.statistics()
    assert after.missed_evicted - before.missed_evicted == 8
