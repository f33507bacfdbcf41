"""What a reader finds of its own after a read that failed, and what it makes of the words of other engines."""

from __future__ import annotations

import asyncio
from typing import Any

from structlog.testing import capture_logs

from pagemill.ingest.config import QueueConfig
from pagemill.ingest.entries import Entry
from pagemill.ingest.keys import GROUP, QueueKeys
from pagemill.ingest.redis import connect_commands
from pagemill.ingest.rounds import Rounds
from pagemill.ingest.stream_reader import StreamReader
from tests.ingest.bare_engine import Engine, raw_add

SHARD = QueueKeys("pm", "default").shards[0]


def test_own_entries_are_read_again_and_none_of_them_is_too_long_to_come(any_redis_url: str, run: Any) -> None:
    """A body that takes longer than a reply may would otherwise be asked for for ever, and nothing after it come."""
    config = QueueConfig(redis_url=any_redis_url, block_ms=50, max_body_bytes=1024)

    async def beat() -> None:
        pass

    async def scenario() -> None:
        client = connect_commands(any_redis_url, "test")
        reader = StreamReader(
            SHARD,
            "e",
            client,
            Rounds(client),
            config,
            asyncio.Event(),
            beat,
            lambda: True,
            lambda place: None,
            lambda: None,
        )
        assert await reader.read() == []
        stream = SHARD.streams[1]
        bodies = [b"short", b"x" * 20_000_000, b"gone", *(b"%d" % number for number in range(250)), b"y" * 1024]
        for number, body in enumerate(bodies):
            entry_id = "*" if number + 1 < len(bodies) else f"{2**64 - 1}-{2**64 - 1}"  # none can come after it
            await client.xadd(stream, {"v": 1, "id": f"r{number}", "body": body}, id=entry_id)
        await client.xreadgroup(GROUP, "e", {stream: ">"}, count=1000)
        await client.xdel(stream, (await client.xrange(stream))[2][0])
        reader.look_again()
        found = await reader.read()
        assert [entry.fields[b"body"] for entry in found] == [b"short", b"x" * 1025, *bodies[3:]]
        assert [entry.fields[b"id"] for entry in found][-1] == b"r253"
        assert (await client.xpending(stream, GROUP))["pending"] == len(bodies) - 1, "what was deleted is let go"
        await reader.aclose()
        await client.aclose()

    run(scenario())


def test_a_word_that_is_not_known_is_a_reason_to_look_and_is_told_once(any_redis_url: str, run: Any) -> None:
    """Engines of two versions live side by side while one takes the other's place."""
    config = QueueConfig(redis_url=any_redis_url, block_ms=50)

    async def scenario() -> None:
        client = connect_commands(any_redis_url, "test")
        reader, leaves = Engine(client, "reads"), Engine(client, "leaves")
        # Time stands still: once it has looked it never does by itself.
        reads = StreamReader(
            SHARD,
            "reads",
            client,
            Rounds(client),
            config,
            asyncio.Event(),
            reader.beat,
            lambda: True,
            lambda place: None,
            lambda: None,
            lambda: 0.0,
        )
        assert await reads.read() == []
        await leaves.beat()
        with capture_logs() as logs:
            for number in range(3):
                await raw_add(client, f"r{number}")
                await leaves.take()
                await leaves.release()
                await client.xtrim(SHARD.told("reads"), maxlen=0)
                assert await reads.read() == []
                await client.xadd(SHARD.told("reads"), {"future": "word"})
                found: list[Entry] = []
                async with asyncio.timeout(60):
                    while not found:
                        found = await reads.read()
                assert [entry.fields[b"id"] for entry in found] == [b"r%d" % number]
                assert await reads.read() == [], "it has looked to the end"
        assert [line["event"] for line in logs if line["log_level"] == "warning"] == [
            "what another engine says cannot be read"
        ]
        await reads.aclose()
        await client.aclose()

    run(scenario())
