"""Counting what happens in a run. One recorder per run; both the engine and its twins write to it."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagemill.engine.simulator.result import GroupLatency, Latency, Quantiles, Result, TimeLine
from pagemill.engine.simulator.trace import Trace

SLICES = 400  # of the time line

Array = NDArray[np.float64]


class Recorder:
    """Times in seconds of the virtual clock."""

    def __init__(self, system: str, trace: Trace, settings: dict[str, Any], pool_tokens: int) -> None:
        self._system = system
        self._trace = trace
        self._settings = settings
        self._pool_tokens = pool_tokens
        self._begun = time.perf_counter()
        self._steps: list[tuple[float, float, int, int, int]] = []  # start, seconds, running, waiting, held tokens
        self._last_token: dict[int, float] = {}
        self._gaps: list[float] = []
        self._gap_counts: list[int] = []
        self._longest_gap = [0.0] * len(trace.requests)
        self._longest_gaps: list[float] = []
        self._step_end = 0.0
        self._queue: list[float] = []
        self._ttft: list[float] = []
        self._ttft_of: list[int] = []
        self._ended: list[int] = []
        self._total: list[float] = []
        self._refused: Counter[str] = Counter()
        self._refusal: list[float] = []
        self._refusal_cpu: list[float] = []
        self._failed: Counter[str] = Counter()
        self.held_life = self.allocated_life = 0
        self.held_end = self.allocated_end = 0
        self.output_tokens = self.wasted_tokens = self.computed_tokens = 0
        self.finished = self.cut_short = 0
        self.preemptions = self.swap_preemptions = self.swapped_blocks = self.recomputed_tokens = 0
        self.preempted_requests = 0
        self.preempted_s = 0.0
        self.queried_tokens = self.hit_tokens = 0

    def step(self, start: float, end: float, running: int, waiting: int, held_tokens: int) -> None:
        """A step from `start` to `end`, with so many requests in the pool and in the queue."""
        self._steps.append((start, end - start, running, waiting, held_tokens))

    def tokens(self, indices: list[int], now: float) -> None:
        """These requests got a token each, at `now`."""
        last, longest = self._last_token, self._longest_gap
        before = self._step_end
        steady = 0
        for index in indices:
            earlier = last.get(index)
            last[index] = now
            if earlier is None:
                continue
            gap = now - earlier
            if gap > longest[index]:
                longest[index] = gap
            if earlier == before:
                steady += 1
            else:
                self._gaps.append(gap)
                self._gap_counts.append(1)
        if steady:
            self._gaps.append(now - before)
            self._gap_counts.append(steady)
        self._step_end = now
        self.output_tokens += len(indices)

    def end(self, index: int, arrived: float, started: float, first_token: float | None, now: float) -> None:
        """A request ended with its answer."""
        if self._last_token.pop(index, None) is not None and self._longest_gap[index]:
            self._longest_gaps.append(self._longest_gap[index])
        self.finished += 1
        self._ended.append(index)
        self._queue.append(started - arrived)
        if first_token is not None:
            self._ttft.append(first_token - arrived)
            self._ttft_of.append(index)
        self._total.append(now - arrived)

    def refuse(self, code: str, arrived: float, now: float, cpu_s: float | None = None) -> None:
        """A request was turned away when it came. `cpu_s`: processor time that the decision took."""
        self._refused[code] += 1
        self._refusal.append(now - arrived)
        if cpu_s is not None:
            self._refusal_cpu.append(cpu_s)

    def fail(self, index: int, code: str, now: float, tokens: int) -> None:
        """A request was accepted and ended without its answer, after so many output tokens."""
        self.wasted_tokens += tokens
        last = self._last_token.pop(index, None)
        if last is not None:
            self._longest_gaps.append(max(self._longest_gap[index], now - last))
        self._failed[code] += 1

    def preempted(self, lost_s: float) -> None:
        """A request that ends had been preempted, and lost so much time by it."""
        self.preempted_requests += 1
        self.preempted_s += lost_s

    def result(self) -> Result:
        steps = np.array(self._steps, dtype=np.float64).reshape(-1, 5)
        start, seconds, running, waiting, held = steps.T
        duration = float(start[-1] + seconds[-1]) if len(steps) else 0.0
        busy = float(seconds.sum())
        queued = waiting > 0
        full = queued if queued.any() else np.ones(len(steps), dtype=bool)
        finished = max(1, self.finished)
        return Result(
            system=self._system,
            trace=self._trace.name,
            settings=self._settings,
            requests=len(self._trace.requests),
            finished=self.finished,
            refused=dict(sorted(self._refused.items())),
            failed=dict(sorted(self._failed.items())),
            cut_short=self.cut_short,
            duration_s=duration,
            steps=len(steps),
            output_tokens=self.output_tokens,
            wasted_tokens=self.wasted_tokens,
            computed_tokens=self.computed_tokens,
            output_tokens_per_s=_ratio(self.output_tokens, duration),
            requests_per_s=_ratio(self.finished, duration),
            pool_tokens=self._pool_tokens,
            running_mean=_ratio(float(np.dot(running, seconds)), duration),
            running_peak=int(running.max()) if len(steps) else 0,
            running_backlogged=float(running[queued].mean()) if queued.any() else None,
            used_percent=100 * float(held[full].mean()) / self._pool_tokens if len(steps) else 0.0,
            waste_life_percent=100 * _ratio(self.allocated_life - self.held_life, self.allocated_life),
            waste_end_percent=100 * _ratio(self.allocated_end - self.held_end, self.allocated_end),
            preemptions=self.preemptions,
            swap_preemptions=self.swap_preemptions,
            swapped_blocks=self.swapped_blocks,
            preemptions_per_1000=1000 * self.preemptions / finished,
            preempted_requests=self.preempted_requests,
            preempted_s=self.preempted_s,
            recomputed_tokens=self.recomputed_tokens,
            prefix_queried_tokens=self.queried_tokens,
            prefix_hit_tokens=self.hit_tokens,
            prefix_hit_percent=100 * _ratio(self.hit_tokens, self.queried_tokens),
            refusal_ms=_ms(self._refusal),
            latency=Latency(
                queue=_ms(self._queue),
                ttft=_ms(self._ttft),
                between_tokens=Quantiles.of(np.array(self._gaps) * 1000, self._gap_counts),
                longest_gap=_ms(self._longest_gaps),
                total=_ms(self._total),
            ),
            groups=self._groups(),
            refusal_cpu_us=Quantiles.of(np.array(self._refusal_cpu) * 1e6),
            wall_s=time.perf_counter() - self._begun,
            time_line=_time_line(start, seconds, running, waiting, held / self._pool_tokens, duration)
            if busy
            else None,
        )

    def _groups(self) -> tuple[GroupLatency, ...]:
        """Classes of priority, where there are several; else the tenant that sent most and all others together, or
        these alone where that tenant was left out."""
        requests = self._trace.requests
        names = [f"priority {request.priority}" for request in requests]
        if len(set(names)) < 2:
            heaviest = self._trace.left_out or self._trace.heaviest_tenant
            count = len({request.tenant for request in requests} - {heaviest})
            others = "1 other" if count == 1 else f"{count} others"
            names = [heaviest if request.tenant == heaviest else others for request in requests]
        sizes = Counter(names)
        if len(sizes) < 2 and self._trace.left_out is None:
            return ()
        finished = Counter(names[index] for index in self._ended)
        times: dict[str, list[float]] = {name: [] for name in sizes}
        for index, seconds in zip(self._ttft_of, self._ttft, strict=True):
            times[names[index]].append(seconds)
        order = sorted(sizes) if names[0].startswith("priority ") else [name for name, _ in sizes.most_common()]
        if not names[0].startswith("priority "):
            order.sort(key=lambda name: name != heaviest)
        return tuple(
            GroupLatency(name, 100 * sizes[name] / len(names), finished[name], _ms(times[name])) for name in order
        )


def _ms(seconds: list[float]) -> Quantiles | None:
    return Quantiles.of(np.array(seconds) * 1000)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _time_line(start: Array, seconds: Array, running: Array, waiting: Array, used: Array, duration: float) -> TimeLine:
    """Means over the steps that begin in a slice; where none begins, the step that lasts through it, or nothing."""
    slices = np.minimum((start / duration * SLICES).astype(np.int64), SLICES - 1)
    weight = np.bincount(slices, seconds, SLICES)
    middle = (np.arange(SLICES) + 0.5) * duration / SLICES
    through = np.maximum(np.searchsorted(start, middle, side="right") - 1, 0)
    lasting = (start[through] <= middle) & (middle < start[through] + seconds[through])
    worst = np.zeros(SLICES)
    np.maximum.at(worst, slices, seconds * 1000)

    def mean(values: Array) -> list[float]:
        sums = np.bincount(slices, values * seconds, SLICES)
        otherwise = np.where(lasting, values[through], 0.0)
        return [float(v) for v in np.divide(sums, weight, out=otherwise, where=weight > 0)]

    return TimeLine(duration / SLICES, mean(running), mean(waiting), mean(used * 100), [float(v) for v in worst])
