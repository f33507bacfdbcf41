"""Simulated times that can be reckoned by hand, and how they are summed up."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.engine.simulator.arrivals import Arrivals
from pagemill.engine.simulator.device import StepLoad
from pagemill.engine.simulator.result import Quantiles
from pagemill.engine.simulator.simulation import simulate
from pagemill.engine.simulator.trace import Trace, TraceRequest
from tests.engine.simulated import BACKLOG, DECODE, DEVICE, FIXED, KV, PAIR, PREFILL, TRACE, setup, trace_of

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
