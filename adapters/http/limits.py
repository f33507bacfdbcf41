"""How much one tenant may ask of one gateway: generations started in a minute, and open at once.

Each gateway counts for itself. What all of them together may put into the queue is the queue's to say
(`max_tenant_queued_requests`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pagemill.adapters.http.errors import ApiError

RETRY_OPEN_MS = 1000
MAX_IDLE_TENANTS = 1024  # books kept of tenants that have nothing open


@dataclass(slots=True)
class _Account:
    tokens: float
    at: float
    open: int = 0


class TenantLimits:
    """A token bucket and a counter for each tenant. `per_minute`, `at_once`: None is no limit.

    `clock`: seconds, monotonic.
    """

    def __init__(
        self, per_minute: int | None, at_once: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_minute = per_minute
        self._at_once = at_once
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    @contextmanager
    def generation(self, tenant: str) -> Iterator[None]:
        """One generation of `tenant`, while the block runs. Raises `ApiError` 429 where it is one too many."""
        account = self._account(tenant)
        if self._at_once is not None and account.open >= self._at_once:
            raise _too_many(f"{account.open} generations are open, http_tenant_requests is {self._at_once}")
        if self._per_minute is not None:
            rate = self._per_minute / 60
            account.tokens = min(self._per_minute, account.tokens + (self._clock() - account.at) * rate)
            account.at = self._clock()
            if account.tokens < 1:
                wait_ms = int((1 - account.tokens) / rate * 1000) + 1
                raise _too_many(f"http_tenant_requests_per_minute is {self._per_minute}", wait_ms)
            account.tokens -= 1
        account.open += 1
        try:
            yield
        finally:
            account.open -= 1

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= MAX_IDLE_TENANTS:
                self._accounts = {name: item for name, item in self._accounts.items() if item.open}
            account = self._accounts[tenant] = _Account(float(self._per_minute or 0), self._clock())
        return account


def _too_many(message: str, retry_after_ms: int = RETRY_OPEN_MS) -> ApiError:
    return ApiError(
        429, message, code="rate_limit_exceeded", kind="rate_limit_error", retry_after_ms=max(1, retry_after_ms)
    )
