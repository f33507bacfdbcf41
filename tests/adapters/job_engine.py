"""A real engine at work in a thread, for tests whose own thread waits for answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis

from pagemill.engine.async_engine import AsyncEngine
from pagemill.engine.config import EngineConfig
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.embedded import EmbeddedServer
from pagemill.ingest.worker import Worker
from tests.contract.conftest import WEIGHTS

ENGINE = EngineConfig(**WEIGHTS, max_model_len=512, num_blocks_override=100, max_num_seqs=4, threads=1)
STEP_S = 0.02  # what each step waits: on a fast machine too, long jobs last longer than their time limits


@contextmanager
def engine_at_work(server: EmbeddedServer, queue: str) -> Iterator[str]:
    """An engine on `queue` of an empty server. Yields the server's URL without a database."""
    base = f"redis://127.0.0.1:{server.port}"
    with redis.Redis.from_url(base) as cleaner:
        cleaner.flushall()
    started = threading.Event()
    running: dict[str, Any] = {}

    async def serve() -> None:
        engine = await AsyncEngine.create(ENGINE)
        step = engine._parts.core.step

        def slow_step() -> Any:
            time.sleep(STEP_S)
            return step()

        engine._parts.core.step = slow_step  # type: ignore[method-assign]
        config = QueueConfig(redis_url=f"{base}/0", queue=queue, poll_ms=50, block_ms=100, drain_timeout_s=1.0)
        worker = Worker(engine, config)
        running.update(loop=asyncio.get_running_loop(), worker=worker)
        task = asyncio.create_task(worker.run())
        await worker.ready.wait()
        started.set()
        await task
        await engine.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(60)
        yield base
    finally:
        if running:
            running["loop"].call_soon_threadsafe(running["worker"].stop)
        thread.join(60)
