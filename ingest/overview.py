"""What a queue says of itself: its engines and how fresh their heartbeats are, what waits, and what was counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from pagemill.ingest.keys import PRIORITIES, QueueKeys
from pagemill.ingest.redis import Client


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine told with its last heartbeat, `age_s` seconds ago. It beats only while its steps get on."""

    name: str
    age_s: float
    description: Mapping[str, Any]

    @property
    def model(self) -> str | None:
        model = self.description.get("model")
        return model if isinstance(model, str) else None


@dataclass(frozen=True, slots=True)
class Overview:
    """`outstanding`: unfinished requests by priority, of all shards. `counters`: the queue's own, added up.
    `hooks_due`: webhooks that wait in the outbox; `hooks_dead`: those that were given up and are kept."""

    engines: tuple[EngineReport, ...]
    outstanding: tuple[int, ...]
    delayed: int
    dead_letters: int
    hooks_due: int
    hooks_dead: int
    counters: Mapping[str, int]

    def living(self, timeout_s: float) -> list[EngineReport]:
        """Engines that have been heard of within `timeout_s`."""
        return [engine for engine in self.engines if engine.age_s <= timeout_s]


async def read_overview(client: Client, keys: QueueKeys) -> Overview:
    """Ask the server, in one round trip. Raises redis-py's errors."""
    pipeline = client.pipeline(transaction=False)
    for shard in keys.shards:
        # By a script, since a cluster is asked at the node that has the shard.
        pipeline.execute_command("EVAL", "return redis.call('TIME')", 1, shard.heartbeats)
        for stream in shard.streams:
            pipeline.execute_command("XLEN", stream)
        pipeline.execute_command("ZCARD", shard.delayed)
        pipeline.execute_command("XLEN", shard.dead_letters)
        pipeline.execute_command("ZCARD", shard.hooks_due)
        pipeline.execute_command("XLEN", shard.hooks_dead)
        pipeline.execute_command("HGETALL", shard.statistics)
        pipeline.execute_command("HGETALL", shard.engines)
        pipeline.execute_command("ZRANGE", shard.heartbeats, 0, -1, "WITHSCORES")
    replies = await client.run_pipeline(pipeline)
    for reply in replies:
        if isinstance(reply, BaseException):
            raise reply
    outstanding, plain = [0] * PRIORITIES, [0] * 4
    counters: dict[str, int] = {}
    # An engine serves every shard with one lease: the shards tell the same of it.
    engines: dict[str, EngineReport] = {}
    width = PRIORITIES + 8
    for first in range(0, len(replies), width):
        (seconds, microseconds), *part = replies[first : first + width]
        now_s = int(seconds) + int(microseconds) / 1e6
        outstanding = [sum(pair) for pair in zip(outstanding, part[:PRIORITIES], strict=True)]
        plain = [sum(pair) for pair in zip(plain, part[PRIORITIES : PRIORITIES + 4], strict=True)]
        told, descriptions, beats = part[PRIORITIES + 4 :]
        for name, value in _pairs(told):
            counters[name.decode()] = counters.get(name.decode(), 0) + int(value)
        descriptions = dict(_pairs(descriptions))
        for owner, score in _pairs(beats):
            if float(score) == 0:
                continue  # it has left
            report = EngineReport(owner.decode(), now_s - float(score) / 1000, _read(descriptions.get(owner)))
            engines[report.name] = report
    delayed, letters, due, given_up = plain
    return Overview(tuple(engines.values()), tuple(outstanding), delayed, letters, due, given_up, counters)


def _pairs(reply: Any) -> list[tuple[bytes, Any]]:
    """A reply of names and values, which redis-py gives as a mapping, as pairs or flat."""
    if isinstance(reply, dict):
        return list(reply.items())
    if reply and isinstance(reply[0], tuple | list):
        return [(name, value) for name, value in reply]
    return list(zip(reply[::2], reply[1::2], strict=True))


def _read(text: bytes | None) -> Mapping[str, Any]:
    """An engine of another version may tell what this one cannot read."""
    try:
        description = orjson.loads(text or b"{}")
    except orjson.JSONDecodeError:
        return {}
    return description if isinstance(description, dict) else {}
