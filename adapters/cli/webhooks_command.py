"""`pagemill webhooks`: sends what the outbox holds, until it is told to stop. Run as many as you like."""

from __future__ import annotations

import argparse
import asyncio
import signal

import structlog

from pagemill.adapters.cli.settings import Settings
from pagemill.adapters.cli.status import DONE
from pagemill.adapters.webhook.config import WebhookConfig
from pagemill.adapters.webhook.dispatcher import Dispatcher
from pagemill.adapters.webhook.secret_store import SecretStore
from pagemill.adapters.webhook.sender import Sender
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.redis import connect_commands, shown_url, wait_for_server

_log = structlog.get_logger(__name__)


def run(args: argparse.Namespace, settings: Settings) -> int:
    asyncio.run(_serve(settings.queue(), settings.webhook()))
    return DONE


async def _serve(queue: QueueConfig, config: WebhookConfig) -> None:
    store, sender = SecretStore(config.webhook_secrets), Sender(config)
    if not store.names:
        _log.warning(
            "there are no webhook secrets: `pagemill hooks rotate-secret default` makes one", file=str(store.path)
        )
    client = connect_commands(queue.redis_url, "pagemill-webhooks")
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        if not await wait_for_server(client, queue.redis_url, stopping):
            return
        async with sender:
            dispatcher = Dispatcher(client, queue, config, sender, store)
            serving = asyncio.create_task(dispatcher.run())
            _log.info("webhooks are sent", queue=queue.queue, redis=shown_url(queue.redis_url), secrets=store.names)
            waiting = asyncio.create_task(stopping.wait())
            await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            dispatcher.stop()
            await serving
    finally:
        await client.aclose()
