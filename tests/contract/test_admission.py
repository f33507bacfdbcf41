"""An engine that has no room: who waits is refused, expired and cancelled in time all the same."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from pagemill.engine.async_engine import AsyncEngine
from pagemill.ingest import leases
from pagemill.ingest.client import AsyncClient, RequestFailed
from pagemill.ingest.config import QueueConfig
from tests.contract.conftest import STORY, TAG, Outside, held, serving

# Fills the pool of 25 blocks for as long as a test needs.
HOG: dict[str, Any] = {**STORY, "max_tokens": 380, "flush_ms": 0}
MANY = 300
LONG_LEASE = 600.0  # s: it is still good while the engine stands still


async def fill(engine: AsyncEngine, outside: Outside) -> None:
    """Make the engine full: one runs, one waits inside for blocks, and it reads no more."""

    async def reads() -> bool:
        clients = await outside.redis.client_list()
        return any(client["cmd"] == "xreadgroup" and "b" in client["flags"] for client in clients)

    await outside.add("hog", HOG)
    await outside.first_delta("hog")
    await outside.add("second", {**HOG, "prompt": "word " * 385, "max_tokens": 2})
    async with asyncio.timeout(60):
        # A read that was decided on while there was room may be on its way still: seen to be none once is not enough.
        seen = 0
        while seen < 5:
            seen = 0 if engine.num_live < 2 or engine.has_room() or await reads() else seen + 1
            await asyncio.sleep(0.005)


async def knows(outside: Outside) -> bool:
    """Whether the engine has told how fast it is, since one request waits in it."""
    told = orjson.loads((await outside.redis.hvals(f"{TAG}:engines"))[0])
    return bool(told["outlook"] and told["decode_tokens_s"] and told["waiting_requests"] == 1)


async def clear(outside: Outside) -> None:
    for name in ("hog", "second"):
        await outside.redis.hset(f"{TAG}:req:{name}", "cancel", "1")
        await outside.done(name)


def test_who_waits_behind_a_full_engine_is_answered_in_time(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside
) -> None:
    async def scenario() -> None:
        config = queue_config.replace(max_queued_requests=3, heartbeat_timeout_s=LONG_LEASE)
        async with serving(engine, config):
            await fill(engine, outside)
            with held(engine):
                await outside.add("no-json", b"{")
                await outside.add("wrong", {**STORY, "max_tokens": 0})
                await outside.redis.hset(f"{TAG}:blob:odd", "a", "b")
                await outside.redis.expire(f"{TAG}:blob:odd", 60)
                await outside.redis.xadd(f"{TAG}:in:1", {"v": "1", "id": "odd", "blob": "1"})
                await outside.redis.xadd(f"{TAG}:in:1", {"v": "7", "id": "x"})
                for number in range(5):
                    await outside.add(f"r{number}", {**STORY, "max_tokens": 2})
                for name, code in (
                    ("no-json", "invalid_request"),
                    ("wrong", "invalid_request"),
                    ("odd", "request_lost"),
                    ("r4", "queue_full"),
                ):
                    done = await outside.done(name, timeout=60)
                    assert (done["state"], done["error"]["code"]) == ("rejected", code)
                assert done["error"]["retry_after_ms"] >= 100
                letters = await outside.redis.xrange(f"{TAG}:dlq")
                assert {letter[b"reason"] for _, letter in letters} == {b"unknown_version", b"unreadable"}
                # What waits has a record with a deadline, and can be cancelled by hand.
                assert await outside.redis.hget(f"{TAG}:req:r0", "state") == b"queued"
                await outside.redis.hset(f"{TAG}:req:r0", "cancel", "1")
                assert (await outside.done("r0", timeout=60))["state"] == "cancelled"
            assert (await outside.events("hog"))[-1]["type"] == "delta", "the engine was not full all the time"
            await clear(outside)
            for number in (1, 2):
                assert (await outside.done(f"r{number}"))["state"] == "completed"
        await outside.assert_nothing_left()

    play(scenario())


@pytest.mark.parametrize("forecast", ["none", "in time", "too late"])
def test_a_short_deadline_behind_a_full_engine(
    play: Any,
    engine: AsyncEngine,
    queue_config: QueueConfig,
    outside: Outside,
    monkeypatch: pytest.MonkeyPatch,
    forecast: str,
) -> None:
    """Who may not wait for as long as it will take is refused at once; where that cannot be told, or turns out to have
    been wrong, it ends when the deadline has passed."""
    admitted = {"none": None, "in time": [0, 100], "too late": [0, 0.0001]}[forecast]
    outlook = None if admitted is None else {"times": [0, 1], "admitted": admitted, "mean_tokens": 400}
    monkeypatch.setattr(leases, "_told", lambda *_: outlook)

    async def scenario() -> None:
        async with serving(engine, queue_config.replace(heartbeat_timeout_s=LONG_LEASE)) as worker:
            await fill(engine, outside)
            async with asyncio.timeout(60):  # what is told of the engine includes the request that waits in it
                while orjson.loads((await outside.redis.hvals(f"{TAG}:engines"))[0])["waiting_requests"] != 1:
                    await worker._lease.renew()
            with held(engine):
                await outside.add("other", {**STORY, "max_tokens": 1})  # nobody is refused while nothing waits
                async with asyncio.timeout(60):
                    while not await outside.redis.exists(f"{TAG}:req:other"):
                        await asyncio.sleep(0.005)
                ttl_ms = 600_000 if forecast == "too late" else 300
                await outside.add("brief", {**STORY, "ttl_ms": ttl_ms})
                done = await outside.done("brief", timeout=60)
            assert (await outside.events("hog"))[-1]["type"] == "delta", "the engine was not full all the time"
            waited_ms, attempts = done["metrics"]["queue_ms"], done["metrics"]["attempts"]
            if forecast == "too late":
                assert (done["state"], done["error"]["code"]) == ("rejected", "deadline_unreachable")
                assert done["error"]["retry_after_ms"] >= 100
            else:
                assert (done["state"], done["error"]["code"]) == ("expired", "deadline_exceeded")
                assert waited_ms >= 300 and "retry_after_ms" not in done["error"]
            assert attempts == 0
            await clear(outside)
            assert (await outside.done("other"))["state"] == "completed"
        await outside.assert_nothing_left()

    play(scenario())


def test_a_deadline_behind_a_full_engine_is_known_to_be_out_of_reach(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside
) -> None:
    async def scenario() -> None:
        config = queue_config.replace(heartbeat_timeout_s=LONG_LEASE)
        async with serving(engine, config) as worker, AsyncClient(config) as client:
            await fill(engine, outside)
            async with asyncio.timeout(60):
                while not await knows(outside):
                    await worker._lease.renew()
                    await asyncio.sleep(0.01)
            with held(engine):
                # Until the engine has seen steps of many sizes it may take large ones to be as quick as those of one
                # token: so many wait that they are too many by such a forecast too.
                for number in range(MANY):
                    await outside.add(f"r{number}", {**HOG, "max_tokens": 200})
                await outside.add("hasty", {**STORY, "ttl_ms": 10_000})
                done = await outside.done("hasty", timeout=60)
                assert (done["state"], done["error"]["code"]) == ("rejected", "deadline_unreachable")
                assert done["error"]["retry_after_ms"] >= 100
                with pytest.raises(RequestFailed) as refused:  # now all that wait have been seen
                    await client.submit(**STORY, ttl_ms=10_000)
                assert (refused.value.code, refused.value.result.state) == ("deadline_unreachable", "rejected")
                handle = await client.submit(**STORY, priority=0)
            for number in range(MANY):
                await client.cancel(f"r{number}")
            await clear(outside)
            assert (await handle.result()).finish_reason == "length"
        await outside.assert_nothing_left()

    play(scenario())
