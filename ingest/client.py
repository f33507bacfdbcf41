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
import contextlib
import os
import secrets
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import orjson
from redis.exceptions import RedisError

from pagemill.engine.errors import ErrorCode, PagemillError, RequestError, invalid
from pagemill.ingest import scripts
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.events import event
from pagemill.ingest.keys import QueueKeys, is_request_id
from pagemill.ingest.redis import connect_commands, connect_pubsub, is_unavailable, shown_url
from pagemill.ingest.schema import encode_body
from pagemill.ingest.subscription import Event, EventHub, Subscription

_T = TypeVar("_T")


class QueueUnavailableError(PagemillError):
    """Redis does not answer. A submission may or may not have been accepted: repeat it with the same `id` or
    `idempotency_key`."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New final text of a choice, and the tokens it came from. Offsets count characters and tokens before it."""

    text: str
    token_ids: list[int]
    index: int
    offset: int
    text_offset: int
    seq: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class Result:
    """How a request ended. `usage` counts tokens, `metrics` are ms and counts; `error` is None where it completed."""

    request_id: str
    state: str
    choices: list[Choice]
    usage: Mapping[str, int]
    metrics: Mapping[str, Any]
    error: Mapping[str, Any] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text if self.choices else ""

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first choice."""
        return self.choices[0].token_ids if self.choices else []

    @property
    def finish_reason(self) -> str | None:
        """Why the first choice ended."""
        return self.choices[0].finish_reason if self.choices else None


class RequestFailed(RequestError):
    """A request that did not complete: rejected, failed, expired or cancelled. `result` has what there is."""

    def __init__(self, result: Result) -> None:
        error = result.error or {}
        code: ErrorCode = error.get("code", "engine_error")
        super().__init__(
            code,
            error.get("message", f"the request ended as {result.state}"),
            param=error.get("param"),
            retry_after_ms=error.get("retry_after_ms"),
        )
        self.result = result


class AsyncHandle:
    """A request in the queue. Every iteration starts at the first token, also of a request that has ended.

    `replayed`: the idempotency key was known, and this is the earlier request.
    """

    def __init__(self, client: AsyncClient, request_id: str, *, expected: bool, replayed: bool = False) -> None:
        self.request_id = request_id
        self.replayed = replayed
        self._client = client
        self._expected = expected
        self._result: Result | None = None

    @property
    def id(self) -> str:
        return self.request_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.request_id!r})"

    def moved_to(self, client: AsyncClient) -> AsyncHandle:
        """This handle on another client; itself where that is its client."""
        if client is self._client:
            return self
        return AsyncHandle(client, self.request_id, expected=self._expected, replayed=self.replayed)

    async def events(self, after: int = 0) -> AsyncGenerator[Event, None]:
        """The protocol's events from number `after` + 1 on, up to and with `done`."""
        subscription = await self._client.follow(self.request_id, after=after, expected=self._expected)
        try:
            async with contextlib.aclosing(subscription.events()) as items:
                async for item in items:
                    if item["type"] == "done" and after == 0:
                        self._result = _result(self.request_id, subscription)
                    yield item
        finally:
            await subscription.aclose()

    async def __aiter__(self) -> AsyncGenerator[Delta, None]:
        async for item in self.events():
            if item["type"] == "delta" and (item["text"] or item["token_ids"]):
                yield Delta(
                    text=item["text"],
                    token_ids=item["token_ids"],
                    index=item["index"],
                    offset=item["offset"],
                    text_offset=item["text_offset"],
                    seq=item["seq"],
                )
        self._completed()

    async def result(self, timeout: float | None = None) -> Result:
        """Wait for the end. Raises `RequestFailed`, and `TimeoutError` after `timeout` seconds (cancelling nothing)."""
        if self._result is None:
            async with asyncio.timeout(timeout):
                async for _ in self.events():
                    pass
        return self._completed()

    async def cancel(self) -> str:
        """See `AsyncClient.cancel`."""
        return await self._client.cancel(self.request_id)

    def _completed(self) -> Result:
        assert self._result is not None
        if self._result.state != "completed":
            raise RequestFailed(self._result)
        return self._result


class AsyncClient:
    """Submits requests and follows them, over one connection for events and a pool for commands.

    Takes a `QueueConfig`, or its settings by name; a string is the Redis URL. Belongs to one event loop.
    `patience_s`: how long `attach` waits for a request that nobody has heard of. `watchdog_s`: silence after which the
    stored events are looked at.
    """

    def __init__(
        self,
        config: QueueConfig | str | None = None,
        *,
        patience_s: float | None = 60.0,
        watchdog_s: float = 5.0,
        **settings: Any,
    ) -> None:
        self.config = _config(config, settings)
        self.keys = QueueKeys(self.config.key_prefix, self.config.queue, self.config.shards)
        self._patience_s = patience_s
        name = f"pagemill-client-{os.getpid()}"
        self._redis = connect_commands(self.config.redis_url, name)
        self._pubsub = connect_pubsub(self.config.redis_url, name)
        self._hub = EventHub(self._redis, self._pubsub, self.keys, watchdog_s=watchdog_s)

    async def submit(
        self,
        prompt: str | Mapping[str, Any] | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        prompt_token_ids: list[int] | None = None,
        id: str | None = None,
        idempotency_key: str | None = None,
        traceparent: str | None = None,
        **params: Any,
    ) -> AsyncHandle:
        """Put a request into the queue. `params`: every other name of the protocol's request body.

        Raises `RequestError` before sending for a body that no engine would take, and then `duplicate_id` or
        `idempotency_conflict`; `QueueUnavailableError` where Redis does not answer.
        """
        if isinstance(prompt, Mapping):
            if set(prompt) != {"prompt_token_ids"} or prompt_token_ids is not None:
                raise invalid('a prompt is a string or {"prompt_token_ids": [...]}', "prompt")
            prompt_token_ids, prompt = prompt["prompt_token_ids"], None
        if prompt_token_ids is not None and not isinstance(prompt_token_ids, list):
            # Arrays and tensors have `tolist`, which gives plain integers.
            prompt_token_ids = getattr(prompt_token_ids, "tolist", lambda ids=prompt_token_ids: list(ids))()
        body = {"prompt": prompt, "messages": messages, "prompt_token_ids": prompt_token_ids, **params}
        body["idempotency_key"] = idempotency_key
        data = encode_body(body, self.config.max_body_bytes)
        if id is not None and not is_request_id(id):
            raise invalid("id may hold letters, digits and . _ - and at most 128 characters", "id")
        request_id = self.keys.new_id(idempotency_key) if id is None else id
        priority, ttl_ms, tenant = params.get("priority"), params.get("ttl_ms"), params.get("tenant")
        call = scripts.submit(
            self.keys.shard_of(request_id),
            request_id,
            data,
            priority=1 if priority is None else priority,
            submission=secrets.token_hex(8),
            ttl_ms=self.config.default_ttl_ms if ttl_ms is None else ttl_ms,
            tenant="default" if tenant is None else tenant,
            as_blob=len(data) > self.config.blob_bytes,
            traceparent=traceparent,
            idempotency_key=idempotency_key,
            idempotency_ttl_ms=int(self.config.idempotency_ttl_s * 1000),
        )
        reply = scripts.SubmitReply.read(await self._call(call))
        if reply.status == "duplicate":
            raise RequestError("duplicate_id", f"request id {request_id} is in use (it is {reply.state})", param="id")
        if reply.status == "conflict":
            message = f"the idempotency key belongs to request {reply.request_id}, which had another body"
            raise RequestError("idempotency_conflict", message, param="idempotency_key")
        return AsyncHandle(self, reply.request_id, expected=True, replayed=reply.status == "attached")

    def attach(self, request_id: str) -> AsyncHandle:
        """A handle on a request that somebody else has put into the queue, or is about to."""
        if not is_request_id(request_id):
            raise invalid("id may hold letters, digits and . _ - and at most 128 characters", "id")
        return AsyncHandle(self, request_id, expected=False)

    async def cancel(self, request_id: str) -> str:
        """Cancel a request: "cancelled" (it had not started), "requested" (its engine will end it at once), "noted" (no
        such request is known yet; one that comes will be cancelled), or the state in which it had ended before."""
        if not is_request_id(request_id):
            raise invalid("id may hold letters, digits and . _ - and at most 128 characters", "id")
        error = {"code": "cancelled", "message": "the request was cancelled"}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
        call = scripts.cancel(
            self.keys.shard_of(request_id),
            request_id,
            done=event(1, 0, "done", state="cancelled", usage=usage, metrics={"attempts": 0}, error=error),
            error=orjson.dumps(error),
            result_ttl_ms=int(self.config.result_ttl_s * 1000),
            replay_ttl_ms=int(self.config.replay_ttl_s * 1000),
        )
        reply: list[bytes] = await self._call(call)
        return reply[-1].decode()

    async def follow(self, request_id: str, *, after: int, expected: bool) -> Subscription:
        """A subscription to a request's events; close it when done."""
        return await self._hub.open(request_id, after=after, expected=expected, patience_s=self._patience_s)

    async def aclose(self) -> None:
        await self._hub.aclose()
        await self._redis.aclose()
        await self._pubsub.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _call(self, call: scripts.Call) -> Any:
        try:
            return await scripts.run_one(self._redis, call)
        except (RedisError, OSError) as error:
            if not is_unavailable(error):
                raise
            raise QueueUnavailableError(
                f"redis at {shown_url(self.config.redis_url)} does not answer: {error}"
            ) from error


class _LoopThread:
    """An event loop on a thread of its own, with an `AsyncClient`, for synchronous callers."""

    def __init__(self, config: QueueConfig, options: Mapping[str, Any]) -> None:
        async def make() -> AsyncClient:
            return AsyncClient(config, **options)

        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pagemill-client", daemon=True)
        self._thread.start()
        self.client = self.run(make())

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        # A forked child has the object but not the thread, and its parent still uses the connections.
        if self._loop.is_closed() or self.pid != os.getpid():
            return
        if threading.current_thread() is self._thread:  # the garbage collector may run anywhere
            self._loop.stop()
            return
        self.run(self.client.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


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
        return self._client.cancel(self.request_id)

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
        **settings: Any,
    ) -> None:
        self.config = _config(config, settings)
        self._options = {"patience_s": patience_s, "watchdog_s": watchdog_s}
        self._lock = threading.Lock()
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

    def attach(self, request_id: str) -> Handle:
        """See `AsyncClient.attach`."""
        return Handle(self, self.thread().client.attach(request_id))

    def cancel(self, request_id: str) -> str:
        """See `AsyncClient.cancel`."""
        thread = self.thread()
        return thread.run(thread.client.cancel(request_id))

    def close(self) -> None:
        """Close the connections and end the thread. Safe to call twice."""
        with self._lock:
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
        with self._lock:
            if self._closed:
                raise RuntimeError("the client is closed")
            if self._thread is None or self._thread.pid != os.getpid():
                self._thread = _LoopThread(self.config, self._options)
                # Runs at the interpreter's exit too, before the thread is frozen.
                weakref.finalize(self, self._thread.close)
            return self._thread


def _config(config: QueueConfig | str | None, settings: dict[str, Any]) -> QueueConfig:
    if isinstance(config, str):
        return QueueConfig(redis_url=config, **settings)
    return config.replace(**settings) if config is not None else QueueConfig(**settings)


def _result(request_id: str, subscription: Subscription) -> Result:
    transcript = subscription.transcript
    done = transcript.done
    assert done is not None
    return Result(
        request_id=request_id,
        state=done["state"],
        choices=[Choice(**choice) for choice in transcript.result()],
        usage=done["usage"],
        metrics=done["metrics"],
        error=done.get("error"),
        metadata=done.get("metadata") or {},
    )
