"""`pagemill gateway`: HTTP over the queue, until it is told to stop. Needs no engine on its machine.

The first SIGTERM or Ctrl-C stops taking connections and lets open requests end; a second one ends them at once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal

from pagemill.adapters.cli.settings import Settings, without_password
from pagemill.adapters.http.config import GatewayConfig
from pagemill.adapters.http.server import GatewayProcess
from pagemill.ingest.config import QueueConfig

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Serve until a signal. Returns 0 after a clean stop."""
    return asyncio.run(_serve(settings.gateway(), settings.queue()))


async def _serve(config: GatewayConfig, queue: QueueConfig) -> int:
    process = GatewayProcess(config, queue)
    url = await process.start()
    # What has been imported stays; a full collection that walks over it would hold up every stream meanwhile.
    gc.collect()
    gc.freeze()
    queues = ", ".join(repr(name) for name in process.gateway.queues.clients)
    print(f"serving queue {queues} of {without_password(queue.redis_url)} at {url}", flush=True)
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, told.set)
    await told.wait()
    stopping = asyncio.create_task(process.stop())
    for number in SIGNALS:
        loop.add_signal_handler(number, process.gateway.cut)
    await stopping
    return 0
