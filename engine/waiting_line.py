"""Everybody who waits: preempted requests, which go first, and new ones in the order of a policy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from pagemill.engine.policy import Backlog, WaitingQueue
from pagemill.engine.request import Request

LOOKED_AT = 8  # candidates that are asked for at a time
PASSED_OVER = 64  # waiting requests looked at behind one that waits for its prefix


class WaitingLine:
    """Preempted requests by arrival, then `queue`."""

    def __init__(self, queue: WaitingQueue) -> None:
        self.queue = queue
        self.preempted: dict[Request, None] = {}
        self.count = 0
        """How many they are, the new ones and the preempted ones."""
        self._queued_tokens = 0

    def __iter__(self) -> Iterator[Request]:
        """Everybody, in no particular order among the new ones."""
        yield from self.preempted
        yield from self.queue

    @property
    def backlog(self) -> Backlog:
        tokens = sum(request.num_tokens for request in self.preempted)
        return Backlog(self.count, tokens + self._queued_tokens)

    def add(self, request: Request) -> None:
        self.queue.add(request)
        self.count += 1
        self._queued_tokens += request.num_tokens

    def put_back(self, request: Request) -> None:
        """Add a request that was preempted."""
        self.preempted[request] = None
        self.count += 1
        if len(self.preempted) > 1:
            self.preempted = dict.fromkeys(sorted(self.preempted, key=lambda request: request.arrived_at))

    def remove(self, request: Request) -> bool:
        """Take a request out because it starts or has ended. False: it is not here."""
        if request in self.preempted:
            del self.preempted[request]
        elif self.queue.remove(request):
            self._queued_tokens -= request.num_tokens
        else:
            return False
        self.count -= 1
        return True

    def candidates(self) -> Iterator[Request]:
        """Who may start next, one after the other. Whoever is still here when the next one is asked for has been passed
        over: that may happen to `PASSED_OVER`, and if it happens to a preempted one, no new one comes after it."""
        for part in (self.preempted, self.queue):
            passed = 0
            while passed < PASSED_OVER and (batch := self._next(part, passed)):
                for request in batch:
                    yield request
                    passed += request in part
            if passed:
                return

    def sample(self, count: int) -> list[Request]:
        """Up to `count` of those who wait: new ones, or preempted ones where there are no new ones."""
        return self.queue.candidates(count) or list(islice(self.preempted, count))

    def _next(self, part: object, passed: int) -> list[Request]:
        if part is self.queue:
            return self.queue.candidates(passed + LOOKED_AT)[passed:]
        return list(islice(self.preempted, passed, passed + LOOKED_AT))
