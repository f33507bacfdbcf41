"""Saying no at once: queue caps and deadlines that cannot be met, decided when a request comes.

A request is checked and counted in one call, so a burst cannot slip in between. Refusals lean towards accepting: a
deadline counts as unreachable only if a third more time and `GRACE_S` would not do either; nobody is refused while
nobody waits or nothing is known yet, and an empty queue takes any one request, however long.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.engine.errors import RequestError
from pagemill.engine.forecast import Outlook
from pagemill.engine.policy import Backlog

BENEFIT_OF_DOUBT = 4 / 3  # a start that is forecast is taken to come sooner by this factor
GRACE_S = 0.5  # and by this
RETRY_MS = 1000  # while nothing is known
MIN_RETRY_MS = 100
MAX_RETRY_MS = 600_000


@dataclass(frozen=True, slots=True)
class QueueCaps:
    """How much may wait. None: no cap."""

    max_waiting_requests: int | None = None
    max_waiting_prompt_tokens: int | None = None


class Acceptance:
    """The requests that were accepted and have not started, by count. Not thread-safe."""

    def __init__(self, caps: QueueCaps) -> None:
        self._caps = caps
        self._requests = 0
        self._tokens = 0

    @property
    def backlog(self) -> Backlog:
        return Backlog(self._requests, self._tokens)

    def accept(
        self,
        prompt_tokens: int,
        *,
        outlook: Outlook | None = None,
        ahead: Backlog | None = None,
        time_left_s: float | None = None,
    ) -> None:
        """Count a request in, or refuse it. `leave` undoes it.

        `outlook`: None while it is not known. `ahead`: what goes before it, if that is not all that
        waits. `time_left_s`: until its deadline. Raises `queue_full` or `deadline_unreachable`, with `retry_after_ms`.
        """
        self._check_caps(prompt_tokens, outlook)
        if outlook is not None and time_left_s is not None and self._requests:
            forecast_s = outlook.start_s(ahead if ahead is not None else self.backlog, prompt_tokens)
            start_s = forecast_s / BENEFIT_OF_DOUBT - GRACE_S
            if start_s > time_left_s:
                raise RequestError(
                    "deadline_unreachable",
                    f"the request would start in {start_s:.1f} s at the earliest, its deadline is in "
                    f"{max(0.0, time_left_s):.1f} s; {self._requests} requests wait",
                    param="ttl_ms",
                    retry_after_ms=_retry_ms(start_s - time_left_s),
                )
        self.count(prompt_tokens)

    def count(self, prompt_tokens: int) -> None:
        """Count a request in unseen: it was accepted before, by another engine."""
        self._requests += 1
        self._tokens += prompt_tokens

    def leave(self, prompt_tokens: int) -> None:
        """A counted request has started, or ended without."""
        self._requests -= 1
        self._tokens -= prompt_tokens
        assert self._requests >= 0 and self._tokens >= 0, "more requests left than came"

    def _check_caps(self, prompt_tokens: int, outlook: Outlook | None) -> None:
        requests, tokens = self._caps.max_waiting_requests, self._caps.max_waiting_prompt_tokens
        if self._requests == 0:
            return
        if requests is not None and self._requests >= requests:
            raise RequestError(
                "queue_full",
                f"{self._requests} requests wait, max_waiting_requests is {requests}",
                retry_after_ms=self._until_gone(self._requests + 1 - requests, 0, outlook),
            )
        if tokens is not None and self._tokens + prompt_tokens > tokens:
            raise RequestError(
                "queue_full",
                f"{self._tokens} prompt tokens wait; with {prompt_tokens} more max_waiting_prompt_tokens {tokens} "
                "would be exceeded",
                retry_after_ms=self._until_gone(0, self._tokens + prompt_tokens - tokens, outlook),
            )

    def _until_gone(self, requests: int, tokens: int, outlook: Outlook | None) -> int:
        if outlook is None:
            return RETRY_MS
        excess = Backlog(min(requests, self._requests), min(tokens, self._tokens))
        return _retry_ms(outlook.admission_s(excess))


def _retry_ms(seconds: float) -> int:
    return int(min(max(seconds * 1000, MIN_RETRY_MS), MAX_RETRY_MS))
