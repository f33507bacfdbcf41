"""An engine reduced to what forecasts see, and the requests, lengths and outlooks that they are tried on."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import numpy as np

from pagemill.engine.forecast import (
    GrowthForecast,
    Outlook,
    StepTimes,
)
from pagemill.engine.lengths import OutputLengths
from pagemill.engine.policy import Backlog
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams

BLOCK = 16


def make(
    prompt: int, generated: int = 0, *, max_tokens: int = 1024, tenant: str = "a", cached: int = 0, **params: object
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    request = Request("r", [0] * prompt, sampling, 0, max_tokens, tenant=tenant)
    request.output_token_ids = [0] * generated
    request.num_cached_tokens = cached
    return request


def lengths_of(draw: Callable[[], float], tenant: str = "a", count: int = 1000) -> OutputLengths:
    lengths = OutputLengths()
    for _ in range(count):
        lengths.observe(tenant, max(1, int(draw())), ended=True)
    lengths.update(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    return lengths


def blocks_of(request: Request) -> int:
    return -(-request.num_tokens // BLOCK)


class Toy:
    """An engine reduced to what the forecasts see: blocks, seats, a token budget; requests know when they will end."""

    def __init__(
        self, *, num_blocks: int, seats: int, budget: int, share: float | None, rng: random.Random, noise: float = 0.1
    ) -> None:
        self.num_blocks, self.max_seats, self.budget, self.share = num_blocks, seats, budget, share
        self.lengths = OutputLengths()
        self.growth = GrowthForecast(self.lengths, num_blocks=num_blocks, block_size=BLOCK)
        self.times = StepTimes()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.ends: dict[Request, int] = {}
        self.started: dict[Request, float] = {}
        self.now = 0.0
        self.step_number = self.preemptions = self.generated = 0
        self._rng, self._noise = rng, noise

    @property
    def committed(self) -> int:
        return sum(-(-(r.num_tokens + 1) // BLOCK) for r in self.running)

    def add(self, prompt: int, output: int, max_tokens: int = 1024) -> Request:
        request = make(prompt, max_tokens=max_tokens)
        request.arrived_at = self.now
        self.ends[request] = min(output, max_tokens)
        self.waiting.append(request)
        return request

    def backlog(self) -> Backlog:
        return Backlog(len(self.waiting), sum(r.num_tokens for r in self.waiting))

    def outlook(self) -> Outlook | None:
        self.growth.refresh(self.step_number, self.running, self.committed)
        return self.growth.outlook(
            list(self.waiting)[:32] or self.running[:32],
            self.times,
            waiting=self.backlog(),
            max_running=self.max_seats,
            step_tokens=self.budget,
        )

    def step(self) -> None:
        self.step_number += 1
        preempted = False
        while self.committed > self.num_blocks:
            victim = min(self.running, key=lambda r: r.num_tokens)
            self.running.remove(victim)
            victim.num_computed_tokens = 0
            self.waiting.appendleft(victim)
            self.preemptions += 1
            preempted = True
        sampling = [r for r in self.running if r.num_tokens - r.num_computed_tokens == 1]
        budget = self.budget - len(sampling)
        for request in sampling:
            request.num_computed_tokens += 1
        for request in self.running:
            budget -= self._prefill(request, budget, sampling)
        while budget and not preempted and self.waiting and len(self.running) < self.max_seats:
            request, committed = self.waiting[0], self.committed
            mark = 0
            if self.running:
                mark = int(self.num_blocks * (self.share or 0.0))
                if self.share is None:
                    self.growth.refresh(self.step_number, self.running, committed)
                    mark = self.growth.watermark(request, committed)
            promise = -(-(request.num_tokens + 1) // BLOCK)
            if committed + promise + mark > self.num_blocks:
                break
            self.waiting.popleft()
            self.running.append(request)
            self.growth.admit(request, promise)
            budget -= self._prefill(request, budget, sampling)
        tokens = self.budget - budget
        seconds = (0.01 + 0.00005 * tokens) * self._rng.uniform(1 - self._noise, 1 + self._noise)
        self.now += seconds
        self.times.observe(tokens, seconds)
        for request in sampling:
            request.output_token_ids.append(0)
            self.generated += 1
            self.started.setdefault(request, self.now - request.arrived_at)
            generated = len(request.output_token_ids)
            if generated == self.ends[request]:
                self.lengths.observe("a", generated, ended=generated < request.max_tokens)
                self.running.remove(request)

    def _prefill(self, request: Request, budget: int, sampling: list[Request]) -> int:
        chunk = min(budget, request.num_tokens - request.num_computed_tokens)
        request.num_computed_tokens += chunk
        if chunk and request.num_computed_tokens == request.num_tokens:
            sampling.append(request)
        return chunk


DISTRIBUTIONS: dict[str, Callable[[random.Random], float]] = {
    "exponential": lambda rng: rng.expovariate(1 / 120),
    "log-normal": lambda rng: rng.lognormvariate(4.5, 0.7),
    "two kinds": lambda rng: rng.gauss(20, 4) if rng.random() < 0.5 else rng.gauss(260, 30),
}


def outlook(*points: tuple[float, float], mean_tokens: float = 100.0) -> Outlook:
    return Outlook(tuple(p[0] for p in points), tuple(p[1] for p in points), mean_tokens)
