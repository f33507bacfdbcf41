"""Takes deliveries from the outbox, has them tried, and writes what became of them.

Every round leases what is due, the oldest first, and starts it at once; what its receiver cannot take now goes back
with a later time, so a lease covers one try and nothing waits inside a process. Rejected: queues for each receiver in
memory, which would need leases as long as the slowest of them.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

import structlog
from redis.exceptions import RedisError
from yarl import URL

from pagemill.adapters.webhook.config import WebhookConfig
from pagemill.adapters.webhook.endpoint import Endpoint, Line
from pagemill.adapters.webhook.schedule import next_delay_s
from pagemill.adapters.webhook.secret_store import SecretStore
from pagemill.adapters.webhook.sender import GONE, Sender, Try
from pagemill.ingest import scripts
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.deliveries import MAX_OFF, Claimed, Deliveries, Delivery, claim, settle
from pagemill.ingest.keys import QueueKeys
from pagemill.ingest.redis import Backoff, Client, is_unavailable

MAX_AGE_MS = 72 * 3_600_000  # what its receiver's failures still put off then is given up
MAX_KNOWN = 10_000  # receivers, and tenants, that are remembered
PUT_OFF_MS = 1000
BEAT_S = 5.0
MISSED_MS = 30_000  # without a round, beyond what a round may take, until this sender counts as stuck
PAGE = 100

_Place = TypeVar("_Place", bound=Hashable)
_AnyLine = TypeVar("_AnyLine", bound=Line)

_log = structlog.get_logger(__name__)


class Dispatcher:
    """Serves the outbox of one queue until `stop`. Any number of them may share one."""

    def __init__(
        self, client: Client, queue: QueueConfig, config: WebhookConfig, sender: Sender, store: SecretStore
    ) -> None:
        self._client = client
        self._config = config
        self._sender = sender
        self._store = store
        self._keys = QueueKeys(queue.key_prefix, queue.queue, queue.shards)
        self._deliveries = Deliveries(client, queue)
        self._lease_ms = int(config.webhook_timeout_s * 2000) + 1000
        self._endpoints: OrderedDict[tuple[str, int], Endpoint] = OrderedDict()
        self._tenants: OrderedDict[str, Line] = OrderedDict()
        self._running: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._alive = self._keys.shards[0].hook_sender(socket.gethostname()[:32])
        self._alive_ms = MISSED_MS + self._lease_ms + config.webhook_poll_ms
        self._beat_at = float("-inf")
        self.delivered = 0

    def stop(self) -> None:
        """Take nothing new; what runs ends first, within a try's time."""
        self._stopping.set()

    async def run(self) -> None:
        backoff = Backoff()
        away = False
        try:
            while not self._stopping.is_set():
                try:
                    wait_s = await self._round()
                except (RedisError, OSError) as error:
                    if not is_unavailable(error):
                        raise
                    if not away:
                        _log.warning("redis is unavailable, webhooks wait", reason=str(error))
                    away = True
                    await backoff.sleep()
                    continue
                away = False
                backoff.reset()
                await self._rest(wait_s)
            if self._running:
                await asyncio.wait(self._running, timeout=self._config.webhook_timeout_s + 1)
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def _rest(self, wait_s: float) -> None:
        if wait_s <= 0:
            return
        try:
            async with asyncio.timeout(wait_s):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def _round(self) -> float:
        """Start what is due. Returns seconds until another look is worth while."""
        free = self._config.webhook_concurrency - len(self._running)
        if free <= 0:
            await asyncio.wait(self._running, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            return 0.0
        shards = self._keys.shards
        count = max(1, min(PAGE, free // len(shards)))
        leases = [secrets.token_hex(8) for _ in shards]
        calls = [
            claim(shard, lease, lease_ms=self._lease_ms, count=count)
            for shard, lease in zip(shards, leases, strict=True)
        ]
        wait_s = self._config.webhook_poll_ms / 1000
        settled: list[scripts.Call] = []
        for shard, lease, reply in zip(shards, leases, await scripts.run(self._client, calls), strict=True):
            if isinstance(reply, BaseException):
                raise reply
            claimed = Claimed.read(shard, lease, reply)
            for delivery in claimed.deliveries:
                if (call := self._start(delivery, claimed)) is not None:
                    settled.append(call)
            if claimed.next_ms is not None:
                wait_s = min(wait_s, claimed.next_ms / 1000)
        if settled:
            await scripts.run(self._client, settled)
        await self._say_alive()
        return wait_s

    async def _say_alive(self) -> None:
        """Only rounds that have asked for work say so: tries that never end leave no place for one."""
        now = time.monotonic()
        if now - self._beat_at >= BEAT_S:
            await self._client.execute_command("SET", self._alive, "1", "PX", self._alive_ms)
            self._beat_at = now

    def _start(self, delivery: Delivery, claimed: Claimed) -> scripts.Call | None:
        """Start a try; or say what becomes of the delivery instead."""
        if delivery.off:
            return settle(delivery, claimed.lease, "disabled", error=f"its URL is off: {delivery.off}")
        now, config = time.monotonic(), self._config
        tenant = _known(self._tenants, delivery.tenant, lambda: Line(config.webhook_tenant_concurrency))
        endpoint = _known(self._endpoints, _place(delivery.url), lambda: Endpoint(config.webhook_endpoint_concurrency))
        wait_s, error = tenant.ask(now), "its tenant has had too many others"
        if wait_s <= 0:
            wait_s, error = endpoint.ask(now), f"its receiver has been failing for too long; {delivery.error}"
            if wait_s > 0:
                tenant.take_back()
        if wait_s > 0:
            if claimed.now - delivery.since > MAX_AGE_MS:
                return settle(delivery, claimed.lease, "dead", error=error)
            return settle(delivery, claimed.lease, "later", delay_ms=int(wait_s * 1000))
        task = asyncio.create_task(self._deliver(delivery, claimed.lease, endpoint, tenant))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return None

    async def _deliver(self, delivery: Delivery, lease: str, endpoint: Endpoint, tenant: Line) -> None:
        begun = time.monotonic()
        outcome, keys = Try(put_off=True), list[bytes]()
        try:
            keys = self._store.keys(delivery.secret)
            if keys:
                outcome = await self._sender.send(
                    delivery.url, delivery.delivery_id, delivery.payload(), keys, delivery.tenant
                )
            else:
                outcome = Try(error=f"no secret {delivery.secret!r} is configured")
        finally:
            now = time.monotonic()
            if outcome.put_off:
                endpoint.take_back()
            else:
                endpoint.end(now, now - begun, outcome.is_overload and bool(keys))
            tenant.end(now, now - begun)
        if outcome.status == GONE:
            try:
                await self._deliveries.disable(delivery.url, "410 gone", int(time.time() * 1000), limit=MAX_OFF)
            except (RedisError, OSError) as error:
                _log.warning("a URL could not be turned off", **delivery.names, url=delivery.place, reason=str(error))
                return  # the lease runs out, and the receiver says so again
        await self._insist(self._verdict(delivery, lease, outcome), delivery)
        self.delivered += outcome.is_delivered

    def _verdict(self, delivery: Delivery, lease: str, outcome: Try) -> scripts.Call:
        status, error = outcome.status, outcome.error
        if outcome.put_off:
            return settle(delivery, lease, "later", delay_ms=PUT_OFF_MS)
        log = _log.bind(**delivery.names, status=status)
        if outcome.is_delivered:
            log.info("webhook delivered", type=delivery.type, tries=delivery.tries + 1)
            return settle(delivery, lease, "delivered", status=status)
        log = log.bind(reason=error)
        if outcome.blocked:
            log.warning("webhook blocked", url=delivery.place)
            return settle(delivery, lease, "blocked", error=error)
        if status == GONE:
            log.warning("webhook's receiver is gone, nothing is sent there any more", url=delivery.place)
            return settle(delivery, lease, "dead", status=status, error=error)
        delay_s = next_delay_s(self._config.delays, delivery.tries + 1, outcome.retry_after_s)
        if delay_s is None:
            log.warning("webhook given up", tries=delivery.tries + 1)
            return settle(delivery, lease, "dead", status=status, error=error)
        log.info("webhook failed and is tried again", tries=delivery.tries + 1, in_s=round(delay_s))
        return settle(delivery, lease, "retrying", delay_ms=int(delay_s * 1000), status=status, error=error)

    async def _insist(self, call: scripts.Call, delivery: Delivery) -> None:
        """Write a verdict, for as long as the lease may last; without it the delivery is sent again."""
        backoff = Backoff()
        give_up = time.monotonic() + self._lease_ms / 1000
        while True:
            try:
                await scripts.run_one(self._client, call)
                return
            except (RedisError, OSError) as error:
                if not is_unavailable(error) or time.monotonic() > give_up:
                    _log.warning("a webhook's end could not be written", **delivery.names, reason=str(error))
                    return
            await backoff.sleep()


def _place(url: str) -> tuple[str, int]:
    try:
        parts = URL(url)
        return parts.host or "", parts.port or 0
    except ValueError:
        return "", 0


def _known(lines: OrderedDict[_Place, _AnyLine], place: _Place, make: Callable[[], _AnyLine]) -> _AnyLine:
    """The line of a place, made where there is none. Of too many, those are dropped that there is nothing to remember
    of, then, if need be, the ones used longest ago."""
    line = lines.get(place)
    if line is None:
        if len(lines) >= MAX_KNOWN:
            for old in [old for old, item in lines.items() if item.is_idle]:
                del lines[old]
        while len(lines) >= MAX_KNOWN:
            lines.popitem(last=False)
        line = lines[place] = make()
    lines.move_to_end(place)
    return line
