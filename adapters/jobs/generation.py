"""One generation for one task of a job queue, however often the task runs.

A task has a key, the same at every try. The first try submits the request under an id and an idempotency key that are
made from it; a later one finds the request and follows it: running, it is watched on from its first token; completed,
its result is there at once. Only where it has failed, or its result is not kept any more, is a new one generated, under
the key of the next generation. So a worker that dies costs the time until the task runs again, and no token.

A thread of a worker waits in slices, since the exceptions by which RQ and Dramatiq end a task only reach a thread that
runs Python code.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pagemill.engine.errors import RequestError
from pagemill.ingest.client import AsyncClient, AsyncHandle, Client, Delta, QueueUnavailableError, Result

MAX_GENERATIONS = 100
SLICE_S = 0.2

_RETRIABLE = frozenset(("queue_full", "no_engine", "deadline_unreachable", "engine_error", "request_lost", "poison"))

OnDelta = Callable[[Delta], None]
OnProgress = Callable[["Progress"], None]


@dataclass(frozen=True, slots=True)
class Progress:
    """What the first choice has so far."""

    text: str
    tokens: int


def is_retriable(error: BaseException) -> bool:
    """Whether the same task may succeed later: the queue was full or away, or an engine failed; not what was wrong with
    the request. `error.retry_after_ms`, where there is one, says when."""
    return isinstance(error, QueueUnavailableError) or (isinstance(error, RequestError) and error.code in _RETRIABLE)


def request_id(key: str, generation: int = 0) -> str:
    """The id of a task's request."""
    name = f"job-{hashlib.sha256(key.encode()).hexdigest()[:40]}"
    return name if generation == 0 else f"{name}.{generation}"


async def submit(client: AsyncClient, key: str, body: Mapping[str, Any]) -> AsyncHandle:
    """The request of task `key`: the one that runs or has completed, else a new one. Raises as `AsyncClient.submit`;
    another body under the same key is an `idempotency_conflict`."""
    for generation in range(MAX_GENERATIONS):
        name = request_id(key, generation)
        handle = await client.submit(**body, id=name, idempotency_key=f"{key}#{generation}")
        if not handle.replayed:
            return handle
        record = await client.record(name)
        if record is not None and (record.state == "completed" or not record.has_ended):
            return handle
    raise RequestError("duplicate_id", f"task {key[:80]} has failed {MAX_GENERATIONS} times", param="idempotency_key")


async def cancel(client: AsyncClient, key: str) -> str:
    """Cancel the request of task `key`. Replies as `AsyncClient.cancel`; a task that has not run yet will be cancelled
    when it comes, if it comes within `result_ttl_s`."""
    latest = request_id(key)
    for generation in range(1, MAX_GENERATIONS):
        name = request_id(key, generation)
        if await client.record(name) is None:
            break
        latest = name
    return await client.cancel(latest)


async def generate(
    client: AsyncClient, key: str, body: Mapping[str, Any], *, on_delta: OnDelta | None = None
) -> Result:
    """Submit or find the request of task `key`, follow it, and return its result. Raises `RequestFailed`.

    `on_delta` is called with every delta, at a later try from the first on. Cancelled, it leaves the request running.
    """
    handle = await submit(client, key, body)
    async with contextlib.aclosing(handle.__aiter__()) as deltas:
        async for delta in deltas:
            if on_delta is not None:
                on_delta(delta)
    return await handle.result()


class _Follower:
    """`generate` as a task on a client's loop, with its deltas kept until they are fetched."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._news = asyncio.Event()
        self._task: asyncio.Task[Result] | None = None

    async def start(self, client: AsyncClient, key: str, body: Mapping[str, Any]) -> None:
        self._task = asyncio.create_task(generate(client, key, body, on_delta=self._add))
        self._task.add_done_callback(lambda _: self._news.set())

    def _add(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._news.set()

    async def fetch(self, wait_s: float) -> tuple[list[Delta], Result | None]:
        """Deltas since the last call, waiting for the first one; and the result, once all are fetched."""
        assert self._task is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._news.wait()
        self._news.clear()
        deltas, self._deltas = self._deltas, []
        return deltas, self._task.result() if self._task.done() else None

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def generate_in_thread(
    client: Client,
    key: str,
    body: Mapping[str, Any],
    *,
    on_delta: OnDelta | None = None,
    on_progress: OnProgress | None = None,
    progress_s: float = 1.0,
    cancels: tuple[type[BaseException], ...] = (),
) -> Result:
    """`generate` for a worker's thread.

    `on_progress` is called every `progress_s` at most. An exception of the kinds in `cancels` cancels the request and
    is raised on; any other that ends the task leaves the request running, for the next try to find.
    """
    thread = client.thread()
    follower = thread.run(_make())
    told_at, parts, tokens = 0.0, [], 0
    try:
        thread.run(follower.start(thread.client, key, body))
        result: Result | None = None
        while result is None:
            deltas, result = thread.run(follower.fetch(SLICE_S))
            for delta in deltas:
                if on_delta is not None:
                    on_delta(delta)
                if delta.index == 0:
                    parts.append(delta.text)
                    tokens += len(delta.token_ids)
            if on_progress is not None and deltas and time.monotonic() - told_at >= progress_s:
                told_at = time.monotonic()
                on_progress(Progress("".join(parts), tokens))
        return result
    except cancels:
        thread.run(cancel(thread.client, key))
        raise
    finally:
        with contextlib.suppress(RuntimeError):  # the client was closed meanwhile
            thread.run(follower.aclose())


async def _make() -> _Follower:
    return _Follower()


def cancel_from_thread(client: Client, key: str) -> str:
    """`cancel` for synchronous code."""
    thread = client.thread()
    return thread.run(cancel(thread.client, key))


def with_deadline(body: Mapping[str, Any], limit_s: float | None) -> dict[str, Any]:
    """A request's body with the task's time limit for its deadline, unless it has one. The limit, not what is left of
    it: a later try must send the same body."""
    limited = limit_s is not None and 0 < limit_s < 604_800 and body.get("ttl_ms") is None
    return {**body, "ttl_ms": max(1, int((limit_s or 0) * 1000))} if limited else dict(body)
