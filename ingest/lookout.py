"""Looking at entries that this engine cannot take yet, so that those who must be refused hear it at once.

An engine takes an entry only when it has room, so a raw entry (an XADD by somebody who does not use `submit`) may wait
for long before anybody reads it. While there is no room this reads what comes into the streams beside the consumer
group: whoever is new gets its record and is counted, or is answered. Nothing is taken by looking, and what is delivered
meanwhile is left alone: the scripts check that. `submit` has done the same for the entries that it made. So it is with
those that an engine held, which has died or given them back, and that nobody has begun.

Several engines look at the same entries; the first one that does counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import orjson
import structlog
from redis.exceptions import RedisError, ResponseError

from pagemill.engine.errors import RequestError
from pagemill.ingest import scripts
from pagemill.ingest.callback import salvaged
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.entries import Entry, UnreadableEntry, check_shard, read_id, read_request
from pagemill.ingest.intake import read_body, unsupported_model
from pagemill.ingest.keys import GROUP, PRIORITIES, QueueKeys, ShardKeys
from pagemill.ingest.redis import Backoff, Client, connect_blocking, may_pass
from pagemill.ingest.rounds import Rounds
from pagemill.ingest.schema import RequestBody, UnreadableBody
from pagemill.ingest.stream_reader import REAP_S

ROOM_POLL_S = 0.25  # at most; every wake-up takes the interpreter away from a step
PAGE = 16  # entries looked at in one go
SWEEP = 100  # waiting requests looked at for cancels in one go

_log = structlog.get_logger(__name__)


class Lookout:
    """Looks at one shard for engine `owner` while `is_full()`. `may_reap()`: whether an old heartbeat means death.
    `on_given`: entries that were given to this engine only to be ended. `rounds`: when it looks, and what is
    asked then goes through them."""

    def __init__(
        self,
        shard: ShardKeys,
        owner: str,
        model: str,
        client: Client,
        rounds: Rounds,
        config: QueueConfig,
        stopping: asyncio.Event,
        *,
        is_full: Callable[[], bool],
        may_reap: Callable[[], bool],
        on_given: Callable[[Entry], None],
    ) -> None:
        self._shard = shard
        self._keys = QueueKeys(config.key_prefix, config.queue, config.shards)
        self._owner = owner
        self._model = model
        self._client = client
        self._rounds = rounds
        self._config = config
        self._stopping = stopping
        self._has_no_room = is_full
        self._may_reap = may_reap
        self._on_given = on_given
        self._admission = scripts.Admission.of(config)
        self._keeping = scripts.Keeping.of(config)

    async def run(self) -> None:
        """Look until cancelled."""
        reader = connect_blocking(self._config.redis_url, f"{self._owner}-lookout")
        sweeping = asyncio.create_task(self._sweep())
        backoff = Backoff()
        try:
            while True:
                try:
                    await self._look(reader)
                    backoff.reset()
                except (RedisError, OSError) as error:
                    if not may_pass(error) and not isinstance(error, ResponseError):
                        raise
                    _log.debug("waiting entries could not be looked at", reason=str(error))
                    await backoff.sleep()
        finally:
            sweeping.cancel()
            await asyncio.gather(sweeping, return_exceptions=True)
            await reader.aclose()

    def _is_full(self) -> bool:
        return self._has_no_room() and not self._stopping.is_set()

    async def _look(self, reader: Any) -> None:
        """Wait until the engine is full, then look at what comes until it is not."""
        while not self._is_full():
            await self._rounds.wait(min(ROOM_POLL_S, self._config.poll_ms / 1000))
        seen = await self._last_delivered()
        while self._is_full():
            reply: Any = await reader.xread(dict(seen), count=PAGE, block=self._config.poll_ms)
            for name, items in reply or ():
                stream = self._shard.streams.index(name.decode())
                await self._examine([Entry(self._shard, stream, entry_id, fields) for entry_id, fields in items])
                seen[name.decode()] = items[-1][0]

    async def _last_delivered(self) -> dict[str, bytes]:
        """Where what nobody has taken begins, by stream."""
        places: dict[str, bytes] = {}
        for stream in self._shard.streams:
            groups: Any = await self._client.xinfo_groups(stream)
            found = [info["last-delivered-id"] for info in groups if info["name"] == GROUP.encode()]
            places[stream] = found[0] if found else b"0-0"
        return places

    async def _examine(self, entries: list[Entry]) -> None:
        named: list[tuple[Entry, str]] = []
        calls: list[scripts.Call] = []
        for entry in entries:
            try:
                named.append((entry, check_shard(self._keys, entry, read_id(entry.fields))))
            except UnreadableEntry as problem:
                calls.append(scripts.dead_letter(entry, "", problem.reason, problem.message))
        pipeline = self._client.pipeline(transaction=False)
        for entry, request_id in named:
            pipeline.hmget(entry.shard.record(request_id), ["entry", "stream"])
        known = await self._client.run_pipeline(pipeline) if named else []
        for (entry, request_id), record in zip(named, known, strict=True):
            if isinstance(record, BaseException):
                continue  # A key of another kind in its place: told when the entry is taken.
            if record != [entry.entry_id, b"%d" % entry.stream]:
                calls.append(await self._accept(entry, request_id))
        for call, reply in zip(calls, await scripts.run(self._client, calls) if calls else [], strict=True):
            if isinstance(reply, BaseException) and may_pass(reply):
                raise reply
            if isinstance(reply, BaseException):
                _log.warning("entry could not be looked at", call=call.name, reason=str(reply))

    async def _accept(self, entry: Entry, request_id: str) -> scripts.Call:
        body, error, dead_letter = RequestBody(), b"", ""
        data, callback = b"", b""
        try:
            data = await read_body(self._client, entry, request_id, self._config.max_body_bytes)
            body = read_request(entry.fields, data, self._config.max_body_bytes)
            callback = body.stored_callback
            if body.model is not None and body.model != self._model:
                raise unsupported_model(self._model, body.model)
        except RequestError as refusal:
            error = orjson.dumps(refusal.to_dict())
            if not callback and (found := salvaged(data[: self._config.max_body_bytes])) is not None:
                callback = found.stored(None)
            dead_letter = "unreadable" if isinstance(refusal, UnreadableBody) else ""
        return scripts.accept(
            entry,
            request_id,
            ttl_ms=body.ttl_ms if body.ttl_ms is not None else self._config.default_ttl_ms,
            tenant=body.tenant,
            tokens=body.estimated_tokens,
            watch_ms=body.watch_lease_ms,
            admission=self._admission,
            keeping=self._keeping,
            error=error,
            dead_letter=dead_letter,
            callback=callback,
        )

    async def _sweep(self) -> None:
        """End what waits for too long, or was cancelled by hand, whether there is room or not. Where there is none,
        also look at what other engines have left behind."""
        first, look_at = 0, 0.0
        places = [scripts.FROM_THE_FIRST] * PRIORITIES
        while True:
            await self._rounds.wait(self._config.poll_ms / 1000)
            owner = (
                "" if self._stopping.is_set() else self._owner
            )  # one that leaves is given nothing, not even to end it
            try:
                sweep = scripts.sweep(self._shard, owner, first=first, count=SWEEP, keeping=self._keeping)
                first, given, _ = await self._rounds.ask(sweep)
                self._end(given)
                if not self._is_full() or time.monotonic() < look_at:
                    continue
                look_at = time.monotonic() + min(REAP_S, self._config.heartbeat_timeout_s / 3)
                given, unknown, places = await self._rounds.ask(self._orphans(places))
                self._end(given)
                await self._examine(scripts.read_given(self._shard, unknown))
                if places != [scripts.FROM_THE_FIRST] * PRIORITIES:
                    look_at = 0.0  # there is more
            except (RedisError, OSError) as error:
                if not may_pass(error):
                    _log.warning("waiting requests could not be looked at", reason=str(error))

    def _end(self, given: list[Any]) -> None:
        for entry in scripts.read_given(self._shard, given):
            self._on_given(entry)

    def _orphans(self, places: list[bytes]) -> scripts.Call:
        timeout_ms = int(self._config.heartbeat_timeout_s * 1000)
        how: dict[str, Any] = {"timeout_ms": timeout_ms, "count": PAGE, "old_beats_count": self._may_reap()}
        return scripts.orphans(self._shard, self._owner, places, **how)
