"""An engine for crowds, as a process of its own: `python -m tests.adapters.crowd_engine URL MODEL STEP_MS`.

Its model is tiny and random, and each of its steps waits, so that many streams get a token at the same pace.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any

import structlog

from pagemill.engine.assembly import build
from pagemill.engine.async_engine import AsyncEngine
from pagemill.engine.config import EngineConfig
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.worker import Worker
from tests.chaos.engine_host import OddRunner, run_until_signal
from tests.chaos.model import CONTEXT


async def serve(url: str, model: str, step_ms: float) -> None:
    """Serve until a signal; says "ready" on standard output."""
    config = EngineConfig(
        model=model,
        served_model_name="tiny",
        dtype="float32",
        max_model_len=CONTEXT,
        num_blocks_override=8192,
        block_size=16,
        max_num_seqs=512,
        num_speculative_tokens=0,
        threads=1,
    )
    parts = build(config)
    core: Any = parts.core
    core._runner = OddRunner(core._runner, step_ms / 1000)
    engine = AsyncEngine(parts, asyncio.get_running_loop())
    worker = Worker(engine, QueueConfig(redis_url=url, drain_timeout_s=1.0))
    running = asyncio.create_task(run_until_signal(worker))
    await worker.ready.wait()
    gc.collect()
    gc.freeze()  # as `pagemill engine` does
    print("ready", flush=True)
    await running
    await engine.stop()


if __name__ == "__main__":
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger("warning"),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    asyncio.run(serve(sys.argv[1], sys.argv[2], float(sys.argv[3])))
