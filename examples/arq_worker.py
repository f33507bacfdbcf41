"""arq jobs that generate.

pagemill serve                                       # in one terminal
arq examples.arq_worker.WorkerSettings               # in another
python -m examples.arq_worker
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from arq import create_pool
from arq.connections import RedisSettings

from pagemill import AsyncClient
from pagemill.adapters.jobs.arq_job import generate

REDIS = os.environ.get("REDIS_URL", "redis://localhost:6379")
TIMEOUT_S = 300


async def summarise(ctx: dict[str, Any], text: str) -> str:
    messages = [{"role": "user", "content": f"Summarise in one sentence:\n{text}"}]
    return (await generate(ctx, ctx["pagemill"], messages=messages, max_tokens=100, timeout_s=TIMEOUT_S)).text


async def startup(ctx: dict[str, Any]) -> None:
    ctx["pagemill"] = AsyncClient(redis_url=f"{REDIS}/0")


async def shutdown(ctx: dict[str, Any]) -> None:
    await ctx["pagemill"].aclose()


class WorkerSettings:
    functions = (summarise,)
    on_startup, on_shutdown = startup, shutdown
    redis_settings = RedisSettings.from_dsn(f"{REDIS}/4")
    job_timeout = TIMEOUT_S
    allow_abort_jobs = True
    max_jobs = 200  # they wait, they do not compute


async def main() -> None:
    pool = await create_pool(RedisSettings.from_dsn(f"{REDIS}/4"))
    job = await pool.enqueue_job("summarise", "A long text")
    print(await job.result(timeout=TIMEOUT_S) if job is not None else "it is queued already")


if __name__ == "__main__":
    asyncio.run(main())
