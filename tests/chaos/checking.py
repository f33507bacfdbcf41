"""The checks at the end of a run, from outside: plain Redis commands, and the page docs/protocol.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import redis.asyncio as aioredis

from tests.chaos.producing import Sent
from tests.chaos.reading import Fold, Violation

LASTING = ("in:0", "in:1", "in:2", "delay", "hook:due", "hook:dead", "dlq", "engines", "hb", "stat")


async def check_requests(redis: aioredis.Redis, tag: str, requests: Sequence[Sent]) -> Counter[str]:
    """Every request ended once, as it would have undisturbed. Returns how many ended in which state."""
    states: Counter[str] = Counter()
    for sent in requests:
        name = sent.request_id
        fold = Fold(name)
        for _, fields in await redis.xrange(f"{tag}:ev:{name}"):
            fold.add(json.loads(fields[b"e"]))
        if fold.done is None:
            raise Violation(name, f"no done after {fold.seq} events")
        fold.check(sent.task)
        state = fold.done["state"]
        if state == "cancelled" and not sent.may_be_cancelled:
            raise Violation(name, "nobody cancelled it")
        if state == "completed" and sent.cancel_acknowledged:
            raise Violation(name, "it completed after its cancel was acknowledged")
        recorded, seq, result = await redis.hmget(f"{tag}:req:{name}", "state", "seq", "result")
        if recorded != state.encode() or int(seq) != fold.seq:
            raise Violation(name, f"the record says {recorded!r} after {seq!r} events")
        for choice in json.loads(result):
            told = fold.choices[choice["index"]]
            if choice["token_ids"] != told.token_ids or choice["text"] != told.text:
                raise Violation(name, "the result in its record is not what its events say")
        states[state] += 1
    return states


async def check_nothing_left(redis: aioredis.Redis, tag: str) -> None:
    """Streams, pending lists and keys without a time to live are back to nothing."""
    for stream in range(3):
        key = f"{tag}:in:{stream}"
        if await redis.xlen(key):
            ((entry, fields), *_) = await redis.xrange(key)
            raise Violation(fields.get(b"id", entry).decode(), f"its entry is still in {key}")
        if await redis.exists(key) and (await redis.xpending(key, "engines"))["pending"]:
            pending = await redis.xpending_range(key, "engines", "-", "+", 1)
            raise Violation(key, f"an entry that has gone is still pending: {pending}")
    async for key in redis.scan_iter(match=f"{tag}:*", count=1000):
        name = key.decode().removeprefix(f"{tag}:")
        if name not in LASTING and await redis.pttl(key) == -1:
            raise Violation(name, "a key without a time to live")


async def check_dead_letters(redis: aioredis.Redis, tag: str, requests: Sequence[Sent]) -> int:
    """Only entries that were sent twice are dead letters, and each no more often than that. Returns how many."""
    allowed = {sent.request_id: sent.sent_again for sent in requests}
    dead: Counter[str] = Counter()
    for _, fields in await redis.xrange(f"{tag}:dlq"):
        name = fields[b"id"].decode()
        dead[name] += 1
        if fields[b"reason"] != b"duplicate_id" or dead[name] > allowed.get(name, 0):
            raise Violation(name, f"a dead letter: {fields[b'reason'].decode()}, {fields[b'error'].decode()}")
    return dead.total()


async def living_engines(redis: aioredis.Redis, tag: str, timeout_s: float) -> list[dict[str, Any]]:
    """What the engines with a fresh heartbeat say of themselves."""
    seconds, _ = await redis.time()
    names = await redis.zrangebyscore(f"{tag}:hb", (seconds - timeout_s) * 1000, "+inf")
    told = await redis.hmget(f"{tag}:engines", names) if names else []
    return [json.loads(description) for description in told if description is not None]


async def tell(redis: aioredis.Redis, tag: str, violation: Violation) -> None:
    """Put what the server knows of the request into the violation."""
    name = violation.request_id
    violation.events = [fields[b"e"].decode() for _, fields in await redis.xrange(f"{tag}:ev:{name}")]
    violation.events.append(f"record: {await redis.hgetall(f'{tag}:req:{name}')}")
    for stream in range(3):
        key = f"{tag}:in:{stream}"
        for entry, fields in await redis.xrange(key):
            if fields.get(b"id") == name.encode():
                pending = await redis.xpending_range(key, "engines", entry, entry, 1)
                violation.events.append(f"entry {entry.decode()} of {key}, pending: {pending}")
    violation.events.append(f"heartbeats: {await redis.zrange(f'{tag}:hb', 0, -1, withscores=True)}")
