"""A device whose times can be reckoned by hand, and traces made for it."""

from __future__ import annotations

import random
from typing import Any

from pagemill.engine.simulator.arrivals import Arrivals
from pagemill.engine.simulator.device import Device, TimingModel
from pagemill.engine.simulator.result import Result
from pagemill.engine.simulator.setup import Setup
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
