"""Producers and readers: `AsyncClient` for asyncio, `Client` for everything else.

    client = Client(redis_url="redis://localhost:6379/0")
    handle = client.submit(prompt="Once upon a time", max_tokens=64)
    for delta in handle:
        print(delta.text, end="")
    result = handle.result(timeout=30)

Iterating and `result` survive reconnects, a Redis that restarts and engines that crash. Both raise `RequestFailed`
where the request did not complete: a stream that ends without an error is complete. Needs redis, orjson and structlog
only.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from pagemill.ingest.async_client import AsyncClient, AsyncHandle, QueueUnavailableError, make_config
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.model_map import read_models
from pagemill.ingest.replay import Event
from pagemill.ingest.results import Choice, Delta, RequestFailed, Result

__all__ = [
    "AsyncClient",
    "AsyncHandle",
    "Choice",
    "Client",
    "Delta",
    "Handle",
    "QueueUnavailableError",
    "RequestFailed",
    "Result",
]

_T = TypeVar("_T")


class _LoopThread:
    """An event loop on a thread of its own, with an `AsyncClient`, for synchronous callers."""

    def __init__(self, config: QueueConfig, options: Mapping[str, Any]) -> None:
        async def make() -> AsyncClient:
            return AsyncClient(config, **options)

        self.pid = os.getpid()
        self._closing = False
        self._lock = threading.RLock()  # the garbage collector may call `close` in the middle of `_hand_over`
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pagemill-client", daemon=True)
        self._thread.start()
        self.client = self.run(make())

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        future = self._hand_over(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if not self._closing:
                raise
            raise RuntimeError("the client was closed while this call waited") from None
        except BaseException:
            future.cancel()
            raise

    def _hand_over(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        if self.pid != os.getpid():  # an iteration that was under way at a fork; its lock may be held for ever
            work.close()
            raise RuntimeError("the process was forked during this iteration; begin a new one")
        with self._lock:  # so that all that is handed over comes before the end
            if not self._closing:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise RuntimeError("the client is closed")

    def close(self) -> None:
        # A forked child has the object but not the thread, and its parent still uses the connections.
        if self._loop.is_closed() or self.pid != os.getpid():
            return
        if threading.current_thread() is self._thread:  # the garbage collector may run anywhere
            self._loop.stop()
            return
        with self._lock:
            if self._closing:
                return
            self._closing = True
            ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        ended.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        """Close the client; calls of other threads that still wait are told so instead of waiting for ever."""
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        await self.client.aclose()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


class Handle:
    """A request in the queue. Every iteration starts at the first token, also of a request that has ended."""

    def __init__(self, client: Client, handle: AsyncHandle) -> None:
        self._client = client
        self._handle = handle

    @property
    def request_id(self) -> str:
        return self._handle.request_id

    @property
    def id(self) -> str:
        return self._handle.request_id

    @property
    def replayed(self) -> bool:
        """Whether the idempotency key was known, and this is the earlier request."""
        return self._handle.replayed

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.request_id!r})"

    def events(self, after: int = 0) -> Iterator[Event]:
        """The protocol's events from number `after` + 1 on, up to and with `done`."""
        return _iterate(self._client.thread(), self._here().events(after))

    def __iter__(self) -> Iterator[Delta]:
        return _iterate(self._client.thread(), self._here().__aiter__())

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end. Raises `RequestFailed`, and `TimeoutError` after `timeout` seconds (cancelling nothing)."""
        return self._client.thread().run(self._here().result(timeout))

    def cancel(self) -> str:
        """See `AsyncClient.cancel`."""
        return self._client.thread().run(self._here().cancel())

    def _here(self) -> AsyncHandle:
        """The handle on this process's own client."""
        self._handle = self._handle.moved_to(self._client.thread().client)
        return self._handle


def _iterate(thread: _LoopThread, items: AsyncGenerator[_T, None]) -> Iterator[_T]:
    async def following() -> tuple[_T, ...]:
        async for item in items:
            return (item,)
        return ()

    try:
        while found := thread.run(following()):
            yield found[0]
    finally:
        with contextlib.suppress(RuntimeError):
            thread.run(items.aclose())


class Client:
    """`AsyncClient` for synchronous code, with the same arguments. Threads may share it; a forked child may go on using
    it, over connections of its own.
    """

    def __init__(
        self,
        config: QueueConfig | str | None = None,
        *,
        patience_s: float | None = 60.0,
        watchdog_s: float = 5.0,
        models: Mapping[str, str] | str | None = None,
        **settings: Any,
    ) -> None:
        self.config = make_config(config, settings)
        self._options = {"patience_s": patience_s, "watchdog_s": watchdog_s, "models": read_models(models)}
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._thread: _LoopThread | None = None
        self._closed = False

    def submit(
        self,
        prompt: str | Mapping[str, Any] | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        prompt_token_ids: list[int] | None = None,
        id: str | None = None,
        idempotency_key: str | None = None,
        traceparent: str | None = None,
        **params: Any,
    ) -> Handle:
        """See `AsyncClient.submit`."""
        thread = self.thread()
        work = thread.client.submit(
            prompt,
            messages=messages,
            prompt_token_ids=prompt_token_ids,
            id=id,
            idempotency_key=idempotency_key,
            traceparent=traceparent,
            **params,
        )
        return Handle(self, thread.run(work))

    def attach(self, request_id: str, *, model: str | None = None) -> Handle:
        """See `AsyncClient.attach`."""
        return Handle(self, self.thread().client.attach(request_id, model=model))

    def cancel(self, request_id: str, *, model: str | None = None) -> str:
        """See `AsyncClient.cancel`."""
        thread = self.thread()
        return thread.run(thread.client.cancel(request_id, model=model))

    def close(self) -> None:
        """Close the connections and end the thread. Safe to call twice."""
        with self._own_lock():
            thread, self._thread, self._closed = self._thread, None, True
        if thread is not None:
            thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def thread(self) -> _LoopThread:
        """This process's loop; made at the first use, and again in a forked child."""
        with self._own_lock():
            if self._closed:
                raise RuntimeError("the client is closed")
            if self._thread is None or self._thread.pid != os.getpid():
                self._thread = _LoopThread(self.config, self._options)
                # Runs at the interpreter's exit too, before the thread is frozen.
                weakref.finalize(self, self._thread.close)
            return self._thread

    def _own_lock(self) -> threading.Lock:
        """This process's lock: that of its parent may have been held by a thread that is not there after the fork."""
        if self._pid != os.getpid():
            self._lock, self._thread, self._pid = threading.Lock(), None, os.getpid()
        return self._lock
