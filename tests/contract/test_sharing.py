"""Who gets a part of an engine: priorities, tenants, and requests that nobody watches any more. A tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pagemill.engine.async_engine import AsyncEngine
from pagemill.engine.config import EngineConfig
from pagemill.ingest.client import AsyncClient, RequestFailed
from pagemill.ingest.config import QueueConfig
from tests.contract.conftest import TAG, Outside, serving
from tests.contract.test_leases import prompt, tiny

__all__ = ["tiny"]


@asynccontextmanager
async def tiny_engine(config: EngineConfig, **changes: Any) -> AsyncIterator[AsyncEngine]:
    engine = await AsyncEngine.create(config.replace(**changes))
    try:
        yield engine
    finally:
        await engine.stop()


async def order(outside: Outside, names: list[str]) -> list[str]:
    """The names by the time at which their requests were begun."""
    begun = {}
    for name in names:
        await outside.done(name)
        begun[name] = int(await outside.redis.hget(f"{TAG}:req:{name}", "started"))
    return sorted(names, key=begun.__getitem__)


def test_high_priority_goes_before_normal_before_batch(
    play: Callable[..., Any], tiny: EngineConfig, queue_config: QueueConfig, outside: Outside
) -> None:
    async def scenario() -> None:
        names = []
        for stream in (2, 1, 0):
            for number in range(4):
                names.append(f"{stream}-{number}")
                await outside.add(names[-1], {**prompt(number), "max_tokens": 4}, stream=stream)
        async with tiny_engine(tiny, max_num_seqs=1) as engine, serving(engine, queue_config):
            # Sorted: requests of one turn may begin within the same millisecond, in the order of priority.
            streams = [name[0] for name in await order(outside, sorted(names))]
        # Two turns of three for high, then normal; batch gets its first turn after eleven others or when it is alone.
        # The first few are begun together.
        assert sorted(streams[:6]) == ["0"] * 4 + ["1"] * 2
        assert streams[-4:] == ["2"] * 4
        await outside.assert_nothing_left()

    play(scenario())


def test_a_tenant_at_its_cap_holds_nobody_up(
    play: Callable[..., Any], tiny: EngineConfig, queue_config: QueueConfig, outside: Outside
) -> None:
    config = queue_config.replace(max_tenant_running_requests=2)

    async def scenario() -> None:
        names = [f"x{number}" for number in range(8)]
        async with tiny_engine(tiny) as engine, serving(engine, config):
            for number, name in enumerate(names):
                await outside.add(name, {**prompt(number), "max_tokens": 60}, tenant="x")
            await outside.add("y", {**prompt(9), "max_tokens": 2}, tenant="y")
            assert (await outside.done("y"))["state"] == "completed"
            # It came last and is served first: x waits for its own.
            assert not any(item["type"] == "done" for item in await outside.events("x7"))
            await outside.redis.hset(f"{TAG}:req:x6", "cancel", "1")
            most = 0
            while not any(item["type"] == "done" for item in await outside.events("x7")):
                most = max(most, await outside.redis.zcard(f"{TAG}:run:x"))
                await asyncio.sleep(0.002)
            assert most == 2
            for name in names:
                assert (await outside.done(name))["state"] == ("cancelled" if name == "x6" else "completed")
            # The first few are begun together, then it goes by age.
            assert [name for name in await order(outside, names) if name != "x6"][4:] == ["x4", "x5", "x7"]
        await outside.assert_nothing_left()

    play(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_a_generation_that_nobody_watches_stops(
    play: Callable[..., Any], tiny: EngineConfig, queue_config: QueueConfig, outside: Outside, stream: bool
) -> None:
    body = {**prompt(0), "max_tokens": 100, "stream": stream, "on_disconnect": "cancel", "watch_ms": 3000}

    async def scenario() -> None:
        async with tiny_engine(tiny) as engine:
            step = engine._parts.core.step
            gate = asyncio.get_running_loop()

            def slow_step() -> Any:
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1), gate).result()
                return step()

            engine._parts.core.step = slow_step  # type: ignore[method-assign]
            async with serving(engine, queue_config), AsyncClient(queue_config) as client:
                # A hundred tokens take ten seconds: three leases.
                watched = await client.submit(**{**body, "max_tokens": 60})
                reading = asyncio.create_task(watched.result(timeout=60))
                await outside.add("left", body)
                await outside.add("goes-on", {**body, "on_disconnect": "continue", "max_tokens": 60})
                done = await outside.done("left", timeout=60)
                assert (done["state"], done["error"]["code"]) == ("cancelled", "cancelled")
                assert "nobody watches" in done["error"]["message"] and done["usage"]["completion_tokens"] < 80
                assert (await reading).finish_reason == "length"
                assert (await outside.done("goes-on"))["state"] == "completed"
                # Another program watches with one command, now and then; a reader that leaves ends it.
                await outside.add("raw", {**body, "max_tokens": 100})
                for _ in range(4):
                    await outside.redis.set(f"{TAG}:watch:raw", "1", px=3000)
                    await asyncio.sleep(1.2)
                assert not any(item["type"] == "done" for item in await outside.events("raw"))
                assert (await outside.done("raw", timeout=60))["state"] == "cancelled"
                with pytest.raises(RequestFailed, match="nobody watches"):
                    await client.attach("raw").result(timeout=60)

    play(scenario())
