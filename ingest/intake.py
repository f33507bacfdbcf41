"""From a delivered entry to an owned request: read it, begin it, and see whether it is to run at all."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Container
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import structlog
from redis.exceptions import RedisError, ResponseError

from pagemill.engine.errors import RequestError
from pagemill.ingest import dead_letters, scripts
from pagemill.ingest.callback import salvaged
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.entries import Entry, UnreadableEntry, check_shard, read_id, read_request
from pagemill.ingest.events import Transcript
from pagemill.ingest.inspection import Inspector
from pagemill.ingest.keys import QueueKeys, ShardKeys
from pagemill.ingest.live_request import Ending, LiveRequest, cancelled_error, expired_error
from pagemill.ingest.placement import HeldPrefixes, beginnings_of
from pagemill.ingest.redis import Backoff, Client, is_unavailable
from pagemill.ingest.schema import DEFAULT_TENANT, RequestBody, UnreadableBody, check_size

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Postponed:
    """An entry that cannot be begun yet, and why. An old suspect was there when several engines died; what is offered
    has been left to the engine `to`."""

    reason: Literal["suspect", "old suspect", "busy", "offered"]
    tenant: str
    to: str = ""


class Intake:
    """Takes entries for engine `owner`, which serves `model`. Once `stopping` is set nothing more is begun, and Redis
    being unavailable is an error instead of something to wait out. `held`: beginnings of prompts that the engine has
    computed; None where it keeps none."""

    def __init__(
        self,
        client: Client,
        config: QueueConfig,
        owner: str,
        model: str,
        stopping: asyncio.Event,
        held: HeldPrefixes | None = None,
    ) -> None:
        self._client = client
        self._config = config
        self._keys = QueueKeys(config.key_prefix, config.queue, config.shards)
        self._owner = owner
        self._model = model
        self._stopping = stopping
        self._held = held
        self._inspector = Inspector(client)

    async def take(
        self,
        entry: Entry,
        *,
        alone: bool = False,
        busy: Container[str] = (),
        running: int | None = None,
        avoided: Collection[str] = (),
    ) -> LiveRequest | Postponed | None:
        """Own an entry. None: it went to the dead letters, has ended before, or is another engine's. It is postponed if
        it may have ended an engine, and is to be taken `alone`, with nothing running beside it; or if as many of its
        tenant run as may, or others of its tenant wait for that: it is one of `busy`; or if it has been offered to
        another engine, which is done where `running`, the number of requests here, is given, and to none of `avoided`.

        Where the request is not to run, `stopping` of what is returned says how it ends.
        """
        try:
            request_id = check_shard(self._keys, entry, read_id(entry.fields))
        except UnreadableEntry as problem:
            await self.bury(entry, problem)
            return None
        body: RequestBody | None = None
        refusal: RequestError | None = None
        data = b""
        try:
            data = await self._insist(
                entry.shard, lambda: read_body(self._client, entry, request_id, self._config.max_body_bytes)
            )
            body = read_request(entry.fields, data, self._config.max_body_bytes)
        except RequestError as error:
            refusal = error
        callback = salvaged(data[: self._config.max_body_bytes]) if body is None else body.callback
        if self._stopping.is_set():
            return None
        ttl_ms = body.ttl_ms if body is not None and body.ttl_ms is not None else self._config.default_ttl_ms
        seed = body.params.seed if body is not None and body.params.seed is not None else secrets.randbits(64)
        tenant = body.tenant if body is not None else DEFAULT_TENANT
        tokens = body.estimated_tokens if body is not None else 0
        if tenant in busy:
            return Postponed("busy", tenant)
        beginnings = beginnings_of(body) if body is not None and self._held is not None else []
        call = scripts.begin(
            entry,
            self._owner,
            request_id,
            ttl_ms=ttl_ms,
            tenant=tenant,
            seed=seed,
            tokens=tokens,
            watch_ms=None if body is None else body.watch_lease_ms,
            tenant_cap=self._config.tenant_cap,
            max_attempts=self._max_attempts(body),
            alone=alone,
            callback=b"" if callback is None else callback.stored(None if body is None else body.metadata),
            beginnings=[beginning.name for beginning in beginnings],
            running=running,
            avoided=avoided,
        )
        begun = scripts.BeginReply.read(await self._insist(entry.shard, lambda: scripts.run_one(self._client, call)))
        if begun == "suspect" or begun == "old suspect" or begun == "busy":
            return Postponed(begun, tenant)
        if isinstance(begun, scripts.Offered):
            return Postponed("offered", tenant, begun.to)
        if isinstance(begun, str):
            _log.debug(
                "entry not begun", request_id=request_id, tenant=tenant, entry=entry.entry_id.decode(), reason=begun
            )
            return None
        if self._held is not None:
            self._held.expect(beginnings)
        live = LiveRequest(entry, request_id, self._owner, begun, body, self._model, callback, beginnings)
        live.expires_at = time.monotonic() + (begun.deadline - begun.now) / 1000
        live.stopping = self._ending(begun, body, refusal)
        return live

    async def recall(self, live: LiveRequest) -> None:
        """Read what earlier engines have published of a request. Where a part has been lost it goes on from what fits
        together before it, and what was told beyond that is compared with what it generates now."""
        key = live.entry.shard.events(live.request_id)
        items: Any = await self._insist(live.entry.shard, lambda: self._client.xrange(key))
        recalled: list[bytes] = []
        transcript = Transcript()
        for _, fields in items:
            if len(recalled) == live.begun.seq or not transcript.take_if_next(fields.get(b"e", b"")):
                break
            recalled.append(fields[b"e"])
        expected = live.begun.seq
        live.recall(transcript, recalled)
        if len(recalled) == expected == len(items):
            return
        _log.warning(
            "events were lost, the request goes on from those before",
            request_id=live.request_id,
            told=expected,
            kept=len(recalled),
        )
        call = scripts.rewind(live.entry.shard, live.request_id, self._owner, live.begun.attempt, len(recalled))
        if await self._insist(live.entry.shard, lambda: scripts.run_one(self._client, call)) != b"ok":
            raise RequestError("request_lost", "another engine has the request")

    async def bury(self, entry: Entry, problem: UnreadableEntry) -> None:
        """Move an entry to the dead letters."""
        await self._insist(entry.shard, lambda: dead_letters.bury(self._client, entry, self._owner, problem))

    def _ending(
        self, begun: scripts.BeginReply, body: RequestBody | None, refusal: RequestError | None
    ) -> Ending | None:
        """How a request ends that is not to run; None for all others."""
        if begun.cancelled:
            return Ending("cancelled", cancelled_error())
        if refusal is not None or body is None:
            return Ending("rejected", refusal, dead_letter="unreadable" if isinstance(refusal, UnreadableBody) else "")
        if begun.now > begun.deadline:
            return Ending("expired", expired_error())
        if body.model is not None and body.model != self._model:
            return Ending("rejected", unsupported_model(self._model, body.model))
        attempts = begun.attempt - begun.released
        if attempts > self._max_attempts(body):
            message = f"{attempts - 1} engines ended while they ran this request"
            return Ending("failed", RequestError("poison", message), dead_letter="poison")
        return None

    def _max_attempts(self, body: RequestBody | None) -> int:
        given = None if body is None else body.max_attempts
        return self._config.max_attempts if given is None else given

    async def _insist(self, shard: ShardKeys, action: Callable[[], Awaitable[_T]]) -> _T:
        """Repeat `action` while Redis is unavailable, or not fit for any request. Raises the error when the worker
        stops, and one that is the request's own."""
        backoff = Backoff()
        again = False
        while True:
            try:
                return await action()
            except (RedisError, OSError) as error:
                if self._stopping.is_set():
                    raise
                if not is_unavailable(error) and not await self._inspector.blames(shard, error):
                    if again:
                        raise
                    again = True  # what was wrong may just have been mended
                    continue
            again = False
            await backoff.sleep()


async def read_body(client: Client, entry: Entry, request_id: str, max_bytes: int) -> bytes:
    """The body of an entry, wherever it travels. Raises `RequestError`: `too_large`, `request_lost`."""
    body = entry.fields.get(b"body")
    if body is not None:
        return body
    key = entry.shard.blob(request_id)
    try:
        check_size(await client.strlen(key), max_bytes)
        blob: Any = await client.get(key)
    except ResponseError as error:
        if not str(error).startswith("WRONGTYPE"):
            raise
        raise RequestError("request_lost", "the blob's key holds something else", param="body") from error
    if blob is None:
        raise RequestError("request_lost", "the blob with the request's body is not there", param="body")
    return bytes(blob)


def unsupported_model(served: str, wanted: str) -> RequestError:
    return RequestError("unsupported_model", f"this queue serves {served}, not {wanted[:64]}", param="model")
