"""Receivers and tenants as this process knows them: how many tries are under way, and when the next may go.

Pure state. A receiver that is slow or fails keeps its own deliveries waiting and nobody else's, and so does a tenant
with many of them: what cannot be taken now goes back to the outbox for a while, at the rate at which tries have been
ending. After several failures in a row a receiver's circuit breaker lets only one try through now and then.
"""

from __future__ import annotations

import random

OPENS_AFTER = 5  # failures in a row
FIRST_PAUSE_S, MAX_PAUSE_S = 10.0, 600.0
LEAST_WAIT_S, MAX_WAIT_S = 0.02, 60.0


class Line:
    """So many tries at one time, and a line of those that come later. `limit`: None is no limit. Times are seconds of
    one monotonic clock."""

    __slots__ = ("_limit", "_mean_s", "_next_place", "running")

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._mean_s = 0.05
        self._next_place = 0.0
        self.running = 0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to remember."""
        return self.running == 0

    def ask(self, now: float) -> float:
        """Seconds until another try is worth while; 0: now, and it counts as running."""
        return self._ask(now, self._limit)

    def end(self, now: float, took_s: float) -> None:
        """A try has ended."""
        self.running -= 1
        self._mean_s += 0.2 * (took_s - self._mean_s)

    def take_back(self) -> None:
        """What was asked for is not begun."""
        self.running -= 1

    def _ask(self, now: float, limit: int | None) -> float:
        if limit is None or self.running < limit:
            self.running += 1
            return 0.0
        # Places in a line that moves as fast as tries have been ending.
        self._next_place = min(max(now, self._next_place) + self._mean_s / limit, now + MAX_WAIT_S)
        return max(LEAST_WAIT_S, self._next_place - now)


class Endpoint(Line):
    """One receiver, with a circuit breaker."""

    __slots__ = ("_failures", "_open_until", "_pause_s")

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._failures = 0
        self._open_until = 0.0
        self._pause_s = FIRST_PAUSE_S

    @property
    def is_idle(self) -> bool:
        return self.running == 0 and self._failures == 0

    def ask(self, now: float) -> float:
        is_broken = self._failures >= OPENS_AFTER
        if is_broken and now < self._open_until:
            return self._open_until - now + random.uniform(0.0, min(5.0, self._pause_s))
        return self._ask(now, 1 if is_broken else self._limit)

    def end(self, now: float, took_s: float, failed: bool = False) -> None:
        """A try has ended. `failed`: the receiver could not be reached, or says that it cannot take it now."""
        super().end(now, took_s)
        if not failed:
            self._failures, self._pause_s = 0, FIRST_PAUSE_S
            return
        self._failures += 1
        if self._failures >= OPENS_AFTER:
            self._open_until = now + self._pause_s
            self._pause_s = min(MAX_PAUSE_S, self._pause_s * 2)
