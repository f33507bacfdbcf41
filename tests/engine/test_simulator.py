"""The simulator: times that can be reckoned by hand, the real block code's figures against closed forms, twins."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.engine.errors import ConfigError
from pagemill.engine.simulator.arrivals import Arrivals
from pagemill.engine.simulator.baseline import simulate_contiguous, simulate_naive
from pagemill.engine.simulator.device import Device, StepLoad, TimingModel
from pagemill.engine.simulator.result import Quantiles, Result
from pagemill.engine.simulator.setup import Setup
from pagemill.engine.simulator.simulation import Simulation, simulate
from pagemill.engine.simulator.tokens import Run, TokenRuns
from pagemill.engine.simulator.trace import Trace, TraceRequest

FIXED, PREFILL, DECODE, KV, PAIR, MOVE = 10e-3, 1e-3, 2e-3, 1e-6, 1e-7, 1e-5
DEVICE = Device("test", TimingModel(FIXED, PREFILL, DECODE, KV, PAIR, MOVE), 4096, 0, 64, 256)
BACKLOG = Arrivals(mode="backlog")
TRACE = Arrivals(mode="trace")


def trace_of(*lengths: tuple[int, int], times: list[float] | None = None, tenants: list[str] | None = None) -> Trace:
    """Requests of (prompt, output) tokens that share nothing."""
    requests, first = [], 1
    for index, (prompt, output) in enumerate(lengths):
        requests.append(
            TraceRequest(
                prompt=((first, prompt),),
                output=((first + prompt, output),),
                prompt_tokens=prompt,
                output_tokens=output,
                arrival_s=times[index] if times else 0.0,
                tenant=tenants[index] if tenants else "default",
            )
        )
        first += prompt + output
    return Trace("made", tuple(requests))


def drawn(count: int, seed: int = 0, prompts: int = 200, outputs: int = 120) -> Trace:
    draw = random.Random(seed)
    return trace_of(*((draw.randint(1, prompts), draw.randint(1, outputs)) for _ in range(count)))


def setup(**changes: Any) -> Setup:
    return Setup(**{"device": DEVICE, **changes})


def same(result: Result) -> dict[str, Any]:
    fields = result.to_dict()
    del fields["wall_s"]
    return fields


# -- time ------------------------------------------------------------------------------------------------------------


def test_the_times_of_a_lone_request() -> None:
    result = simulate(trace_of((40, 3)), setup(), BACKLOG)
    prefill = FIXED + 40 * PREFILL + 40 * KV + 40 * 41 / 2 * PAIR
    decodes = [FIXED + DECODE + context * KV for context in (41, 42)]
    latency = result.latency
    assert latency.queue is not None and latency.ttft is not None and latency.total is not None
    assert latency.queue.max == 0
    assert latency.ttft.max == pytest.approx(1000 * prefill)
    assert latency.total.max == pytest.approx(1000 * (prefill + sum(decodes)))
    assert latency.between_tokens is not None
    assert latency.between_tokens.max == pytest.approx(1000 * decodes[1])
    assert latency.between_tokens.mean == pytest.approx(1000 * sum(decodes) / 2)
    assert (result.steps, result.output_tokens, result.computed_tokens) == (3, 3, 42)
    assert result.output_tokens_per_s == pytest.approx(3 / (prefill + sum(decodes)))


def test_a_long_prompt_costs_its_chunks() -> None:
    result = simulate(trace_of((700, 1)), setup(), BACKLOG)  # a budget of 256 and nobody beside it
    load = StepLoad()
    for start, tokens in ((0, 256), (256, 256), (512, 188)):
        load.add_prefill(start, tokens)
    assert load.pairs == 700 * 701 // 2 and load.kv_tokens == 256 + 512 + 700
    assert result.duration_s == pytest.approx(2 * FIXED + DEVICE.timing.seconds(load))


def test_who_arrives_during_a_step_has_waited_since_then() -> None:
    first_step = FIXED + 40 * (PREFILL + KV) + 820 * PAIR
    arrived = first_step / 4
    result = simulate(trace_of((40, 1), (40, 1), times=[0.0, arrived]), setup(), TRACE)
    assert result.latency.queue is not None
    assert result.latency.queue.max == pytest.approx(1000 * (first_step - arrived))


def test_idle_time_passes() -> None:
    result = simulate(trace_of((5, 1), (5, 1), times=[0.0, 100.0]), setup(), TRACE)
    assert result.duration_s == pytest.approx(100 + FIXED + 5 * (PREFILL + KV) + 15 * PAIR)
    assert result.latency.queue is not None and result.latency.queue.max == 0
    assert result.running_mean < 0.01
    assert result.running_backlogged is None


def test_a_gap_between_tokens_counts_once_for_each_request() -> None:
    result = simulate(trace_of((8, 50), (8, 50), (8, 2)), setup(), BACKLOG)
    gaps = result.latency.between_tokens
    assert gaps is not None
    first = FIXED + 3 * DECODE + 27 * KV
    assert gaps.max == pytest.approx(1000 * first)
    both = sum(2 * (FIXED + 2 * DECODE + 2 * (9 + i) * KV) for i in range(1, 49))
    assert gaps.mean == pytest.approx(1000 * (3 * first + both) / 99)


def test_the_longest_gap_of_each_request() -> None:
    # The second prompt is computed while the first request decodes; the third request has no gap at all.
    result = simulate(trace_of((8, 30), (100, 3), (8, 1), times=[0.0, 0.05, 10.0]), setup(), TRACE)
    longest = result.latency.longest_gap
    assert longest is not None
    beside = FIXED + DECODE + 100 * PREFILL + 5050 * PAIR
    assert 1000 * beside < longest.max < 1000 * beside + 1
    assert longest.mean == pytest.approx((longest.max + 1000 * (FIXED + 2 * DECODE)) / 2, rel=0.01)


def test_a_request_that_fails_was_silent_until_then() -> None:
    # Of 7 blocks each has 3 when both need a fourth; whoever gives way then waits until its time is over.
    trace = trace_of((40, 57), (40, 57))
    result = simulate(trace, setup(pool_tokens=112, ttl_s=0.6, max_tokens=None, forecast="none"), BACKLOG)
    assert result.failed == {"deadline_exceeded": 2} and result.preempted_requests == 1
    longest = result.latency.longest_gap
    assert longest is not None and 350 < longest.max < 500
    assert result.preempted_s == pytest.approx(longest.max / 1000, abs=0.001)


def test_a_preemption_by_hand() -> None:
    # Two of 40 + 57 tokens in 7 blocks of 16. Prompts in one step; 8 decodes of both fill 3 blocks each. The first
    # takes the last block and decodes on alone, 48 times more. The second, out of the pool at 48 computed tokens, needs
    # 4 blocks to come back, so it waits until the first has ended. Then its 49 tokens are computed; 47 decodes follow.
    seconds = DEVICE.timing.seconds
    prompts = StepLoad(prefill_tokens=80, kv_tokens=80, pairs=2 * 820)
    both = [StepLoad(decodes=2, kv_tokens=2 * context) for context in range(41, 49)]
    alone = [StepLoad(decodes=1, kv_tokens=context) for context in range(49, 97)]
    again = StepLoad()
    again.add_prefill(0, 49)
    rest = alone[1:]
    parts = [[prompts], both, alone, [again], rest]
    took = [sum(map(seconds, part)) for part in parts]
    plain = setup(pool_tokens=112, max_tokens=None, forecast="none", enable_prefix_caching=False)
    result = simulate(trace_of((40, 57), (40, 57)), plain, BACKLOG)
    assert result.duration_s == pytest.approx(sum(took))
    assert result.steps == 1 + 8 + 48 + 1 + 47
    assert (result.preemptions, result.preempted_requests, result.recomputed_tokens) == (1, 1, 48)
    assert result.preempted_s == pytest.approx(took[2] + took[3])
    total, longest, first = result.latency.total, result.latency.longest_gap, result.latency.ttft
    assert total is not None and longest is not None and first is not None
    assert first.max == pytest.approx(1000 * took[0])
    assert longest.max == pytest.approx(1000 * result.preempted_s)
    assert total.mean == pytest.approx(1000 * (sum(took[:3]) + sum(took)) / 2)
    assert result.computed_tokens == 2 * 96 + 48
    contexts = [40, 40, *range(41, 49), *range(41, 49), *range(49, 97), *range(49, 97)]
    allocated = sum(-(-context // 16) * 16 for context in contexts)
    assert result.waste_life_percent == pytest.approx(100 * (1 - sum(contexts) / allocated))


def test_sessions_wait_for_their_answers() -> None:
    calls = trace_of((10, 4), (20, 4), (10, 4), (20, 4)).requests
    linked = Trace(
        "linked",
        tuple(
            TraceRequest(r.prompt, r.output, r.prompt_tokens, 4, None, "t", p)
            for r, p in zip(calls, (None, 0, None, 2), strict=True)
        ),
    )
    one = simulate(linked, setup(), Arrivals(mode="sessions", sessions=1))
    assert one.running_peak == 1 and one.finished == 4 and one.latency.queue is not None
    assert one.latency.queue.max == 0
    assert simulate(linked, setup(), Arrivals(mode="sessions", sessions=2)).running_peak == 2
    assert simulate(linked, setup(), BACKLOG).running_peak == 4


# -- the real block code ---------------------------------------------------------------------------------------------


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


# -- twins -----------------------------------------------------------------------------------------------------------


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


# -- figures ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 5)), min_size=1, max_size=40))
def test_weighted_quantiles_are_those_of_the_repeated_values(pairs: list[tuple[float, int]]) -> None:
    values, weights = zip(*pairs, strict=True)
    repeated = np.repeat(values, weights)
    found = Quantiles.of(values, weights)
    assert found is not None
    assert found.mean == pytest.approx(float(repeated.mean()))
    expected = [float(np.quantile(repeated, q, method="inverted_cdf")) for q in (0.5, 0.9, 0.99)]
    for a, b, q in zip((found.p50, found.p90, found.p99), expected, (0.5, 0.9, 0.99), strict=True):
        if abs(q * len(repeated) - round(q * len(repeated))) > 1e-9:  # on the edge both neighbours are right
            assert a == b
    ordered = (found.p50, found.p90, found.p99, found.max)
    assert all(a <= b for a, b in pairwise(ordered)) and found.max == max(values)


def test_no_values_have_no_quantiles() -> None:
    assert Quantiles.of([]) is None
