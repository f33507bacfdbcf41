"""The outbox of webhooks, as those see it who send from it and look after it.

`hook:due` holds what is to be sent by server time, `hook:<id>` each delivery, `hook:dead` what was given up, `hook:off`
the URLs to which nothing is sent. A sender leases a delivery, tries it and settles it; what it leaves unsettled is due
again when the lease runs out, so any number of senders may share the work and any of them may die.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from pagemill.engine.errors import RequestError, invalid
from pagemill.ingest import scripts
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.keys import QueueKeys, ShardKeys
from pagemill.ingest.redis import Client
from pagemill.ingest.schema import DEFAULT_TENANT

TTL_MS = 604_800_000
PAGE = 100
MAX_OFF = 10_000  # URLs that receivers may turn off by themselves

State = Literal["delivered", "retrying", "later", "dead", "blocked", "disabled"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """One webhook of one request. Times are ms of the server's clock; `tries` counts those that were settled; `since`
    is when it was last put into the outbox. `off`: why nothing is sent to its URL, or empty.
    """

    shard: ShardKeys
    delivery_id: str
    request_id: str
    tenant: str
    type: str
    url: str
    secret: str
    data: bytes
    created: int
    since: int
    tries: int
    state: str
    status: str = ""
    error: str = ""
    due: int | None = None
    leased: bool = False
    off: str = ""

    @classmethod
    def read(cls, shard: ShardKeys, name: str, fields: Mapping[bytes, bytes], **more: Any) -> Delivery:
        def text(key: bytes) -> str:
            return fields.get(key, b"").decode(errors="backslashreplace")

        return cls(
            shard,
            name,
            request_id=text(b"request"),
            tenant=text(b"tenant") or DEFAULT_TENANT,
            type=text(b"type"),
            url=text(b"url"),
            secret=text(b"secret"),
            data=fields.get(b"data", b"null"),
            created=int(fields.get(b"created", b"0")),
            since=int(fields.get(b"since", fields.get(b"created", b"0"))),
            tries=int(fields.get(b"tries", b"0")),
            state=text(b"state"),
            status=text(b"status"),
            error=text(b"error"),
            leased=b"lease" in fields,
            **more,
        )

    @property
    def names(self) -> dict[str, str]:
        """What every log line that concerns it has."""
        return {"hook": self.delivery_id, "request_id": self.request_id, "tenant": self.tenant}

    @property
    def place(self) -> str:
        """The URL for the log: what stands behind the path is often a secret."""
        return self.url.partition("?")[0]

    def payload(self) -> bytes:
        """The body of the POST: the same bytes at every try."""
        at = datetime.fromtimestamp(self.created / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return b'{"type":"%s","timestamp":"%s","data":%s}' % (self.type.encode(), at.encode(), self.data)


@dataclass(frozen=True, slots=True)
class Claimed:
    """Deliveries that this sender holds under `lease`. `now`: server ms; `next_ms`: until the next is due, or None."""

    lease: str
    now: int
    next_ms: int | None
    deliveries: list[Delivery]

    @classmethod
    def read(cls, shard: ShardKeys, lease: str, reply: list[Any]) -> Claimed:
        now, next_ms, found = reply
        deliveries = [
            Delivery.read(shard, name.decode(), dict(zip(flat[::2], flat[1::2], strict=True)), off=off.decode())
            for name, flat, off in found
        ]
        return cls(lease, now, None if next_ms < 0 else next_ms, deliveries)


def claim(shard: ShardKeys, lease: str, *, lease_ms: int, count: int) -> scripts.Call:
    """Lease due deliveries; `Claimed.read` reads the reply."""
    return scripts.Call("hook_claim", (shard.hooks_due, shard.hooks_off), (shard.base, lease, lease_ms, count))


def settle(
    delivery: Delivery,
    lease: str,
    state: State,
    *,
    delay_ms: int = 0,
    status: int | None = None,
    error: str = "",
) -> scripts.Call:
    """Write what became of a leased delivery."""
    shard = delivery.shard
    keys = (shard.hooks_due, shard.hook(delivery.delivery_id), shard.hooks_dead, shard.statistics)
    told = "" if status is None else status
    return scripts.Call("hook_settle", keys, (delivery.delivery_id, lease, state, delay_ms, told, error[:500]))


@dataclass(frozen=True, slots=True)
class DeadDelivery:
    """A delivery that was given up; `letter_id` tells when, in ms of the server's clock."""

    shard: ShardKeys
    letter_id: str
    delivery_id: str
    request_id: str
    tenant: str
    type: str
    url: str
    reason: str
    tries: int
    status: str
    error: str

    @property
    def dead_at_ms(self) -> int:
        return int(self.letter_id.partition("-")[0])


class Deliveries:
    """The outbox of a queue, on all of its shards, for whoever looks after it."""

    def __init__(self, client: Client, config: QueueConfig) -> None:
        self._client = client
        self._shards = QueueKeys(config.key_prefix, config.queue, config.shards).shards

    async def pending(self) -> AsyncIterator[Delivery]:
        """What is still to be sent, shard by shard, the soonest first."""
        for shard in self._shards:
            first = 0
            while True:
                page: Any = await self._client.zrange(shard.hooks_due, first, first + PAGE - 1, withscores=True)
                for name, due in page:
                    fields: Any = await self._client.hgetall(shard.hook(name.decode()))
                    if fields:
                        yield Delivery.read(shard, name.decode(), fields, due=int(due))
                if len(page) < PAGE:
                    break
                first += PAGE

    async def get(self, delivery_id: str) -> Delivery | None:
        """A delivery in any state; None where it is not kept (any more)."""
        for shard in self._shards:
            fields: Any = await self._client.hgetall(shard.hook(delivery_id))
            if fields:
                return Delivery.read(shard, delivery_id, fields)
        return None

    async def dead(self) -> AsyncIterator[DeadDelivery]:
        """What was given up, shard by shard, the oldest first."""
        for shard in self._shards:
            last = "-"
            while True:
                page: Any = await self._client.xrange(shard.hooks_dead, last, "+", count=PAGE)
                for letter_id, fields in page:
                    told = {key.decode(): value.decode(errors="backslashreplace") for key, value in fields.items()}
                    yield DeadDelivery(
                        shard,
                        letter_id.decode(),
                        delivery_id=told["hook"],
                        request_id=told["request"],
                        tenant=told.get("tenant", DEFAULT_TENANT),
                        type=told["type"],
                        url=told["url"],
                        reason=told["reason"],
                        tries=int(told["tries"]),
                        status=told["status"],
                        error=told["error"],
                    )
                if len(page) < PAGE:
                    break
                last = "(" + page[-1][0].decode()

    async def retry(self, letter: DeadDelivery) -> None:
        """Send a dead delivery again, with all of its tries. Raises `RequestError` where its content is not kept."""
        shard = letter.shard
        keys = (shard.hooks_due, shard.hook(letter.delivery_id), shard.hooks_dead)
        call = scripts.Call("hook_retry", keys, (letter.delivery_id, letter.letter_id, TTL_MS))
        if await scripts.run_one(self._client, call) == b"gone":
            raise RequestError("request_lost", f"what {letter.delivery_id} said is not kept any more", param="id")

    async def disabled(self) -> dict[str, str]:
        """URLs to which nothing is sent: server ms since when, and why."""
        found: dict[str, str] = {}
        for shard in self._shards:
            off: Any = await self._client.hgetall(shard.hooks_off)
            found |= {url.decode(): why.decode() for url, why in off.items()}
        return found

    async def disable(self, url: str, reason: str, now_ms: int, *, limit: int | None = None) -> bool:
        """Send nothing to `url` any more; what is due for it, or comes, is put among the dead ones. False: there are
        `limit` such URLs already, and this one is not added."""
        for shard in self._shards:
            if limit is not None and await self._client.hlen(shard.hooks_off) >= limit:
                return False
            await self._client.hset(shard.hooks_off, url, f"{now_ms} {reason}")
            await self._client.pexpire(shard.hooks_off, 90 * 86_400_000)
        return True

    async def enable(self, url: str) -> None:
        """Send to `url` again. Raises `RequestError` where it is not disabled."""
        if not sum([await self._client.hdel(shard.hooks_off, url) for shard in self._shards]):
            raise invalid(f"{url[:200]} is not disabled", "url")
