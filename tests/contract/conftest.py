"""One real engine for the session, on one event loop, and a way to talk to it with plain Redis commands only."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis.asyncio as aioredis

from pagemill.engine.async_engine import AsyncEngine
from pagemill.engine.config import EngineConfig
from pagemill.engine.outputs import SequenceOutput
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.embedded import EmbeddedServer
from pagemill.ingest.schema import RequestBody
from pagemill.ingest.worker import Worker
from tests.chaos.engine_host import OddRunner
from tests.chaos.model import engine_config, make_model

# float32, so that a batch, a lone run and a resumed one give the same greedy tokens; weights as their file has them,
# which gives these tokens too, in a third of the time; a pool smaller than the context; one thread, since two engines
# share the cores in some tests.
WEIGHTS: dict[str, Any] = {"dtype": "float32", "quantization": "gguf"}
ENGINE = EngineConfig(**WEIGHTS, max_model_len=512, num_blocks_override=25, max_num_seqs=8, threads=1)
STORY: dict[str, Any] = {"prompt": "Once upon a time there was", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
TAG = "pm:{default.0}"
TINY: dict[str, Any] = {"prompt_token_ids": [3, 1, 4, 1, 5], "max_tokens": 48, "temperature": 0, "ignore_eos": True}
TINY |= {"flush_ms": 0}


@pytest.fixture(scope="session")
def tiny(engine_loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    """An engine with a small model, whose steps leave time to see what is on the way."""
    made = engine_loop.run(AsyncEngine.create(engine_config(make_model(tmp_path_factory.mktemp("tiny")))))
    core: Any = made._core
    core._runner = OddRunner(core._runner, 0.005)
    yield made
    engine_loop.run(made.stop())


@pytest.fixture(scope="session")
def story(engine: AsyncEngine, engine_loop: asyncio.Runner) -> list[int]:
    """The tokens of STORY, straight from the engine."""

    async def generate() -> list[int]:
        body = RequestBody.from_mapping(STORY)
        request = await engine.prepare("story", STORY["prompt"], body.params)
        ended = asyncio.Event()
        token_ids: list[int] = []

        def sink(output: SequenceOutput) -> None:
            token_ids.extend(output.token_ids)
            if output.finish_reason is not None:
                ended.set()

        engine.submit(request, sink)
        await ended.wait()
        return token_ids

    return engine_loop.run(generate())


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
    async with asyncio.timeout(60):
        while engine.num_live:
            await asyncio.sleep(0.01)
    await engine.check()


@contextmanager
def held(engine: AsyncEngine) -> Iterator[None]:
    """The engine's step loop stands still after the step under way: what is answered meanwhile waited for no step. A
    lease of the queue's has to be as long."""
    post, go = engine._post, threading.Event()

    def wait(*arguments: Any) -> None:
        go.wait(120)
        post(*arguments)

    engine._post = wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        go.set()
        engine._post = post  # type: ignore[method-assign]


class Outside:
    """Another program: plain Redis commands, nothing of ours."""

    def __init__(self, url: str, queue: str = "default") -> None:
        self.redis: Any = aioredis.Redis.from_url(url, protocol=2)
        self.tag = f"pm:{{{queue}.0}}"

    async def add(self, request_id: str, body: Any, stream: int = 1, **fields: Any) -> None:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        entry = {"v": "1", "id": request_id, "body": data, **fields}
        flat = [part for pair in entry.items() for part in pair]
        await self.redis.execute_command("XADD", f"{self.tag}:in:{stream}", "*", *flat)

    async def events(self, request_id: str) -> list[dict[str, Any]]:
        return [orjson.loads(fields[b"e"]) for _, fields in await self.redis.xrange(f"{self.tag}:ev:{request_id}")]

    async def live(self, request_id: str, timeout: float = 60) -> AsyncIterator[dict[str, Any]]:
        """Events from the channel alone, from now on, up to `done`. The first item is {} and means: subscribed."""
        async with self.redis.pubsub() as pubsub, asyncio.timeout(timeout):
            await pubsub.subscribe(f"{self.tag}:ch:{request_id}")
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

    async def engines(self) -> list[bytes]:
        names: list[bytes] = await self.redis.hkeys(f"{self.tag}:engines")
        return names

    async def first_delta(self, request_id: str, timeout: float = 60) -> None:
        async with asyncio.timeout(timeout):
            while not any(item["type"] == "delta" for item in await self.events(request_id)):
                await asyncio.sleep(0.005)

    async def text(self, request_id: str) -> str:
        return "".join(item["text"] for item in await self.events(request_id) if item["type"] == "delta")

    async def token_ids(self, request_id: str) -> list[int]:
        deltas = [item for item in await self.events(request_id) if item["type"] == "delta"]
        return [token_id for item in deltas for token_id in item["token_ids"]]

    async def assert_nothing_left(self) -> None:
        """Streams and pending lists are empty, and what has no time to live may have none."""
        for stream in range(3):
            key = f"{self.tag}:in:{stream}"
            assert await self.redis.xlen(key) == 0
            assert (await self.redis.xpending(key, "engines"))["pending"] == 0
        lasting = {"in:0", "in:1", "in:2", "dlq", "engines", "hb", "stat"}
        for key in await self.redis.keys(f"{self.tag}:*"):
            name = key.decode().removeprefix(f"{self.tag}:")
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
    """An engine in a process of its own, on a queue of its own, for what can only be done to a process."""

    def __init__(self, redis_url: str, queue: str) -> None:
        self.queue = queue
        # Slow steps, so that it is in the middle of its requests for as long as a test needs to do something to it.
        command = [sys.executable, "-m", "tests.contract.engine_process", redis_url, queue, "0.3"]
        self.process = subprocess.Popen(command, cwd=Path(__file__).parents[2])

    async def serves(self, outside: Outside, timeout: float = 90) -> None:
        """Wait until it reads the queue."""
        async with asyncio.timeout(timeout):
            while not any(f"-{self.process.pid}-" in name.decode() for name in await outside.engines()):
                assert self.process.poll() is None, "the engine process has ended"
                await asyncio.sleep(0.05)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def engine_processes(valkey: EmbeddedServer) -> Iterator[dict[str, EngineProcess]]:
    """Two engines, "killed" and "leaving", made at the same time since loading takes a while."""
    processes = {name: EngineProcess(valkey.url, name) for name in ("killed", "leaving")}
    yield processes
    for process in processes.values():
        process.end()
