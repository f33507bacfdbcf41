"""`pagemill webhooks`: sends what the outbox holds, until it is told to stop. Run as many as you like."""

from __future__ import annotations

import argparse
import asyncio
import signal

import structlog

from pagemill.adapters.cli.settings import Settings
from pagemill.adapters.cli.status import DONE
from pagemill.adapters.webhook.service import WebhookService

_log = structlog.get_logger(__name__)


def run(args: argparse.Namespace, settings: Settings) -> int:
    service = WebhookService(settings.queue(), settings.webhook())
    if not service.store.names:
        _log.warning(
            "there are no webhook secrets: `pagemill hooks rotate-secret default` makes one",
            file=str(service.store.path),
        )
    asyncio.run(_serve(service))
    return DONE


async def _serve(service: WebhookService) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await service.run(stopping)
