"""Many healthy receivers beside one that drips and one that fails: how long do the healthy ones wait?

python -m tests.adapters.webhook_storm [HEALTHY] [EACH]      # 98 receivers, 10 webhooks for each
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from pagemill.adapters.webhook.secret_store import SecretStore
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.embedded import EmbeddedServer
from tests.adapters.webhook_receiver import Receiver, dispatching, put, receiving, settings


async def storm(
    queue: QueueConfig, secrets: Path, *, healthy: int, each: int, per_bad: int, timeout_s: float = 3.0
) -> dict[str, Any]:
    """Deliver `each` webhooks to every healthy receiver while `per_bad` are due for the dripping one and as many for
    the failing one. Seconds count from the delivery's entry in the outbox to its arrival. `timeout_s`: of one try."""
    dripping_now = most = ended = 0

    async def drip(receiver: Receiver, request: web.Request) -> web.StreamResponse:
        nonlocal dripping_now, most, ended
        dripping_now += 1
        most = max(most, dripping_now)
        try:
            # The head of an answer, one byte at a time and never whole.
            transport: Any = request.transport
            for byte in chain(b"HTTP/1.1 200 OK\r\nX-Slow: ", repeat(ord("a"))):
                transport.write(bytes((byte,)))
                await asyncio.sleep(0.1)
        finally:
            dripping_now -= 1
            ended += 1

    async def fail(receiver: Receiver, request: web.Request) -> web.StreamResponse:
        return web.Response(status=500)

    config = settings(webhook_timeout_s=timeout_s, webhook_delays_s="5,300", webhook_poll_ms=100)
    async with contextlib.AsyncExitStack() as stack:
        dripping = await stack.enter_async_context(receiving(drip))
        failing = await stack.enter_async_context(receiving(fail))
        receivers = [await stack.enter_async_context(receiving()) for _ in range(healthy)]
        dispatcher = await stack.enter_async_context(dispatching(queue, config, secrets))
        # The bad ones are in front of everybody else.
        await put(queue, dripping.url, per_bad, name="drip")
        await put(queue, failing.url, per_bad, name="fail")
        for turn in range(each):
            for number, receiver in enumerate(receivers):
                await put(queue, receiver.url, name=f"ok{turn}-{number}-")
        for receiver in receivers:
            await receiver.wait_for(each)
        dripping_ended = ended
        for task in list(dispatcher._running):  # nobody waits for the slow ones here
            task.cancel()
        waits = sorted(arrived - _due(body) for receiver in receivers for arrived, _, body in receiver.seen)
        return {
            "receivers": healthy,
            "healthy_delivered": len(waits),
            "healthy_p50_s": round(waits[len(waits) // 2], 3),
            "healthy_p99_s": round(waits[int(len(waits) * 0.99)], 3),
            "healthy_max_s": round(waits[-1], 3),
            "tries_at_failing": len(failing.seen),
            "most_at_once_to_dripping": most,
            "dripping_ended": dripping_ended,
        }


def _due(body: bytes) -> float:
    from datetime import datetime

    return datetime.fromisoformat(orjson.loads(body)["timestamp"]).timestamp()


def main() -> None:
    healthy, each = (int(word) for word in (*sys.argv[1:], "98", "10")[:2]) if len(sys.argv) > 2 else (98, 10)
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer() as server:
        secrets = Path(folder) / "secrets.json"
        SecretStore(secrets).rotate("default")
        begun = time.monotonic()
        figures = asyncio.run(
            storm(QueueConfig(redis_url=server.url), secrets, healthy=healthy, each=each, per_bad=500)
        )
        print(orjson.dumps({**figures, "took_s": round(time.monotonic() - begun, 1)}).decode())


if __name__ == "__main__":
    main()
