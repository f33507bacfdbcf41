"""What is done again and again agrees on its moments, and what is asked in one of them goes out together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from pagemill.ingest import scripts
from pagemill.ingest.keys import QueueKeys
from pagemill.ingest.redis import Command, connect_commands
from pagemill.ingest.rounds import Rounds

SHARD = QueueKeys("pm", "default").shards[0]
OPEN = scripts.open_streams(SHARD, "e")


def test_who_waits_from_different_moments_on_asks_in_the_same_pipeline(
    any_redis_url: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        client = connect_commands(any_redis_url, "test")
        rounds = Rounds(client)
        await rounds.ask(OPEN)
        await rounds.ask(scripts.oldest(SHARD))  # the server knows both now
        sent: list[int] = []
        send = client.send

        async def counted(commands: Sequence[Command]) -> list[Any]:
            sent.append(len(commands))
            return await send(commands)

        monkeypatch.setattr(client, "send", counted)

        async def again_and_again(period_s: float, times: int) -> None:
            for _ in range(times):
                await rounds.wait(period_s)
                assert await rounds.ask(scripts.oldest(SHARD)) == [0, 0, 0]

        await rounds.wait(1.0)
        tasks = [asyncio.create_task(again_and_again(0.25, 4))]
        await rounds.wait(0.0625)
        tasks.append(asyncio.create_task(again_and_again(0.5, 2)))
        await rounds.wait(0.0625)
        tasks.append(asyncio.create_task(again_and_again(1.0, 1)))
        await asyncio.gather(*tasks)
        assert sum(sent) == 7
        assert len(sent) <= 5, "timers of their own would have woken the server seven times"
        await client.aclose()

    run(scenario())


def test_a_round_that_was_missed_is_skipped_and_none_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("pagemill.ingest.rounds.time.monotonic", lambda: now)
    rounds = Rounds(connect_commands("redis://127.0.0.1:1/0", "test"))
    assert rounds.left(0.25) == 0.25
    now = 100.1
    assert rounds.left(0.25) == pytest.approx(0.15)
    now = 100.9
    assert rounds.left(0.25) == pytest.approx(0.1), "those at 100.25, 100.5 and 100.75 are over"
    now = 101.0 - 1e-5
    assert rounds.left(0.25) == pytest.approx(0.25, abs=1e-4), "a timer that is early by a hair has had its round"


def test_who_asks_hears_the_error_of_his_own_call(any_redis_url: str, run: Any) -> None:
    async def scenario() -> None:
        client = connect_commands(any_redis_url, "test")
        rounds = Rounds(client)
        await client.set(SHARD.streams[0], "no stream")
        good = scripts.renew(SHARD, "e", b"{}")
        replies = await asyncio.gather(
            rounds.ask(good), rounds.ask(scripts.oldest(SHARD)), rounds.ask(good), return_exceptions=True
        )
        assert "WRONGTYPE" in str(replies[1])
        assert isinstance(replies[0], list)
        assert isinstance(replies[2], list)
        await client.aclose()

    run(scenario())
