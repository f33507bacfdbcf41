"""An engine that is nothing but script calls, and what a scenario reads of the queue."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from pagemill.ingest import scripts
from pagemill.ingest.departure import Departure
from pagemill.ingest.entries import Entry
from pagemill.ingest.events import event
from pagemill.ingest.keys import GROUP, QueueKeys, ShardKeys
from pagemill.ingest.redis import Client, connect_commands

KEYS = QueueKeys("pm", "default")
SHARD = KEYS.shards[0]


class Engine:
    """What an engine does to the queue, one script at a time."""

    def __init__(self, client: Client, owner: str) -> None:
        self.client = client
        self.owner = owner

    async def call(self, call: scripts.Call) -> Any:
        return await scripts.run_one(self.client, call)

    async def take(self) -> Entry:
        reply: Any = await self.client.xreadgroup(GROUP, self.owner, dict.fromkeys(SHARD.streams, ">"), count=1)
        ((stream, ((entry_id, fields),)),) = reply
        return Entry(SHARD, SHARD.streams.index(stream.decode()), entry_id, fields)

    async def begin(
        self, entry: Entry, request_id: str = "a", seed: int = 7, **options: Any
    ) -> scripts.BeginReply | str:
        call = scripts.begin(entry, self.owner, request_id, ttl_ms=60_000, tenant="default", seed=seed, **options)
        return scripts.BeginReply.read(await self.call(call))

    async def append(self, attempt: int, offset: int, events: list[bytes], request_id: str = "a") -> scripts.WriteReply:
        call = scripts.append(SHARD, request_id, self.owner, attempt, offset, events, has_tokens=len(events) > 0)
        return scripts.WriteReply.read(await self.call(call))

    def finish_call(self, entry: Entry, attempt: int, offset: int, state: str, **options: Any) -> scripts.Call:
        return scripts.finish(
            entry,
            options.get("request_id", "a"),
            self.owner,
            attempt,
            offset,
            [done(offset + 1, attempt, state)],
            state=state,
            result=b"[]",
            usage=b"{}",
            metrics=b"{}",
            error=b"",
            num_tokens=3,
            result_ttl_ms=3_600_000,
            replay_ttl_ms=600_000,
            dead_letter=options.get("dead_letter", ""),
        )

    async def finish(
        self, entry: Entry, attempt: int, offset: int, state: str = "completed", **options: Any
    ) -> scripts.WriteReply:
        return scripts.WriteReply.read(await self.call(self.finish_call(entry, attempt, offset, state, **options)))

    async def reap(self, count: int = 9, timeout_ms: int = 60_000, **options: Any) -> list[Entry]:
        if await self.client.zscore(SHARD.heartbeats, self.owner) is None:
            await self.beat()  # as every engine does before it reads
        call = scripts.reap(SHARD, self.owner, timeout_ms=timeout_ms, count=count, **options)
        return scripts.read_given(SHARD, await self.call(call))

    async def orphans(self, count: int = 16, timeout_ms: int = 60_000) -> tuple[list[Entry], list[Entry]]:
        """What is to be ended, and what has no record, from the first entry to the last."""
        if await self.client.zscore(SHARD.heartbeats, self.owner) is None:
            await self.beat()
        places, to_end, unknown = [scripts.FROM_THE_FIRST] * 3, list[Entry](), list[Entry]()
        while True:
            call = scripts.orphans(SHARD, self.owner, places, timeout_ms=timeout_ms, count=count)
            ends, others, places = await self.call(call)
            to_end += scripts.read_given(SHARD, ends)
            unknown += scripts.read_given(SHARD, others)
            if places == [scripts.FROM_THE_FIRST] * 3:
                return to_end, unknown

    async def release(self, *, running: bool = False) -> None:
        await Departure(self.client, KEYS, self.owner).hand_on(running=running)

    async def beat(self) -> None:
        await self.call(scripts.renew(SHARD, self.owner, b"{}"))


def delta(seq: int, attempt: int = 1) -> bytes:
    return event(seq, attempt, "delta", index=0, token_ids=[seq], text=f"{seq} ")


def done(seq: int, attempt: int = 1, state: str = "completed") -> bytes:
    return event(seq, attempt, "done", state=state)


async def one_at_work(client: Client, *names: str) -> tuple[Engine, Engine, Entry]:
    """Two engines that live, of which the first has begun a request."""
    first, second = (Engine(client, name) for name in names)
    await first.beat()
    await second.beat()
    await submit(client)
    entry = await first.take()
    await first.begin(entry)
    return first, second, entry


async def submit(client: Client, request_id: str = "a", **options: Any) -> scripts.SubmitReply:
    body = options.pop("body", b'{"prompt":"x"}')
    defaults: dict[str, Any] = {"priority": 1, "submission": request_id, "ttl_ms": 60_000, "tenant": "default"}
    call = scripts.submit(SHARD, request_id, body, **{"as_blob": False, **defaults, **options})
    return scripts.SubmitReply.read(await scripts.run_one(client, call))


async def raw_add(client: Client, request_id: str = "a", stream: int = 1) -> bytes:
    entry: Any = await client.xadd(SHARD.streams[stream], {"v": 1, "id": request_id, "body": '{"prompt":"x"}'})
    return bytes(entry)


async def cancel(client: Client, request_id: str = "a") -> list[bytes]:
    call = scripts.cancel(SHARD, request_id, error=b"{}")
    reply: list[bytes] = await scripts.run_one(client, call)
    return reply


async def stored(client: Client, request_id: str = "a") -> list[int]:
    entries: Any = await client.xrange(SHARD.events(request_id))
    return [orjson.loads(fields[b"e"])["seq"] for _, fields in entries]


async def record(client: Client, request_id: str = "a") -> dict[str, str]:
    fields: Any = await client.hgetall(SHARD.record(request_id))
    return {name.decode(): value.decode() for name, value in fields.items()}


async def outstanding(client: Client, shard: ShardKeys = SHARD) -> tuple[int, int]:
    """Entries in the streams, and entries pending."""
    entries = pending = 0
    for stream in shard.streams:
        entries += await client.xlen(stream)
        pending += (await client.xpending(stream, GROUP))["pending"]
    return entries, pending


@pytest.fixture
def on_queue(
    any_redis_url: str, run: Callable[[Coroutine[Any, Any, Any]], Any]
) -> Callable[[Callable[[Client], Coroutine[Any, Any, None]]], None]:
    """Runs a scenario on an empty queue that has its groups."""

    @asynccontextmanager
    async def queue() -> AsyncIterator[Client]:
        client = connect_commands(any_redis_url, "test")
        for stream in SHARD.streams:
            await client.xgroup_create(stream, GROUP, id="0", mkstream=True)
        try:
            yield client
        finally:
            await client.aclose()

    def execute(scenario: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
        async def play() -> None:
            async with queue() as client:
                await scenario(client)

        run(play())

    return execute
