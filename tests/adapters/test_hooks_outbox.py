"""The outbox's scripts, on the oldest server too: written once, leased to one sender, settled once."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from pagemill.ingest import scripts
from pagemill.ingest.callback import Callback
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.deliveries import Claimed, Deliveries, claim, settle
from pagemill.ingest.redis import Client
from tests.ingest.bare_engine import SHARD, Engine, delta, submit

CALLBACK = Callback("https://example.com/", ("request.started", "request.completed")).stored({"a": "b"})


def started(owner: str, attempt: int, offset: int) -> scripts.Call:
    event = delta(offset + 1, attempt)
    return scripts.append(SHARD, "a", owner, attempt, offset, [event], started_hook=b'{"id":"a"}')


def test_each_webhook_is_written_once(
    on_queue: Callable[[Callable[[Client], Coroutine[Any, Any, None]]], None],
) -> None:
    async def scenario(client: Client) -> None:
        await submit(client, callback=CALLBACK)
        first, second = Engine(client, "e1"), Engine(client, "e2")
        entry = await first.take()
        await first.begin(entry)
        for _ in range(2):  # the reply got lost
            await scripts.run_one(client, started("e1", 1, 0))
        claimed = Claimed.read(SHARD, "x", await scripts.run_one(client, claim(SHARD, "x", lease_ms=9000, count=9)))
        (delivery,) = claimed.deliveries
        assert delivery.type == "request.started"
        await scripts.run_one(client, settle(delivery, "x", "delivered", status=200))
        await client.zadd(SHARD.heartbeats, {"e1": 1})  # the first one has long been silent
        (entry,) = await second.reap()
        begun = await second.begin(entry, alone=True)
        assert isinstance(begun, scripts.BeginReply) and begun.attempt == 2
        await scripts.run_one(client, started("e2", 2, 1))
        call = scripts.finish(
            entry,
            "a",
            "e2",
            2,
            2,
            [delta(3, 2)],
            state="completed",
            result=b"[]",
            usage=b"{}",
            metrics=b"{}",
            error=b"",
            num_tokens=1,
            result_ttl_ms=60_000,
            replay_ttl_ms=60_000,
            end_hook=b'{"id":"a","state":"completed"}',
            started_hook=b'{"id":"a"}',
        )
        for _ in range(2):
            assert (await scripts.run_one(client, call)).startswith(b"ok")
        (pending,) = [item async for item in Deliveries(client, QueueConfig()).pending()]
        assert pending.type == "request.completed"

    on_queue(scenario)


def test_a_lease_is_one_senders(on_queue: Callable[[Callable[[Client], Coroutine[Any, Any, None]]], None]) -> None:
    async def leased(client: Client, lease: str, lease_ms: int) -> Claimed:
        call = claim(SHARD, lease, lease_ms=lease_ms, count=10)
        return Claimed.read(SHARD, lease, await scripts.run_one(client, call))

    async def scenario(client: Client) -> None:
        await submit(client, callback=Callback("https://example.com/").stored(None))
        await scripts.run_one(client, scripts.cancel(SHARD, "a", error=b'{"code":"cancelled","message":"x"}'))
        slow = await leased(client, "slow", 0)
        (delivery,) = slow.deliveries
        assert delivery.payload().startswith(b'{"type":"request.cancelled","timestamp":"') and delivery.tries == 0
        held = await leased(client, "quick", 60_000)  # the first lease is over
        assert [item.delivery_id for item in held.deliveries] == [delivery.delivery_id]
        nothing = await leased(client, "third", 60_000)
        assert nothing.deliveries == [] and nothing.next_ms is not None and 10_000 < nothing.next_ms <= 60_000
        assert await scripts.run_one(client, settle(delivery, "slow", "delivered", status=200)) == b"lost"
        assert await scripts.run_one(client, settle(delivery, "quick", "later", delay_ms=0)) == b"ok"
        await leased(client, "again", 60_000)
        call = settle(delivery, "again", "dead", status=500, error="no")
        assert [await scripts.run_one(client, call) for _ in range(2)] == [b"ok", b"lost"]
        deliveries = Deliveries(client, QueueConfig())
        (letter,) = [item async for item in deliveries.dead()]
        assert (letter.reason, letter.status, letter.error, letter.tries) == ("dead", "500", "no", 1)
        await deliveries.retry(letter)
        await deliveries.retry(letter)  # told twice
        (pending,) = [item async for item in deliveries.pending()]
        assert (pending.state, pending.tries) == ("waiting", 0) and pending.since >= pending.created
        assert await deliveries.disable("https://example.com/1", "410 gone", 1, limit=1)
        assert not await deliveries.disable("https://example.com/2", "410 gone", 1, limit=1)
        assert await deliveries.disable("https://example.com/3", "by hand", 1)
        assert set(await deliveries.disabled()) == {"https://example.com/1", "https://example.com/3"}
        await client.unlink(SHARD.hook(delivery.delivery_id))
        assert (await leased(client, "gone", 60_000)).deliveries == [] and await client.zcard(SHARD.hooks_due) == 0

    on_queue(scenario)
