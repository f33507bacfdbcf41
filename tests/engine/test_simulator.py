"""The simulator runs the real block code: its figures against closed forms, settings, deadlines, tenants."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable

import pytest

from pagemill.engine.errors import ConfigError
from pagemill.engine.simulator.arrivals import Arrivals
from pagemill.engine.simulator.baseline import simulate_naive
from pagemill.engine.simulator.device import Device, TimingModel
from pagemill.engine.simulator.result import Result
from pagemill.engine.simulator.simulation import Simulation, simulate
from pagemill.engine.simulator.tokens import Run, TokenRuns
from pagemill.engine.simulator.trace import Trace, TraceRequest
from tests.engine.simulated import BACKLOG, DECODE, FIXED, KV, MOVE, PAIR, PREFILL, TRACE, drawn, same, setup, trace_of


def life_waste(trace: Trace, size: int) -> float:
    """Empty share of the allocated slots over all steps that bring a token, in closed form."""
    held = allocated = 0
    for request in trace.requests:
        for context in range(request.prompt_tokens, request.prompt_tokens + request.output_tokens):
            held += context
            allocated += -(-context // size) * size
    return 100 * (1 - held / allocated)


@pytest.mark.parametrize("size", [1, 8, 16, 64])
@pytest.mark.parametrize("pool", [4096, 100_000])
def test_waste_is_what_the_lengths_say(size: int, pool: int) -> None:
    trace = drawn(60)
    result = simulate(trace, setup(block_size=size, pool_tokens=pool), BACKLOG)
    assert result.waste_life_percent == pytest.approx(life_waste(trace, size), abs=1e-9)
    ends = [r.prompt_tokens + r.output_tokens - 1 for r in trace.requests]
    assert result.waste_end_percent == pytest.approx(100 * (1 - sum(ends) / sum(-(-e // size) * size for e in ends)))


@pytest.mark.parametrize("caching", [True, False])
def test_everybody_gets_the_recorded_tokens_under_pressure(caching: bool) -> None:
    trace = drawn(80, prompts=60, outputs=300)
    simulation = Simulation(trace, setup(pool_tokens=1600, max_tokens=None, enable_prefix_caching=caching), BACKLOG)
    result = simulation.run()
    simulation.core.check()
    assert result.finished == 80 and not result.refused and not result.cut_short
    assert result.output_tokens == sum(r.output_tokens for r in trace.requests)
    assert result.preemptions > 0 and result.recomputed_tokens > 0
    least = sum(r.prompt_tokens + r.output_tokens - 1 for r in trace.requests)
    assert result.computed_tokens == least + result.recomputed_tokens
    assert result.preemptions_per_1000 == pytest.approx(result.preemptions / 0.080)
    gaps, first, total = result.latency.between_tokens, result.latency.ttft, result.latency.total
    assert gaps is not None and first is not None and total is not None
    # All gaps of a request, those that a preemption made included, lie between its first token and its last.
    assert gaps.mean * (result.output_tokens - 80) == pytest.approx(80 * (total.mean - first.mean))
    assert 60 < result.used_percent <= 100


def test_shared_prefixes_are_found() -> None:
    def call(prompt: tuple[tuple[int, int], ...], output: tuple[int, int]) -> TraceRequest:
        return TraceRequest(prompt, (output,), sum(count for _, count in prompt), output[1], 0.0)

    shared = Trace("shared", (call(((1, 64), (1000, 32)), (2000, 8)), call(((1, 64), (3000, 32)), (4000, 8))))
    one_by_one = Arrivals(mode="sessions", sessions=1)
    result = simulate(shared, setup(), one_by_one)
    assert (result.prefix_hit_tokens, result.prefix_queried_tokens) == (64, 192)
    assert result.prefix_hit_percent == pytest.approx(100 / 3)
    assert simulate(shared, setup(enable_prefix_caching=False), one_by_one).prefix_hit_tokens == 0
    answered = Trace("answered", (call(((1, 40),), (41, 41)), call(((1, 100),), (2000, 1))))
    assert simulate(answered, setup(), one_by_one).prefix_hit_tokens == 80  # 80 of 81 have keys: 5 full blocks


def hits_of_a_plain_cache(calls: Iterable[TraceRequest], blocks: int, size: int) -> int:
    """Prompt tokens found by one call after the other in a pool of `blocks` that forgets what was let go longest ago,
    of one call the last block first. The blocks of the call that runs are in it."""
    kept: dict[int, None] = {}  # last token of each full block, which is all before it too; oldest first
    hits = 0
    for call in calls:
        tokens = [*TokenRuns(call.prompt), *TokenRuns(call.output)]
        needed = len(tokens) - 1
        names = tokens[size - 1 : needed : size]
        found = 0
        while found < (call.prompt_tokens - 1) // size and names[found] in kept:
            found += 1
        hits += found * size
        for name in names:
            kept.pop(name, None)
        while len(kept) > blocks - -(-needed // size):
            del kept[next(iter(kept))]
        kept |= dict.fromkeys(reversed(names))
    return hits


@pytest.mark.parametrize("blocks", [60, 90, 130, 1000])
def test_hits_are_those_of_a_plain_cache(blocks: int) -> None:
    draw = random.Random(blocks)
    calls: list[TraceRequest] = []
    last: dict[int, int] = {}
    first = 1000
    for index in range(150):
        # Six sessions take turns: a common beginning of 40 tokens, then each goes on from its own last answer.
        session = index % 6
        before = last.get(session)
        said: tuple[Run, ...] = ((1, 40),)
        if before is not None and calls[before].prompt_tokens < 450:
            said = calls[before].prompt + calls[before].output
        prompt, output = (*said, (first, draw.randint(5, 60))), (first + 100, draw.randint(2, 40))
        last[session] = len(calls)
        calls.append(TraceRequest(prompt, (output,), sum(count for _, count in prompt), output[1], float(index)))
        first += 200
    result = simulate(Trace("turns", tuple(calls)), setup(pool_tokens=blocks * 16, max_num_seqs=1), BACKLOG)
    assert result.prefix_hit_tokens == hits_of_a_plain_cache(calls, blocks, 16)


def test_what_can_never_run_is_refused_by_name() -> None:
    trace = trace_of((50, 5), (500, 5), (10, 90), (99, 30), (100, 1))
    result = simulate(trace, setup(pool_tokens=256, max_model_len=100, max_tokens=None), BACKLOG)
    assert result.refused == {"prompt_too_long": 2}
    assert (result.finished, result.cut_short) == (3, 1)  # one token of 30 after the prompt of 99
    assert result.refusal_ms is not None and result.refusal_ms.max == 0
    result = simulate(trace, setup(pool_tokens=256), BACKLOG)
    assert result.refused == {"never_fits": 1}


def test_swapped_requests_come_back_without_computing_again() -> None:
    trace = drawn(80, prompts=60, outputs=300)
    small = setup(pool_tokens=1600, max_tokens=None, swap_tokens=100_000, preemption_mode="swap")
    simulation = Simulation(trace, small, BACKLOG)
    result = simulation.run()
    simulation.core.check()
    assert result.preemptions == result.swap_preemptions > 0 and result.recomputed_tokens == 0
    assert result.finished == 80 and result.swapped_blocks > result.swap_preemptions
    assert result.output_tokens == sum(r.output_tokens for r in trace.requests)
    alike = simulate(trace, setup(pool_tokens=1600, max_tokens=None, swap_tokens=0, preemption_mode="swap"), BACKLOG)
    assert alike.swap_preemptions == 0 < alike.recomputed_tokens
    slower = Device("slower", TimingModel(FIXED, PREFILL, DECODE, KV, PAIR, 2 * MOVE), 4096, 100_000, 64, 256)
    longer = simulate(trace, dataclasses.replace(small, device=slower), BACKLOG)
    assert longer.duration_s - result.duration_s == pytest.approx(2 * result.swapped_blocks * 16 * MOVE)
    slow = Device("slow", TimingModel(FIXED, PREFILL, DECODE, KV, PAIR, 1.0), 4096, 100_000, 64, 256)
    assert simulate(trace, setup(device=slow, pool_tokens=1600, max_tokens=None), BACKLOG).swap_preemptions == 0


def test_without_a_forecast_the_pool_is_filled_until_somebody_must_give_way() -> None:
    trace = drawn(120, prompts=40, outputs=300)
    small = setup(pool_tokens=4096)
    plain = simulate(trace, dataclasses.replace(small, forecast="none"), BACKLOG)
    careful = simulate(trace, small, BACKLOG)
    naive = simulate_naive(trace, small, BACKLOG, budget=small.budget)
    for reckless in (plain, naive):
        assert reckless.preemptions >= 3 * careful.preemptions
        assert reckless.preempted_s > 3 * careful.preempted_s
        assert 0 < reckless.preempted_requests <= reckless.preemptions
        assert reckless.latency.longest_gap is not None and careful.latency.longest_gap is not None
        assert reckless.latency.longest_gap.p90 > 2 * careful.latency.longest_gap.p90


def test_reserve_never_preempts() -> None:
    trace = drawn(80, prompts=60, outputs=300)
    reserved = simulate(trace, setup(pool_tokens=1600, max_tokens=None, admission="reserve"), BACKLOG)
    assert reserved.preemptions == 0 and reserved.finished == 80
    optimistic = simulate(trace, setup(pool_tokens=1600, max_tokens=None), BACKLOG)
    assert optimistic.running_backlogged is not None and reserved.running_backlogged is not None
    assert optimistic.running_backlogged > reserved.running_backlogged


def test_who_is_not_done_by_the_deadline_is_aborted() -> None:
    trace = trace_of(*[(100, 40)] * 12, times=[0.0] * 11 + [0.7])
    simulation = Simulation(trace, setup(pool_tokens=600, ttl_s=1.5, refuse_late=False), TRACE)
    result = simulation.run()
    simulation.core.check()
    assert result.failed.keys() == {"deadline_exceeded"} and not result.refused
    assert 0 < result.finished < 12 and result.finished + result.failed["deadline_exceeded"] == 12
    assert result.latency.total is not None and result.latency.total.max <= 1500
    assert result.duration_s <= 0.7 + 1.5 + 0.2
    assert result.output_tokens == 40 * result.finished + result.wasted_tokens and result.wasted_tokens > 0
    assert simulate(trace, setup(pool_tokens=600), TRACE).failed == {}


def test_who_cannot_start_by_the_deadline_is_refused_at_once() -> None:
    trace = trace_of(*[(100, 40)] * 300, times=[0.05 * index for index in range(300)])
    late = simulate(trace, setup(pool_tokens=600, ttl_s=6.0, refuse_late=False), TRACE)
    early = simulate(trace, setup(pool_tokens=600, ttl_s=6.0), TRACE)
    assert late.failed["deadline_exceeded"] > 100 and not late.refused
    assert early.refused["deadline_unreachable"] > 100
    assert early.refusal_ms is not None and early.refusal_ms.max == 0
    assert early.finished >= late.finished and sum(early.failed.values()) < sum(late.failed.values())
    assert early.finished + sum(early.refused.values()) + sum(early.failed.values()) == 300


def test_caps_on_what_waits() -> None:
    trace = trace_of(*[(100, 40)] * 30)
    few = simulate(trace, setup(pool_tokens=600, max_waiting_requests=7), BACKLOG)
    assert few.refused == {"queue_full": 23} and few.finished == 7
    small = simulate(trace, setup(pool_tokens=600, max_waiting_prompt_tokens=950), BACKLOG)
    assert small.refused == {"queue_full": 21} and small.finished == 9


def first_token_ms(result: Result) -> dict[str, float]:
    return {group.name: group.ttft.mean for group in result.groups if group.ttft is not None}


def test_fair_spares_the_others_one_tenants_burst() -> None:
    trace = trace_of(*[(50, 20)] * 60, tenants=["heavy"] * 40 + ["a", "b"] * 10)
    small = setup(pool_tokens=1024, max_num_seqs=4)
    fcfs = first_token_ms(simulate(trace, small, BACKLOG))
    fair = first_token_ms(simulate(trace, dataclasses.replace(small, scheduling_policy="fair"), BACKLOG))
    assert fcfs["heavy"] < fcfs["2 others"]
    assert fair["2 others"] < 0.7 * fcfs["2 others"] and fair["2 others"] < fair["heavy"]


def test_classes_are_drawn_by_share_and_served_by_priority() -> None:
    trace = trace_of(*[(50, 20)] * 200).classified([30, 50, 20], seed=3)
    small = setup(pool_tokens=1024, max_num_seqs=8)
    result = simulate(trace, dataclasses.replace(small, scheduling_policy="priority"), BACKLOG)
    assert [group.name for group in result.groups] == ["priority 0", "priority 1", "priority 2"]
    assert [group.share_percent for group in result.groups] == pytest.approx([30, 50, 20], abs=8)
    times = first_token_ms(result)
    assert times["priority 0"] < times["priority 1"] < times["priority 2"]
    equal = first_token_ms(simulate(trace, small, BACKLOG))
    assert max(equal.values()) < 1.3 * min(equal.values())


def test_a_run_can_be_repeated_exactly() -> None:
    trace = drawn(50, outputs=250)
    first, second = (simulate(trace, setup(pool_tokens=2048), Arrivals(mode="poisson", rate=20)) for _ in range(2))
    assert same(first) == same(second)
    assert same(first) != same(simulate(trace, setup(pool_tokens=2048), Arrivals(mode="poisson", rate=20, seed=1)))


def test_tenants_are_told_apart() -> None:
    trace = trace_of(*[(50, 20)] * 40, tenants=["heavy"] * 30 + ["a", "b"] * 5)
    result = simulate(trace, setup(pool_tokens=512), BACKLOG)
    heavy, others = result.groups
    assert (heavy.name, heavy.share_percent, others.name) == ("heavy", 75, "2 others")
    assert (heavy.finished, others.finished) == (30, 10)
    assert heavy.ttft is not None and others.ttft is not None
    assert heavy.ttft.mean < others.ttft.mean  # first come, first served: the others came last
    assert simulate(trace_of((5, 5)), setup(), BACKLOG).groups == ()


def test_the_time_line_covers_the_run() -> None:
    result = simulate(trace_of((50, 20), (50, 20), times=[0.0, 60.0]), setup(), TRACE)
    line = result.time_line
    assert line is not None and line.slice_s * len(line.running) == pytest.approx(result.duration_s)
    assert max(line.running) == 1 and line.running[200] == 0 and line.running[0] > 0
    assert max(line.used_percent) == pytest.approx(100 * 69 / 4096, rel=0.2)


def test_settings_that_make_no_sense() -> None:
    for bad in ({"block_size": 0}, {"pool_tokens": 8}, {"max_num_seqs": 0}, {"max_tokens": 0}, {"max_model_len": 0}):
        with pytest.raises(ConfigError):
            setup(**bad)
    for fixed in (-1.0, 0.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError):
            TimingModel(fixed, 0, 0, 0, 0, 0)
