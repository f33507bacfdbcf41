"""Offered load against capacity: the engine without protection and with it, side by side.

Capacity is what the engine finishes a second while all requests wait at once: memory and device are full then, and
nobody waits for an arrival. The trace is then played so fast that its mean rate is a share or a multiple of that.
"""

from __future__ import annotations

import dataclasses

from pagemill.engine.errors import ConfigError
from pagemill.engine.simulator.arrivals import Arrivals
from pagemill.engine.simulator.setup import Progress, Setup
from pagemill.engine.simulator.simulation import simulate
from pagemill.engine.simulator.trace import Trace

LOADS = (0.5, 1.0, 2.0)  # offered, in capacities
DEADLINE_S = 30.0


def modes(setup: Setup) -> dict[str, Setup]:
    """What is compared, by name. `plain`: no forecast, so whatever prompt fits is admitted and the pool runs over. The
    deadline is the setup's, or 30 s."""
    plain = dataclasses.replace(setup, admission="optimistic", forecast="none", ttl_s=None)
    optimistic = dataclasses.replace(plain, forecast="lengths")
    reserve = dataclasses.replace(optimistic, admission="reserve")
    ttl_s = setup.ttl_s or DEADLINE_S
    return {
        "plain": plain,
        "optimistic": optimistic,
        "reserve": reserve,
        "optimistic, deadline": dataclasses.replace(optimistic, ttl_s=ttl_s),
        "reserve, deadline": dataclasses.replace(reserve, ttl_s=ttl_s),
    }


def capacity(trace: Trace, setup: Setup, progress: Progress | None = None) -> float:
    """Requests a second that the optimistic engine finishes while all of them wait."""
    return simulate(trace, modes(setup)["optimistic"], Arrivals(mode="backlog"), progress).requests_per_s


def offered(trace: Trace, arrivals: Arrivals, rate: float) -> Arrivals:
    """The arrivals at `rate` requests a second in the mean. Raises `ConfigError` where they have no rate."""
    if arrivals.mode == "poisson":
        roots = sum(request.previous is None for request in trace.requests)
        return dataclasses.replace(arrivals, rate=rate * roots / len(trace.requests))
    if arrivals.mode != "trace":
        raise ConfigError(f"load is offered at recorded times or as poisson arrivals, not as {arrivals.mode}")
    last = max((request.arrival_s or 0.0 for request in trace.requests), default=0.0)
    if not last:
        raise ConfigError(f"all requests of trace {trace.name} come at once; choose poisson arrivals")
    return dataclasses.replace(arrivals, rate_scale=rate * last / len(trace.requests))
