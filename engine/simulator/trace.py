"""Recorded traffic: who asked when, for how much, and which prompts begin alike."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pagemill.engine.simulator.tokens import Run


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request. `arrival_s`: seconds since the trace's start; None where the trace has no times.

    Prompt and output are runs of token ids; an output that a later prompt contains has the same ids there. `previous`:
    index of the session's call before this one, which must have ended first.
    """

    prompt: tuple[Run, ...]
    output: tuple[Run, ...]
    prompt_tokens: int
    output_tokens: int
    arrival_s: float | None = None
    tenant: str = "default"
    priority: int = 1
    previous: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. `dropped`: rows of the file that are no request (failed ones, empty ones).
    `left_out`: the tenant whose requests were taken out."""

    name: str
    requests: tuple[TraceRequest, ...]
    dropped: int = 0
    left_out: str | None = None

    @property
    def has_times(self) -> bool:
        return all(request.arrival_s is not None for request in self.requests)

    @property
    def has_sessions(self) -> bool:
        return any(request.previous is not None for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and output together."""
        return max(request.prompt_tokens + request.output_tokens for request in self.requests)

    def shortened(self, *, longest: int | None = None, limit: int | None = None) -> Trace:
        """The first `limit` requests of those with at most `longest` tokens of prompt and output."""
        requests: Iterable[tuple[int, TraceRequest]] = enumerate(self.requests)
        if longest is not None:
            requests = ((i, r) for i, r in requests if r.prompt_tokens + r.output_tokens <= longest)
        return self._with([pair for pair, _ in zip(requests, range(limit or len(self.requests)), strict=False)])

    def later(self, than_s: float) -> Trace:
        """The requests that came so many seconds after the first or later, the first of them at 0 s."""
        kept = [(i, r) for i, r in enumerate(self.requests) if r.arrival_s is not None and r.arrival_s >= than_s]
        start = kept[0][1].arrival_s or 0.0 if kept else 0.0
        return self._with(kept)._changed(lambda r: dataclasses.replace(r, arrival_s=(r.arrival_s or 0.0) - start))

    @property
    def heaviest_tenant(self) -> str:
        """Who sent most requests."""
        return Counter(request.tenant for request in self.requests).most_common(1)[0][0]

    def without(self, tenant: str) -> Trace:
        """The requests of all other tenants, at the same times."""
        others = self._with([(i, r) for i, r in enumerate(self.requests) if r.tenant != tenant])
        return dataclasses.replace(others, left_out=tenant)

    def independent(self) -> Trace:
        """The same calls, with nobody waiting for an earlier call of the session."""
        return self._changed(lambda request: dataclasses.replace(request, previous=None))

    def classified(self, shares: Sequence[float], seed: int = 0) -> Trace:
        """The same requests in classes 0, 1, ... drawn by their shares. Calls of a session are in one class."""
        draw = random.Random(seed)
        weights, classes = list(shares), range(len(shares))
        chosen: list[int] = []
        for request in self.requests:
            priority = draw.choices(classes, weights)[0]
            chosen.append(priority if request.previous is None else chosen[request.previous])
        pairs = zip(self.requests, chosen, strict=True)
        requests = tuple(dataclasses.replace(request, priority=priority) for request, priority in pairs)
        return dataclasses.replace(self, requests=requests)

    def arriving(self, times: Iterable[float | None]) -> Trace:
        """The same requests at other times."""
        pairs = zip(self.requests, times, strict=True)
        requests = tuple(dataclasses.replace(request, arrival_s=time) for request, time in pairs)
        return dataclasses.replace(self, requests=requests)

    def _changed(self, change: Callable[[TraceRequest], TraceRequest]) -> Trace:
        return dataclasses.replace(self, requests=tuple(map(change, self.requests)))

    def _with(self, kept: list[tuple[int, TraceRequest]]) -> Trace:
        """A selection: a call whose predecessor was left out waits for nobody."""
        places = {old: new for new, (old, _) in enumerate(kept)}
        requests = tuple(
            dataclasses.replace(r, previous=places.get(r.previous) if r.previous is not None else None) for _, r in kept
        )
        return dataclasses.replace(self, requests=requests)
