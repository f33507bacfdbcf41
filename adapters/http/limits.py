"""How much one tenant may ask for: generations started in a minute, and open at once, at all gateways together.

The books are in Redis; without limits nobody asks them. What all tenants together may put into the queue is the queue's
to say (`max_tenant_queued_requests`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from redis.exceptions import RedisError

from pagemill.adapters.http.errors import ApiError
from pagemill.ingest.allowances import LEASE_MS, Allowances
from pagemill.ingest.keys import uuid7_hex
from pagemill.ingest.redis import is_unavailable


class TenantLimits:
    """`per_minute`, `at_once`: None is no limit. `in_background` does what must be done although nobody waits."""

    def __init__(
        self,
        per_minute: int | None,
        at_once: int | None,
        allowances: Allowances,
        in_background: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._per_minute = per_minute
        self._at_once = at_once
        self._allowances = allowances
        self._in_background = in_background
        self._open: set[tuple[str, str]] = set()

    @asynccontextmanager
    async def generation(self, tenant: str) -> AsyncGenerator[None, None]:
        """One generation of `tenant`, while the block runs. Raises `ApiError` 429 where it is one too many, and the
        errors of redis-py."""
        if self._per_minute is None and self._at_once is None:
            yield
            return
        name = uuid7_hex()
        refused = await self._allowances.take(tenant, name, per_minute=self._per_minute, at_once=self._at_once)
        if refused is not None:
            if refused.open is None:
                reason = f"http_tenant_requests_per_minute is {self._per_minute}"
            else:
                reason = f"{refused.open} generations are open, http_tenant_requests is {self._at_once}"
            raise _too_many(reason, refused.wait_ms)
        if self._at_once is None:
            yield
            return
        self._open.add((tenant, name))
        try:
            yield
        finally:
            self._open.discard((tenant, name))
            self._in_background(self._allowances.give_back(tenant, name))

    async def run(self) -> None:
        """Renew the leases of what is open here until cancelled."""
        while True:
            await asyncio.sleep(LEASE_MS / 3000)
            if self._open:
                try:
                    await self._allowances.renew(list(self._open))
                except (RedisError, OSError) as error:
                    if not is_unavailable(error):
                        raise


def _too_many(message: str, retry_after_ms: int) -> ApiError:
    return ApiError(
        429, message, code="rate_limit_exceeded", kind="rate_limit_error", retry_after_ms=max(1, retry_after_ms)
    )
