"""When each request of a trace is submitted."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pagemill.engine.errors import ConfigError
from pagemill.engine.simulator.trace import Trace

Mode = Literal["trace", "backlog", "poisson", "sessions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How a trace's requests arrive.

    trace: at the recorded times, `rate_scale` times as fast. backlog: all at once, nobody waiting for an earlier call
    of the session. poisson: sessions (or single requests) at `rate` a second. sessions: `sessions` of them live at
    once, each calling again as soon as it is answered; a new one follows each that ends.
    In every mode but backlog a call comes only after the call before it in its session has ended.
    """

    mode: Mode
    rate: float = 1.0
    rate_scale: float = 1.0
    sessions: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.rate < 1e9 and 0 < self.rate_scale < 1e9):
            raise ConfigError(f"rates must be above 0, got rate {self.rate}, rate scale {self.rate_scale}")
        if self.sessions < 1:
            raise ConfigError(f"there must be at least one session, got {self.sessions}")

    def __str__(self) -> str:
        """The mode and the one number that matters in it."""
        detail = {"trace": f" x {self.rate_scale:g}", "poisson": f" {self.rate:g}/s", "sessions": f" {self.sessions}"}
        return self.mode + ("" if self.mode == "trace" and self.rate_scale == 1 else detail.get(self.mode, ""))


class Feed:
    """Requests of a trace in order of submission. Times in seconds."""

    def __init__(self, trace: Trace, arrivals: Arrivals) -> None:
        if arrivals.mode == "trace" and not trace.has_times:
            raise ConfigError(f"trace {trace.name} has no times; choose backlog, poisson or sessions")
        if arrivals.mode == "backlog":
            trace = trace.independent()
        requests = trace.requests
        self._times = [0.0] * len(requests)
        self._following: dict[int, int] = {}
        roots: list[int] = []
        for index, request in enumerate(requests):
            if request.previous is None:
                roots.append(index)
            else:
                self._following[request.previous] = index
        if arrivals.mode == "trace":
            self._times = [(request.arrival_s or 0.0) / arrivals.rate_scale for request in requests]
        elif arrivals.mode == "poisson":
            gaps = np.random.default_rng(arrivals.seed).exponential(1.0 / arrivals.rate, len(roots))
            for index, time in zip(roots, np.cumsum(gaps), strict=True):
                self._times[index] = float(time)
        self._closed = arrivals.mode == "sessions"
        self._later = roots[arrivals.sessions :][::-1] if self._closed else []
        self._due = [(self._times[index], index) for index in (roots[: arrivals.sessions] if self._closed else roots)]
        heapq.heapify(self._due)

    @property
    def next_time(self) -> float | None:
        """When the next request comes, as far as it is known yet."""
        return self._due[0][0] if self._due else None

    def take(self, until: float) -> tuple[float, int] | None:
        """The next request that comes at or before `until`: its time and its place in the trace."""
        return heapq.heappop(self._due) if self._due and self._due[0][0] <= until else None

    def ended(self, index: int, now: float) -> None:
        """A request was answered or refused: whoever waited for it comes."""
        following = self._following.get(index)
        if following is None and self._later:
            following = self._later.pop()
        if following is not None:
            heapq.heappush(self._due, (max(now, self._times[following]), following))
