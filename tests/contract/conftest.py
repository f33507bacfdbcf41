"""One real engine for the session, on one event loop, and a way to talk to it with plain Redis commands only."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis.asyncio as aioredis

from pagemill.engine.async_engine import AsyncEngine
from pagemill.engine.config import EngineConfig
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.worker import Worker

# float32, so that a batch, a lone run and a resumed one give the same greedy tokens; a pool smaller than the context.
ENGINE = EngineConfig(dtype="float32", max_model_len=512, num_blocks_override=25, max_num_seqs=8)
TAG = "pm:{default.0}"


@pytest.fixture(scope="session")
def engine_loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def engine(engine_loop: asyncio.Runner) -> Iterator[AsyncEngine]:
    made = engine_loop.run(AsyncEngine.create(ENGINE))
    yield made
    engine_loop.run(made.stop())


@pytest.fixture
def play(engine_loop: asyncio.Runner) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a scenario on the engine's event loop."""
    return engine_loop.run


@asynccontextmanager
async def serving(engine: AsyncEngine, config: QueueConfig) -> AsyncIterator[Worker]:
    """The engine at work on the queue; afterwards it holds nothing any more."""
    worker = Worker(engine, config)
    task = asyncio.create_task(worker.run())
    try:
        ready = asyncio.create_task(worker.ready.wait())
        await asyncio.wait({ready, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            ready.cancel()
            task.result()
        yield worker
    finally:
        worker.stop()
        await task
    async with asyncio.timeout(5):
        while engine.num_live:
            await asyncio.sleep(0.01)
    await engine.check()


class Outside:
    """Another program: plain Redis commands, nothing of ours."""

    def __init__(self, url: str) -> None:
        self.redis: Any = aioredis.Redis.from_url(url, protocol=2)

    async def add(self, request_id: str, body: Any, stream: int = 1, **fields: Any) -> None:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        entry = {"v": "1", "id": request_id, "body": data, **fields}
        flat = [part for pair in entry.items() for part in pair]
        await self.redis.execute_command("XADD", f"{TAG}:in:{stream}", "*", *flat)

    async def events(self, request_id: str) -> list[dict[str, Any]]:
        return [orjson.loads(fields[b"e"]) for _, fields in await self.redis.xrange(f"{TAG}:ev:{request_id}")]

    async def live(self, request_id: str, timeout: float = 60) -> AsyncIterator[dict[str, Any]]:
        """Events from the channel alone, from now on, up to `done`. The first item is {} and means: subscribed."""
        async with self.redis.pubsub() as pubsub, asyncio.timeout(timeout):
            await pubsub.subscribe(f"{TAG}:ch:{request_id}")
            async for message in pubsub.listen():
                if message["type"] == "subscribe":
                    yield {}
                    continue
                seq, _, data = message["data"].partition(b" ")
                item = orjson.loads(data)
                assert item["seq"] == int(seq)
                yield item
                if item["type"] == "done":
                    return

    async def done(self, request_id: str, timeout: float = 60) -> dict[str, Any]:
        """The last event of a request, once it is stored."""
        async with asyncio.timeout(timeout):
            while True:
                events = await self.events(request_id)
                if events and events[-1]["type"] == "done":
                    return events[-1]
                await asyncio.sleep(0.005)

    async def first_delta(self, request_id: str, timeout: float = 60) -> None:
        async with asyncio.timeout(timeout):
            while not any(item["type"] == "delta" for item in await self.events(request_id)):
                await asyncio.sleep(0.005)

    async def text(self, request_id: str) -> str:
        return "".join(item["text"] for item in await self.events(request_id) if item["type"] == "delta")

    async def token_ids(self, request_id: str) -> list[int]:
        deltas = [item for item in await self.events(request_id) if item["type"] == "delta"]
        return [token_id for item in deltas for token_id in item["token_ids"]]

    async def assert_nothing_left(self, streams: int = 3) -> None:
        """Streams and pending lists are empty, and what has no time to live may have none."""
        for stream in range(streams):
            key = f"{TAG}:in:{stream}"
            assert await self.redis.xlen(key) == 0
            assert (await self.redis.xpending(key, "engines"))["pending"] == 0
        lasting = {"in:0", "in:1", "in:2", "dlq", "engines", "hb", "stat"}
        for key in await self.redis.keys("*"):
            name = key.decode().removeprefix(f"{TAG}:")
            ttl = await self.redis.pttl(key)
            assert name in lasting if ttl == -1 else ttl > 0, name

    async def aclose(self) -> None:
        await self.redis.aclose()


@pytest.fixture
def outside(redis_url: str, play: Callable[[Coroutine[Any, Any, Any]], Any]) -> Iterator[Outside]:
    async def make() -> Outside:
        return Outside(redis_url)

    made = play(make())
    yield made
    play(made.aclose())


class EngineProcess:
    """An engine in a process of its own, for what can only be done to a process."""

    def __init__(self, redis_url: str) -> None:
        command = [sys.executable, "-m", "tests.contract.engine_process", redis_url]
        self.process = subprocess.Popen(command, cwd=Path(__file__).parents[2], env={**os.environ, "NO_COLOR": "1"})

    async def serves(self, outside: Outside, timeout: float = 90) -> None:
        deadline = time.monotonic() + timeout
        while not any(f"-{self.process.pid}-" in name.decode() for name in await outside.redis.hkeys(f"{TAG}:engines")):
            assert self.process.poll() is None, "the engine process has ended"
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def engine_process(redis_url: str) -> Iterator[EngineProcess]:
    process = EngineProcess(redis_url)
    yield process
    process.end()
