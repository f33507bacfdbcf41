"""One receiver as this process knows it: how many tries are under way, how it has been, and when the next may go.

Pure state. A receiver that is slow or fails keeps its own deliveries waiting and nobody else's: what it cannot take now
goes back to the outbox for a while, at the rate at which it has been taking them, and after several failures in a row
a circuit breaker lets only one try through now and then.
"""

from __future__ import annotations

import random

OPENS_AFTER = 5  # failures in a row
FIRST_PAUSE_S, MAX_PAUSE_S = 10.0, 600.0
LEAST_WAIT_S, MAX_WAIT_S = 0.02, 60.0


class Endpoint:
    """`limit`: tries at one time. Times are seconds of one monotonic clock."""

    __slots__ = ("_failures", "_limit", "_mean_s", "_next_place", "_open_until", "_pause_s", "running")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._failures = 0
        self._mean_s = 0.05
        self._next_place = 0.0
        self._open_until = 0.0
        self._pause_s = FIRST_PAUSE_S
        self.running = 0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to remember."""
        return self.running == 0 and self._failures == 0

    def ask(self, now: float) -> float:
        """Seconds until another try is worth while; 0: now, and it counts as running."""
        is_broken = self._failures >= OPENS_AFTER
        if is_broken and now < self._open_until:
            return self._open_until - now + random.uniform(0.0, min(5.0, self._pause_s))
        if self.running < (1 if is_broken else self._limit):
            self.running += 1
            return 0.0
        # Places in a line that moves as fast as tries have been ending.
        step = self._mean_s / (1 if is_broken else self._limit)
        self._next_place = min(max(now, self._next_place) + step, now + MAX_WAIT_S)
        return max(LEAST_WAIT_S, self._next_place - now)

    def end(self, now: float, took_s: float, failed: bool) -> None:
        """A try has ended. `failed`: the receiver could not be reached, or says that it cannot take it now."""
        self.running -= 1
        self._mean_s += 0.2 * (took_s - self._mean_s)
        if not failed:
            self._failures, self._pause_s = 0, FIRST_PAUSE_S
            return
        self._failures += 1
        if self._failures >= OPENS_AFTER:
            self._open_until = now + self._pause_s
            self._pause_s = min(MAX_PAUSE_S, self._pause_s * 2)
