"""The client for asyncio: submits requests and follows them. `Client` in `ingest/client.py` is its synchronous face."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import orjson
from redis.exceptions import RedisError

from pagemill.engine.errors import PagemillError, RequestError, invalid
from pagemill.ingest import scripts
from pagemill.ingest.allowances import Allowances
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.end_waiter import EndWaiter
from pagemill.ingest.event_hub import EventHub
from pagemill.ingest.events import Transcript
from pagemill.ingest.gathering import Gatherer
from pagemill.ingest.keys import QueueKeys, is_request_id
from pagemill.ingest.model_map import queue_of, read_models
from pagemill.ingest.overview import Overview, read_overview
from pagemill.ingest.records import Record, read_record
from pagemill.ingest.redis import connect_commands, may_pass, shown_url
from pagemill.ingest.replay import Event
from pagemill.ingest.results import Delta, RequestFailed, Result, refused_result, result_of
from pagemill.ingest.schema import check_and_encode
from pagemill.ingest.shelf import Shelf
from pagemill.ingest.subscription import Subscription

Reply = TypeVar("Reply")


class QueueUnavailableError(PagemillError):
    """Redis does not answer, or may not serve us. A submission may or may not have been accepted: repeat it with the
    same `id` or `idempotency_key`."""


class AsyncHandle:
    """A request in the queue. Every iteration starts at the first token, also of a request that has ended.

    `replayed`: the idempotency key was known, and this is the earlier request.
    """

    def __init__(self, client: AsyncClient, request_id: str, *, expected: bool, replayed: bool = False) -> None:
        self.request_id = request_id
        self.replayed = replayed
        self._client = client
        self._expected = expected
        self._ended: Transcript | None = None
        self._result: Result | None = None

    @property
    def id(self) -> str:
        return self.request_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.request_id!r})"

    def moved_to(self, client: AsyncClient) -> AsyncHandle:
        """This handle on another client; itself where that is its client."""
        client = client.on_queue(self._client.config.queue)
        if client is self._client:
            return self
        return AsyncHandle(client, self.request_id, expected=self._expected, replayed=self.replayed)

    def events(self, after: int = 0) -> AsyncGenerator[Event, None]:
        """The protocol's events from number `after` + 1 on, up to and with `done`."""
        return self._events(after)

    async def _events(self, after: int) -> AsyncGenerator[Event, None]:
        subscription = await self._client.follow(self.request_id, after=after, expected=self._expected)
        try:
            async with contextlib.aclosing(subscription.events()) as items:
                async for item in items:
                    if item["type"] == "done" and after == 0:
                        self._ended = subscription.transcript
                    yield item
        finally:
            await subscription.aclose()

    async def __aiter__(self) -> AsyncGenerator[Delta, None]:
        async for item in self.events():
            if item["type"] == "rewind":
                raise RequestError(
                    "request_lost", "what was told is not true any more: `result` has how it really ended"
                )
            if item["type"] == "delta" and (item["text"] or item["token_ids"]):
                yield Delta(
                    text=item["text"],
                    token_ids=item["token_ids"],
                    index=item["index"],
                    offset=item["offset"],
                    text_offset=item["text_offset"],
                    seq=item["seq"],
                    logprobs=item.get("logprobs"),
                )
        self._completed()

    async def result(self, timeout: float | None = None) -> Result:
        """Wait for the end. Raises `RequestFailed`, and `TimeoutError` after `timeout` seconds (cancelling nothing)."""
        if self._ended is None and self._result is None:
            async with asyncio.timeout(timeout):
                waiter = await self._client.wait_for_end(self.request_id, expected=self._expected)
                try:
                    self._result = await waiter.result()
                finally:
                    await waiter.aclose()
        return self._completed()

    async def cancel(self) -> str:
        """See `AsyncClient.cancel`."""
        return await self._client.cancel(self.request_id)

    def _completed(self) -> Result:
        if self._result is None:  # made when somebody wants it: whoever follows the events has them already
            assert self._ended is not None
            self._result = result_of(self.request_id, self._ended)
        if self._result.state != "completed":
            raise RequestFailed(self._result)
        return self._result


class AsyncClient:
    """Submits requests and follows them, over one connection for events and a pool for commands.

    Takes a `QueueConfig`, or its settings by name; a string is the Redis URL. Belongs to one event loop.
    `patience_s`: how long `attach` waits for a request that nobody has heard of. `watchdog_s`: silence after which the
    stored events are looked at. `models`: names of models and the queues that serve them, as a mapping or as
    `name=queue` pairs with commas between; a request's `model` then says which queue it goes to.
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
        self.models = read_models(models)
        self._queues = {
            queue: AsyncClient(self.config.replace(queue=queue), patience_s=patience_s, watchdog_s=watchdog_s)
            for queue in dict.fromkeys(self.models.values())
        }
        self.keys = QueueKeys(self.config.key_prefix, self.config.queue, self.config.shards)
        self._patience_s = patience_s
        name = f"pagemill-client-{os.getpid()}"
        self._redis = connect_commands(self.config.redis_url, name)
        self._calls = Gatherer(partial(scripts.run, self._redis), lambda call: call.size)
        self._hub = EventHub(self._redis, self.keys, watchdog_s=watchdog_s, keeping=scripts.Keeping.of(self.config))

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
        """Put a request into the queue. `params`: every other name of the protocol's request body. With `models` the
        queue is that of its `model`; a name that is not there is an `unsupported_model`.

        Raises `RequestError` before sending for a body that no engine would take, and then `duplicate_id` or
        `idempotency_conflict`; `RequestFailed`, a `RequestError` whose result has the state "rejected", where the queue
        does not take it now: `queue_full`, `no_engine` or `deadline_unreachable`, with `retry_after_ms`;
        `QueueUnavailableError` where Redis does not answer.
        """
        if self.models:
            client = self.for_model(params.pop("model", None))
            return await client.submit(
                prompt,
                messages=messages,
                prompt_token_ids=prompt_token_ids,
                id=id,
                idempotency_key=idempotency_key,
                traceparent=traceparent,
                **params,
            )
        if isinstance(prompt, Mapping):
            if set(prompt) != {"prompt_token_ids"} or prompt_token_ids is not None:
                raise invalid('a prompt is a string or {"prompt_token_ids": [...]}', "prompt")
            prompt_token_ids, prompt = prompt["prompt_token_ids"], None
        plain = getattr(prompt_token_ids, "tolist", None)  # of arrays and tensors, gives plain integers
        if plain is not None:
            prompt_token_ids = plain()
        elif isinstance(prompt_token_ids, Iterable) and not isinstance(prompt_token_ids, str | bytes | Mapping):
            prompt_token_ids = list(prompt_token_ids)
        body = {"prompt": prompt, "messages": messages, "prompt_token_ids": prompt_token_ids, **params}
        body["idempotency_key"] = idempotency_key
        checked, data = check_and_encode(body, self.config.max_body_bytes)
        if id is not None and not is_request_id(id):
            raise invalid("id may hold letters, digits and . _ - and at most 128 characters", "id")
        request_id = self.keys.new_id(idempotency_key) if id is None else id
        call = scripts.submit(
            self.keys.shard_of(request_id),
            request_id,
            data,
            priority=checked.priority,
            submission=secrets.token_hex(8),
            ttl_ms=self.config.default_ttl_ms if checked.ttl_ms is None else checked.ttl_ms,
            tenant=checked.tenant,
            as_blob=len(data) > self.config.blob_bytes,
            tokens=checked.estimated_tokens,
            watch_ms=checked.watch_lease_ms,
            traceparent=traceparent,
            idempotency_key=idempotency_key,
            idempotency_ttl_ms=int(self.config.idempotency_ttl_s * 1000),
            admission=scripts.Admission.of(self.config),
            keeping=scripts.Keeping.of(self.config),
            callback=checked.stored_callback,
        )
        reply = scripts.SubmitReply.read(await self._call(call))
        if reply.status == "duplicate":
            raise RequestError("duplicate_id", f"request id {request_id} is in use (it is {reply.state})", param="id")
        if reply.status == "conflict":
            message = f"the idempotency key belongs to request {reply.request_id}, which had another body"
            raise RequestError("idempotency_conflict", message, param="idempotency_key")
        if reply.status == "refused":
            raise RequestFailed(refused_result(reply.request_id, reply.error))
        return AsyncHandle(self, reply.request_id, expected=True, replayed=reply.status == "attached")

    def for_model(self, model: str | None) -> AsyncClient:
        """The client of a model's queue; without `models` it is this one. Raises `RequestError`, naming the known."""
        return self.on_queue(queue_of(self.models, model)) if self.models else self

    def on_queue(self, queue: str) -> AsyncClient:
        """The client of one of the queues that `models` names; else this one."""
        return self._queues.get(queue, self)

    def attach(self, request_id: str, *, model: str | None = None) -> AsyncHandle:
        """A handle on a request that somebody else has put into the queue, or is about to. With `models` on several
        queues its `model` has to be said."""
        if self.models:
            return self.for_model(model).attach(request_id)
        if not is_request_id(request_id):
            raise invalid("id may hold letters, digits and . _ - and at most 128 characters", "id")
        return AsyncHandle(self, request_id, expected=False)

    async def cancel(self, request_id: str, *, model: str | None = None) -> str:
        """Cancel a request: "cancelled" (it had not started), "requested" (its engine will end it at once), "noted" (no
        such request is known yet; one that comes will be cancelled), or the state in which it had ended before.
        `model` as in `attach`."""
        if self.models:
            return await self.for_model(model).cancel(request_id)
        if not is_request_id(request_id):
            raise invalid("id may hold letters, digits and . _ - and at most 128 characters", "id")
        error = {"code": "cancelled", "message": "the request was cancelled"}
        call = scripts.cancel(
            self.keys.shard_of(request_id),
            request_id,
            error=orjson.dumps(error),
            keeping=scripts.Keeping.of(self.config),
        )
        reply: list[bytes] = await self._call(call)
        return reply[-1].decode()

    async def record(self, request_id: str) -> Record | None:
        """The record of a request; None where there is none. Raises `QueueUnavailableError`."""
        return await self._asked(read_record(self._redis, self.keys.shard_of(request_id), request_id))

    async def overview(self) -> Overview:
        """What the queue says of itself. Raises `QueueUnavailableError`."""
        return await self._asked(read_overview(self._redis, self.keys))

    @property
    def shelf(self) -> Shelf:
        """What adapters keep beside the queue. Its methods raise redis-py's errors."""
        return Shelf(self._redis, self.keys)

    @property
    def allowances(self) -> Allowances:
        """What tenants may do, counted for several processes together."""
        return Allowances(self._redis, self.keys)

    async def keep_note(self, request_id: str, note: bytes, *, ttl_ms: int) -> None:
        """Keep something beside a request, for as long as said."""
        await self._asked(
            self._redis.execute_command("SET", self.keys.shard_of(request_id).note(request_id), note, "PX", ttl_ms)
        )

    async def note(self, request_id: str) -> bytes | None:
        """What `keep_note` kept."""
        found: bytes | None = await self._asked(
            self._redis.execute_command("GET", self.keys.shard_of(request_id).note(request_id))
        )
        return found

    async def drop_note(self, request_id: str) -> bool:
        """Forget it. False: there was none."""
        dropped = await self._asked(self._redis.execute_command("DEL", self.keys.shard_of(request_id).note(request_id)))
        return bool(dropped)

    async def follow(self, request_id: str, *, after: int, expected: bool) -> Subscription:
        """A subscription to a request's events; close it when done."""
        return await self._hub.open(request_id, after=after, expected=expected, patience_s=self._patience_s)

    async def wait_for_end(self, request_id: str, *, expected: bool) -> EndWaiter:
        """Hears of a request's end alone, which costs nothing for its tokens; close it when done."""
        return await self._hub.wait_for_end(request_id, expected=expected, patience_s=self._patience_s)

    async def aclose(self) -> None:
        for client in self._queues.values():
            await client.aclose()
        await self._hub.aclose()
        await self._redis.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _call(self, call: scripts.Call) -> Any:
        return await self._asked(self._calls.ask(call))

    async def _asked(self, reply: Awaitable[Reply]) -> Reply:
        try:
            return await reply
        except (RedisError, OSError) as error:
            if str(error).startswith("WRONGTYPE"):
                raise RequestError("request_lost", "a key of the request holds something else") from error
            if not may_pass(error):
                raise
            raise QueueUnavailableError(
                f"redis at {shown_url(self.config.redis_url)} does not serve us: {error}"
            ) from error


def make_config(config: QueueConfig | str | None, settings: dict[str, Any]) -> QueueConfig:
    """Settings as the clients take them: a config, a URL or nothing, and changes by name."""
    if isinstance(config, str):
        return QueueConfig(redis_url=config, **settings)
    return config.replace(**settings) if config is not None else QueueConfig(**settings)
