"""What a simulation found, as plain data. Times in ms unless the name ends in _s, sizes in tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class Quantiles:
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: ArrayLike, weights: ArrayLike | None = None) -> Quantiles | None:
        """Quantiles of values, each counting `weights` times. None where there is nothing."""
        data = np.asarray(values, dtype=np.float64)
        if not len(data):
            return None
        counts: NDArray[np.float64] = np.ones(len(data)) if weights is None else np.asarray(weights, dtype=np.float64)
        order = np.argsort(data, kind="stable")
        data, counts = data[order], counts[order]
        reached = np.cumsum(counts)
        total = float(reached[-1])
        places = np.searchsorted(reached, np.array((0.5, 0.9, 0.99)) * total)
        p50, p90, p99 = (float(data[min(int(place), len(data) - 1)]) for place in places)
        return cls(float(np.dot(data, counts)) / total, p50, p90, p99, float(data[-1]))


@dataclass(frozen=True, slots=True)
class Latency:
    """From a request's arrival: to its start (queue), its first token (ttft), its last (total). `between_tokens`: gaps
    between tokens that follow each other, over all requests. `longest_gap`: the longest of them of each request that
    has one, over those requests; of one that failed the time since its last token counts too. ms."""

    queue: Quantiles | None
    ttft: Quantiles | None
    between_tokens: Quantiles | None
    longest_gap: Quantiles | None
    total: Quantiles | None


@dataclass(frozen=True, slots=True)
class GroupLatency:
    """A part of the requests: one class of priority, or the heaviest tenant, or all other tenants together. What share
    of the requests it sent, how many of them finished, and their time to the first token."""

    name: str
    share_percent: float
    finished: int
    ttft: Quantiles | None


@dataclass(frozen=True, slots=True)
class TimeLine:
    """The run in equal slices of time: mean running, mean waiting, share of the pool that holds tokens, worst gap
    between steps (ms)."""

    slice_s: float
    running: Sequence[float]
    waiting: Sequence[float]
    used_percent: Sequence[float]
    worst_step_ms: Sequence[float]


@dataclass(frozen=True, slots=True)
class Result:
    """One run of one system over one trace.

    refused: turned away on arrival, by error code; failed: accepted and ended by an error. cut_short: ended by length
    before the recorded output was reached. wasted_tokens: output tokens of requests that failed.
    running_mean: over time. running_backlogged: over the steps in which somebody waited, which says how many requests
    the memory holds. used_percent: share of the pool that holds tokens, over the same steps (over all of them where
    nobody ever waited). waste_life_percent: empty share of allocated slots, over every step of every request that
    brought a token; waste_end_percent: the same, only each request's last step.
    preempted_requests: how many were preempted at all. preempted_s: time from losing the blocks to the next token, over
    all preemptions. refusal_ms: from arrival to refusal on the virtual clock; refusal_cpu_us: processor time of
    the code that refuses.
    """

    system: str
    trace: str
    settings: dict[str, Any]
    requests: int
    finished: int
    refused: dict[str, int]
    failed: dict[str, int]
    cut_short: int
    duration_s: float
    steps: int
    output_tokens: int
    wasted_tokens: int
    computed_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    pool_tokens: int
    running_mean: float
    running_peak: int
    running_backlogged: float | None
    used_percent: float
    waste_life_percent: float
    waste_end_percent: float
    preemptions: int
    swap_preemptions: int
    swapped_blocks: int
    preemptions_per_1000: float
    preempted_requests: int
    preempted_s: float
    recomputed_tokens: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    prefix_hit_percent: float
    refusal_ms: Quantiles | None
    latency: Latency
    groups: tuple[GroupLatency, ...] = ()
    refusal_cpu_us: Quantiles | None = None
    wall_s: float = 0.0
    time_line: TimeLine | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, rounded to what they are worth. Without the time line."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "time_line"}
        rounded: dict[str, Any] = _plain(fields)
        return rounded


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
