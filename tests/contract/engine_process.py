"""An engine of its own with slow steps: `python -m tests.contract.engine_process URL QUEUE SECONDS`."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from pagemill.engine.async_engine import AsyncEngine
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.worker import Worker
from tests.chaos.engine_host import run_until_signal
from tests.contract.conftest import ENGINE

LEASE_S = 2.5


async def main(url: str, queue: str, seconds: str) -> None:
    engine = await AsyncEngine.create(ENGINE)
    step = engine._parts.core.step

    def slow_step() -> Any:
        time.sleep(float(seconds))
        return step()

    engine._parts.core.step = slow_step  # type: ignore[method-assign]
    config = QueueConfig(redis_url=url, queue=queue, heartbeat_timeout_s=LEASE_S, block_ms=100, drain_timeout_s=0.5)
    await run_until_signal(Worker(engine, config))
    await engine.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
