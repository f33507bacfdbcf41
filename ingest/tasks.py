"""Several tasks that live and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


async def first_of(tasks: Iterable[asyncio.Task[Any]]) -> list[Any]:
    """Wait until one task has ended, and return what those that have say. Raises the error of one that failed."""
    done, _ = await asyncio.wait(list(tasks), return_when=asyncio.FIRST_COMPLETED)
    return [task.result() for task in done]


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended, however they do."""
    pending = list(tasks)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
