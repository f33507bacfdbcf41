"""The webhook role whole: what sends the outbox of one queue from start to stop, alone or inside `serve`."""

from __future__ import annotations

import asyncio

import structlog

from pagemill.adapters.webhook.config import WebhookConfig
from pagemill.adapters.webhook.dispatcher import Dispatcher
from pagemill.adapters.webhook.secret_store import SecretStore
from pagemill.adapters.webhook.sender import Sender
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.redis import connect_commands, shown_url, wait_for_server

_log = structlog.get_logger(__name__)


class WebhookService:
    """Sends webhooks with a connection of its own, once. Raises `ConfigError` where the file of secrets or the list of
    what is allowed is no good."""

    def __init__(self, queue: QueueConfig, config: WebhookConfig) -> None:
        self._queue = queue
        self._config = config
        self.store = SecretStore(config.webhook_secrets)
        self._sender = Sender(config)

    async def run(self, stopping: asyncio.Event) -> None:
        """Send until `stopping` is set; what is under way then ends first, within a try's time. Waits for a Redis that
        is not there yet. Cancelled, it leaves what is under way to the next sender."""
        client = connect_commands(self._queue.redis_url, "pagemill-webhooks")
        try:
            if not await wait_for_server(client, self._queue.redis_url, stopping):
                return
            async with self._sender as sender:
                dispatcher = Dispatcher(client, self._queue, self._config, sender, self.store)
                serving = asyncio.create_task(dispatcher.run())
                waiting = asyncio.create_task(stopping.wait())
                _log.info(
                    "webhooks are sent",
                    queue=self._queue.queue,
                    redis=shown_url(self._queue.redis_url),
                    secrets=self.store.names,
                )
                try:
                    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
                    dispatcher.stop()
                    await serving
                finally:
                    for task in (serving, waiting):
                        task.cancel()
                    await asyncio.gather(serving, waiting, return_exceptions=True)
        finally:
            await client.aclose()
