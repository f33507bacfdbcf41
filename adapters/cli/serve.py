"""`pagemill serve` and `pagemill engine`: an engine on a queue, with `serve` also a gateway and a sender of webhooks,
until told to stop.

The first SIGTERM or Ctrl-C stops taking requests and lets running ones finish within drain_timeout_s; a second one
stops at once. Either way what is unfinished stays in the stream for the next engine, and in the outbox for the next
sender.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from pagemill.adapters.cli.garbage import import_engine, keep_what_is_there
from pagemill.adapters.cli.progress import progress_bar
from pagemill.adapters.cli.settings import ProcessConfig, Settings, without_password
from pagemill.adapters.cli.signals import at_signal, exit_now, stopped_by_signal
from pagemill.adapters.http.config import GatewayConfig
from pagemill.adapters.webhook.config import WebhookConfig
from pagemill.engine.config import EngineConfig
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.embedded import EmbeddedServer

if TYPE_CHECKING:
    from pagemill.ingest.worker import Worker

LAST_WORDS_S = 1.0  # for what a stopped engine has told to reach the gateway's clients


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Serve until a signal. Returns 0 after a clean stop; a device that fails is an `EngineDeadError`."""
    engine, queue, process = settings.engine(), settings.queue(), settings.process()
    if args.command == "engine":
        import_engine()
        return asyncio.run(_serve(engine, queue))
    gateway, webhook = settings.gateway(), settings.webhook()
    if settings.is_given("redis_url"):
        import_engine()
        return asyncio.run(_serve_all(engine, gateway, webhook, queue))
    with _embedded(process) as server:
        return asyncio.run(_serve_all(engine, gateway, webhook, queue.replace(redis_url=server.url)))


@contextlib.contextmanager
def _embedded(process: ProcessConfig) -> Iterator[EmbeddedServer]:
    """A server that answers. The engine is imported while it starts."""
    server = EmbeddedServer(process.data_dir or default_data_dir(), port=process.port)
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(1) as beside:
            stack.callback(server.stop)
            starting = beside.submit(server.start)
            import_engine()
        starting.result()
        yield server


def default_data_dir() -> Path:
    """Where the embedded server keeps the queue between runs."""
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "pagemill"


async def _serve_all(engine: EngineConfig, gateway: GatewayConfig, webhook: WebhookConfig, queue: QueueConfig) -> int:
    """The gateway listens while the model is loaded, and says that it is not ready; it stops after the engine, whose
    last answers it passes on, and the webhooks after the gateway."""
    from pagemill.adapters.http.server import GatewayProcess
    from pagemill.adapters.webhook.service import WebhookService

    service = WebhookService(queue, webhook)
    process = GatewayProcess(gateway, queue)
    url = await process.start()
    stopping = asyncio.Event()
    sending = asyncio.create_task(service.run(stopping))
    try:
        return await _serve(engine, queue, url, sending)
    finally:
        await process.stop(LAST_WORDS_S)
        stopping.set()
        with at_signal(lambda _: sending.cancel()), contextlib.suppress(asyncio.CancelledError):
            await sending


async def _serve(
    engine_config: EngineConfig,
    queue: QueueConfig,
    http_url: str | None = None,
    beside: asyncio.Task[None] | None = None,
) -> int:
    """Serve with an engine until a signal, or until the task `beside` it ends, whose error its owner raises."""
    from pagemill.engine.async_engine import AsyncEngine
    from pagemill.ingest.worker import Worker

    with at_signal(exit_now), progress_bar() as progress:
        engine = await AsyncEngine.create(engine_config, progress)
    keep_what_is_there()
    worker = Worker(engine, queue)
    serving = asyncio.create_task(worker.run())
    announcing = asyncio.create_task(_announce(worker, engine.info.model_name, queue, http_url))
    with stopped_by_signal(worker, serving):
        try:
            if beside is not None:
                await asyncio.wait({serving, beside}, return_when=asyncio.FIRST_COMPLETED)
                worker.stop()
            await serving
        except asyncio.CancelledError:
            if not serving.cancelled():
                raise
        finally:
            announcing.cancel()
            await engine.stop()
    return 0


async def _announce(worker: Worker, model: str, queue: QueueConfig, http_url: str | None) -> None:
    await worker.ready.wait()
    url = without_password(queue.redis_url)
    print(f"serving {model} from queue {queue.queue!r} at {url}", flush=True)
    if http_url is not None:
        print(f"OpenAI's API at {http_url}/v1", flush=True)
    if sys.stdout.isatty():
        print(f"try, in another terminal:  pagemill submit --redis-url {url} 'Once upon a time'")
        print("Ctrl-C stops: running requests finish first, a second Ctrl-C leaves them to the next engine")
