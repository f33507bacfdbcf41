"""Producers: our client and plain XADD, which repeat what was not answered, send twice, and cancel at random."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field

import redis.asyncio as aioredis
from redis.exceptions import RedisError

from pagemill.engine.errors import RequestError
from pagemill.ingest.client import AsyncClient, QueueUnavailableError
from tests.chaos.catalogue import Task
from tests.chaos.reading import ENDED, Violation

RETRY_S = 0.05
KEEP = {"max_attempts": 100, "ttl_ms": 3_600_000}  # engines are killed all the time, which is nobody's poison


@dataclass(slots=True)
class Sent:
    """One accepted request. `sent_again`: entries beyond the first that its producer may have made."""

    request_id: str
    task: Task
    cancel_acknowledged: bool = False
    may_be_cancelled: bool = False
    sent_again: int = 0


@dataclass(slots=True)
class Producers:
    """Sends requests over the connections of `clients` and `raw`, which break."""

    clients: list[AsyncClient]
    raw: aioredis.Redis
    tag: str
    counts: Counter[str] = field(default_factory=Counter)

    async def by_client(self, task: Task, request_id: str, rng: random.Random) -> Sent:
        """Through `AsyncClient.submit`, with an id or with an idempotency key; again until it is answered."""
        client = rng.choice(self.clients)
        name = {"id": request_id} if rng.random() < 0.5 else {"idempotency_key": request_id}
        sent = Sent("", task)
        sent.request_id = await self._submit(client, task, name, sent)
        if rng.random() < 0.1:
            self.counts["sent twice"] += 1
            again = await self._submit(rng.choice(self.clients), task, name, sent)
            if again != sent.request_id:
                raise Violation(sent.request_id, f"sent again it became {again}")
        return sent

    async def _submit(self, client: AsyncClient, task: Task, name: dict[str, str], sent: Sent) -> str:
        while True:
            try:
                handle = await client.submit(**task.body, **KEEP, **name)
            except QueueUnavailableError:
                self.counts["submits repeated"] += 1
                await asyncio.sleep(RETRY_S)
            except RequestError as error:
                if error.code != "duplicate_id":
                    raise Violation(str(name), f"submit says {error.code}: {error}") from error
                return name["id"]
            else:
                return handle.id

    async def by_xadd(self, task: Task, request_id: str, rng: random.Random) -> Sent:
        """As a program without our library does, and one that repeats what was not answered."""
        sent = Sent(request_id, task)
        data = json.dumps(task.body | KEEP)
        fields = ["v", "1", "id", request_id]
        if rng.random() < 0.25:
            fields += ["blob", "1"]
            await self._insist("SET", f"{self.tag}:blob:{request_id}", data, "PX", 4_000_000)
        else:
            fields += ["body", data]
        words = ("XADD", f"{self.tag}:in:{rng.randrange(3)}", "*", *fields)
        sent.sent_again = await self._insist(*words)
        if rng.random() < 0.1:
            self.counts["sent twice"] += 1
            sent.sent_again += 1 + await self._insist(*words)
        return sent

    async def cancel(self, sent: Sent, rng: random.Random) -> None:
        """Cancel with the script or by the field; an acknowledgement says whether it came before the end."""
        sent.may_be_cancelled = True
        if rng.random() < 0.5:
            try:
                reply = await rng.choice(self.clients).cancel(sent.request_id)
            except QueueUnavailableError:
                return
            sent.cancel_acknowledged = reply not in ENDED or reply == "cancelled"
        else:
            record = f"{self.tag}:req:{sent.request_id}"
            pipeline = self.raw.pipeline(transaction=True)
            pipeline.hget(record, "state")
            pipeline.hset(record, "cancel", "1")
            pipeline.execute_command("EXPIRE", record, 3600, "NX")
            try:
                state, _, _ = await pipeline.execute()
            except (RedisError, OSError):
                return
            sent.cancel_acknowledged = state is None or state.decode() not in ENDED
        self.counts["cancels acknowledged"] += sent.cancel_acknowledged

    async def _insist(self, *words: str | int) -> int:
        """Repeat a command until it is answered; returns how many times it may have been executed too often."""
        lost = 0
        while True:
            try:
                await self.raw.execute_command(*words)
            except (RedisError, OSError):
                lost += 1
                self.counts["commands repeated"] += 1
                await asyncio.sleep(RETRY_S)
            else:
                return lost
