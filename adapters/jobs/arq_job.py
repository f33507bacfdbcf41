"""arq: generations from coroutines.

    async def summarise(ctx, text):
        return (await generate(ctx, ctx["pagemill"], messages=[...], max_tokens=200, timeout_s=120)).text

    async def startup(ctx):
        ctx["pagemill"] = AsyncClient(...)

    class WorkerSettings:
        functions, on_startup, job_timeout, allow_abort_jobs = [summarise], startup, 120, True

A job does not know its own timeout in arq: give it as `timeout_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from pagemill.adapters.jobs import generation
from pagemill.ingest.client import AsyncClient, Result


async def generate(
    ctx: Mapping[str, Any],
    client: AsyncClient,
    prompt: str | None = None,
    *,
    timeout_s: float | None = None,
    on_delta: generation.OnDelta | None = None,
    cancel_when_stopped: bool = True,
    **body: Any,
) -> Result:
    """Generate for the job of `ctx`; `body` holds any other field of a request. Raises `RequestFailed`.

    arq stops a job in the same way when it is aborted, when its time is over and when the worker shuts down.
    `cancel_when_stopped`: then the request is cancelled, and a later try generates anew; else it runs on, within its
    deadline, for the next try to find.
    """
    key = key_of(ctx["job_id"])
    limited = generation.with_deadline({"prompt": prompt, **body}, timeout_s)
    try:
        return await generation.generate(client, key, limited, on_delta=on_delta)
    except asyncio.CancelledError:
        if cancel_when_stopped:
            # In a task of its own: this one may be cancelled again while it waits.
            await asyncio.shield(asyncio.ensure_future(generation.cancel(client, key)))
        raise


def key_of(job_id: str) -> str:
    return f"arq:{job_id}"


async def cancel(client: AsyncClient, job_id: str) -> str:
    """Cancel what a job generates; replies as `AsyncClient.cancel`."""
    return await generation.cancel(client, key_of(job_id))
