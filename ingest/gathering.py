"""What many tasks ask of Redis in the same turn of the event loop goes out as one pipeline.

Whoever sends hundreds of requests, or waits for hundreds of results, has tasks that wake together. By itself each would
take a connection from the pool, and make one where none is free: that costs client and server more than what is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

MAX_TOGETHER = 64
MAX_BYTES = 1 << 20  # the others of a pipeline wait for what is long
MAX_UNDER_WAY = 4  # pipelines; what is asked meanwhile goes out together with the next

Item = TypeVar("Item")
_Asked = tuple[Item, "asyncio.Future[Any]"]


class Gatherer(Generic[Item]):
    """Belongs to one event loop.

    send: sends items and returns their replies in order; what failed has its exception in its place. size: about how
    many bytes one has.
    """

    def __init__(self, send: Callable[[Sequence[Item]], Awaitable[list[Any]]], size: Callable[[Item], int]) -> None:
        self._send = send
        self._size = size
        self._asked: list[_Asked[Item]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, item: Item) -> Any:
        """Send it with what others ask in this turn; returns its reply, or raises what it failed with."""
        loop = asyncio.get_running_loop()
        if not self._asked:
            loop.call_soon(self._go)
        future = loop.create_future()
        self._asked.append((item, future))
        return await future

    def _go(self) -> None:
        if len(self._tasks) >= MAX_UNDER_WAY:
            return  # the first that comes back calls again
        asked, self._asked = self._asked, []
        # Whoever has been cancelled in this same turn has asked nothing.
        for batch in self._batches([pair for pair in asked if not pair[1].done()]):
            task = asyncio.create_task(self._carry(batch))
            self._tasks.add(task)
            task.add_done_callback(self._back)

    def _back(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._asked:
            self._go()

    def _batches(self, asked: list[_Asked[Item]]) -> Iterator[list[_Asked[Item]]]:
        batch: list[_Asked[Item]] = []
        size = 0
        for pair in asked:
            batch.append(pair)
            size += self._size(pair[0])
            if len(batch) == MAX_TOGETHER or size >= MAX_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    async def _carry(self, batch: list[_Asked[Item]]) -> None:
        futures = [future for _, future in batch]
        try:
            replies = await self._send([item for item, _ in batch])
        except asyncio.CancelledError:
            for future in futures:
                future.cancel()
            raise
        except Exception as error:  # each of those who asked raises it
            replies = [error] * len(batch)
        for future, reply in zip(futures, replies, strict=True):
            if future.done():  # nobody waits for it any more
                continue
            if isinstance(reply, BaseException):
                future.set_exception(reply)
            else:
                future.set_result(reply)
