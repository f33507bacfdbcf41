"""What tenants may do, counted in Redis, so that several processes count together: so often in a minute, and so many at
once. What is open counts under a lease, which its process renews; of a process that dies it runs out by itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from pagemill.ingest import scripts
from pagemill.ingest.keys import QueueKeys
from pagemill.ingest.redis import Client

LEASE_MS = 30_000


@dataclass(frozen=True, slots=True)
class Refused:
    """`wait_ms`: after which asking again is worth while. `open`: how many are open, where that is too many; else the
    minute's allowance is used up."""

    wait_ms: int
    open: int | None


class Allowances:
    """The books of all tenants of one queue. Every method raises redis-py's errors."""

    def __init__(self, client: Client, keys: QueueKeys) -> None:
        self._client = client
        self._keys = keys

    async def take(self, tenant: str, name: str, *, per_minute: int | None, at_once: int | None) -> Refused | None:
        """Count one more, called `name` while it is open. None: it is allowed."""
        limits = tuple("" if limit is None else limit for limit in (per_minute, at_once))
        call = scripts.Call("allow", self._places(tenant), (name, *limits, LEASE_MS))
        wait_ms, *why = await scripts.run_one(self._client, call)
        if not wait_ms:
            return None
        return Refused(wait_ms, why[1] if why[0] == b"open" else None)

    async def renew(self, names: Iterable[tuple[str, str]]) -> None:
        """Let these, each a tenant and a name, count for another lease."""
        of_tenants: dict[str, list[str]] = {}
        for tenant, name in names:
            of_tenants.setdefault(tenant, []).append(name)
        calls = [
            scripts.Call("allow_longer", self._places(tenant)[1:], (LEASE_MS, *found))
            for tenant, found in of_tenants.items()
        ]
        for reply in await scripts.run(self._client, calls):
            if isinstance(reply, BaseException):
                raise reply

    async def give_back(self, tenant: str, name: str) -> None:
        """It is not open any more."""
        await self._client.execute_command("ZREM", self._places(tenant)[1], name)

    def _places(self, tenant: str) -> tuple[str, str]:
        shard = self._keys.shards[zlib.crc32(tenant.encode()) % len(self._keys.shards)]
        return shard.document(f"rate:{tenant}"), shard.document(f"open:{tenant}")
