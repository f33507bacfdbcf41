"""What the simulator shows: overload with protection and without, and one tenant that sends most of the traffic."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from pagemill.engine.errors import ConfigError
from pagemill.engine.simulator.arrivals import Arrivals
from pagemill.engine.simulator.overload import capacity, modes, offered
from pagemill.engine.simulator.result import Quantiles, Result
from pagemill.engine.simulator.simulation import simulate
from pagemill.engine.simulator.trace import Trace
from tests.engine.test_simulator import BACKLOG, TRACE, setup, trace_of

HEAVY_SHARE = 0.57


def bursts(count: int, seed: int = 0) -> Trace:
    """Short prompts, long outputs of unlike lengths, a few dozen requests at a time."""
    draw = random.Random(seed)
    lengths = [(draw.randint(10, 40), 1 + int(draw.expovariate(1 / 120))) for _ in range(count)]
    times = [5.0 * (index // 30) + draw.random() for index in range(count)]
    return trace_of(*lengths, times=sorted(times))


def p99(quantiles: Quantiles | None) -> float:
    assert quantiles is not None
    return quantiles.p99


def test_protection_keeps_the_time_between_tokens_under_twice_the_load() -> None:
    trace, engine = bursts(120), setup(pool_tokens=2048, max_tokens=512, ttl_s=6.0)
    most = capacity(trace, engine)
    twice = {mode: simulate(trace, s, offered(trace, TRACE, 2.0 * most)) for mode, s in modes(engine).items()}
    for mode in ("reserve", "optimistic, deadline", "reserve, deadline"):
        half = simulate(trace, modes(engine)[mode], offered(trace, TRACE, 0.5 * most))
        assert p99(twice[mode].latency.between_tokens) <= 2 * p99(half.latency.between_tokens)
    refusing = twice["reserve, deadline"]
    assert refusing.refused["deadline_unreachable"] > 20
    assert refusing.refusal_ms is not None and refusing.refusal_ms.max <= 50
    assert refusing.refusal_cpu_us is not None and refusing.refusal_cpu_us.p50 > 0
    plain, optimistic, reserve = (twice[mode] for mode in ("plain", "optimistic", "reserve"))
    assert reserve.preemptions == 0
    assert p99(plain.latency.longest_gap) > 5 * p99(reserve.latency.longest_gap)
    assert plain.preempted_s > 2 * optimistic.preempted_s


def test_load_is_offered_in_capacities() -> None:
    trace = bursts(60)
    last = max(request.arrival_s or 0.0 for request in trace.requests)
    scaled = offered(trace, TRACE, 8.0)
    assert 60 / (last / scaled.rate_scale) == pytest.approx(8.0)
    assert offered(trace, Arrivals(mode="poisson"), 8.0).rate == 8.0
    with pytest.raises(ConfigError, match="not as backlog"):
        offered(trace, BACKLOG, 8.0)
    with pytest.raises(ConfigError, match="at once"):
        offered(trace_of((5, 5), (5, 5)), TRACE, 8.0)


def test_capacity_is_what_is_finished_while_all_wait() -> None:
    # 16 requests of one token each, in steps of 256 tokens: four whole prompts a step, in chunks of at most 128.
    engine = setup(max_num_seqs=4)
    trace = trace_of(*[(64, 1)] * 16, times=[float(index) for index in range(16)])
    assert capacity(trace, engine) == pytest.approx(16 / simulate(trace, engine, BACKLOG).duration_s)


# -- tenants ---------------------------------------------------------------------------------------------------------


def one_heavy_tenant(count: int = 500) -> Trace:
    """57 % of the requests from one tenant, in bursts; the rest from ten others, one by one."""
    draw = random.Random(5)
    heavy = int(count * HEAVY_SHARE)
    others = count - heavy
    sent = [(20.0 * (index // 95) + draw.random(), "heavy") for index in range(heavy)]
    times = accumulate(draw.expovariate(others / 60) for _ in range(others))
    sent += [(time, f"tenant {draw.randrange(10)}") for time in times]
    sent.sort()
    lengths = [(draw.randint(20, 100), draw.randint(5, 40)) for _ in sent]
    return trace_of(*lengths, times=[time for time, _ in sent], tenants=[tenant for _, tenant in sent])


def others_first_token(result: Result) -> Quantiles:
    heavy, others = result.groups
    assert heavy.name == "heavy" and heavy.share_percent == pytest.approx(57, abs=0.5)
    assert others.name == "10 others" and others.ttft is not None
    return others.ttft


def test_a_tenant_with_most_of_the_traffic_does_not_slow_the_rest() -> None:
    trace = one_heavy_tenant()
    engine = setup(max_num_seqs=16)
    alone = simulate(trace.without("heavy"), engine, TRACE).latency.ttft
    fcfs = others_first_token(simulate(trace, engine, TRACE))
    fair = others_first_token(simulate(trace, setup(max_num_seqs=16, scheduling_policy="fair"), TRACE))
    assert alone is not None
    assert fcfs.p99 > 20 * alone.p99
    assert fair.p99 < 5 * alone.p99 and fair.p90 < 5 * alone.p90


def test_leaving_out_the_heaviest_tenant_leaves_the_others_as_they_were() -> None:
    trace = one_heavy_tenant(100)
    others = trace.without(trace.heaviest_tenant)
    assert trace.heaviest_tenant == "heavy"
    assert others.requests == tuple(request for request in trace.requests if request.tenant != "heavy")
    (group,) = simulate(others, setup(), TRACE).groups
    assert (group.name, group.share_percent, group.finished) == ("10 others", 100, len(others.requests))
