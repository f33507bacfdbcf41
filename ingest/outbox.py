"""Sends events to Redis: what all requests have to say is gathered and goes out in one pipeline a flush.

The first token of a request goes at once, later ones are gathered for `flush_ms`. One flush is in flight at a time;
while Redis is slow or away the next one grows, and the step loop never waits. What can pile up is bounded by what the
engine has taken: without Redis no new entry comes in, and a request ends at its `max_tokens`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Literal

import structlog
from redis.exceptions import RedisError

from pagemill.engine.outputs import SequenceOutput
from pagemill.ingest import scripts
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.inspection import Inspector
from pagemill.ingest.live_request import LiveRequest
from pagemill.ingest.redis import Backoff, Client, is_unavailable, may_pass

MAX_BATCH = 512
MAX_FLUSH_BYTES = 1 << 20  # a flush that has so much takes no other request: tokens do not wait for many long results

Outcome = Literal["written", "lost", "refused"]

_log = structlog.get_logger(__name__)


class Outbox:
    """Events of one engine's requests on their way to Redis.

    on_cancel: a request was cancelled ("cancelled") or its deadline has passed ("expired"), the server says so.
    on_end: a request is over here. "written": so is its end; "lost": another engine has it, or it is gone; "refused":
        the server will not take its events, ever.
    """

    def __init__(
        self,
        client: Client,
        config: QueueConfig,
        *,
        on_cancel: Callable[[LiveRequest, str], None],
        on_end: Callable[[LiveRequest, Outcome], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._config = config
        self._on_cancel = on_cancel
        self._on_end = on_end
        self._clock = clock
        self._inspector = Inspector(client)
        self._due: dict[LiveRequest, float] = {}
        self._refused: set[LiveRequest] = set()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.flushes = 0

    def put(self, live: LiveRequest, output: SequenceOutput) -> None:
        """Take an increment of the engine: its sink. Cheap, never waits."""
        if live.detached or live.ending is not None:
            return
        first = not live.has_tokens and bool(output.token_ids)
        live.take(output)
        if output.started or first or live.ending is not None:
            self._schedule(live, self._clock())
        elif live.streams:
            self._schedule(live, live.flushed_at + live.flush_s)

    def flush_now(self, live: LiveRequest) -> None:
        """Send what a request has to say without waiting for more."""
        self._schedule(live, self._clock())

    async def join(self) -> None:
        """Wait until nothing is left to send."""
        await self._idle.wait()

    async def run(self) -> None:
        """Send until cancelled. Redis being away is waited out; everything is sent again then."""
        backoff = Backoff()
        away = False
        while True:
            batch = await self._next_batch()
            try:
                trouble = await self._flush(batch)
            except (RedisError, OSError) as error:
                if not may_pass(error):
                    raise
                trouble = error
            if trouble is not None:
                if not away:
                    _log.warning("redis is unavailable, events wait", requests=len(batch), reason=str(trouble))
                away = True
                await backoff.sleep()
                continue
            if away:
                _log.info("redis is back, events are sent")
            away = False
            backoff.reset()
            if not self._due:
                self._idle.set()

    def _schedule(self, live: LiveRequest, due: float) -> None:
        known = self._due.get(live)
        if known is None or due < known:
            self._due[live] = due
            self._idle.clear()
            self._wake.set()

    async def _next_batch(self) -> list[LiveRequest]:
        while True:
            self._wake.clear()
            now = self._clock()
            batch = [live for live, due in self._due.items() if due <= now][:MAX_BATCH]
            if batch:
                for live in batch:
                    del self._due[live]
                return batch
            timeout = min(self._due.values()) - now if self._due else None
            try:
                async with asyncio.timeout(timeout):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _flush(self, batch: Sequence[LiveRequest]) -> BaseException | None:
        """Returns what kept the server from taking some, which are sent again."""
        calls: list[scripts.Call] = []
        sent: list[LiveRequest] = []
        now = self._clock()
        size = 0
        for number, live in enumerate(batch):
            live.compose()
            live.flushed_at = now
            if (call := live.call(self._config)) is not None:
                calls.append(call)
                sent.append(live)
                size += call.size
            if size >= MAX_FLUSH_BYTES:
                self._due.update((later, self._due.get(later, now)) for later in batch[number + 1 :])
                break
        if not calls:
            return None
        self.flushes += 1
        try:
            replies = await scripts.run(self._client, calls)
        except BaseException:
            self._due.update(dict.fromkeys(sent, 0.0))
            raise
        trouble: BaseException | None = None
        for live, call, reply in zip(sent, calls, replies, strict=True):
            if not isinstance(reply, BaseException):
                self._refused.discard(live)
                self._settle(live, call, reply)
            elif is_unavailable(reply) or await self._inspector.blames(live.entry.shard, reply):
                self._due[live] = 0.0
                trouble = reply
            elif live not in self._refused:
                self._refused.add(live)  # what was wrong may just have been mended
                self._due[live] = 0.0
            else:
                self.drop(live, str(reply), "refused")
        return trouble

    def _settle(self, live: LiveRequest, call: scripts.Call, raw: bytes) -> None:
        if raw == scripts.WriteReply.all_well(live.composed):
            live.published, live.unwatched_since = live.composed, None
            live.has_told_tokens = live.has_told_tokens or call.has_tokens
            return
        reply = scripts.WriteReply.read(raw)
        if reply.status == "ok":
            live.published = reply.seq
            live.has_told_tokens = live.has_told_tokens or call.has_tokens
            if call.name == "finish":
                self._due.pop(live, None)
                self._on_end(live, "written")
            elif reply.cancel or reply.expired:
                self._on_cancel(live, "cancelled" if reply.cancel else "expired")
            elif live.is_abandoned(reply.unwatched, self._clock()):
                self._on_cancel(live, "unwatched")
        elif reply.status == "cancelled":
            live.turn_cancelled()
            self.flush_now(live)
        elif reply.status == "gap" and live.rewind_published(reply.seq):
            _log.warning("redis lost events, they are sent again", **live.names, seq=reply.seq)
            self.flush_now(live)
        else:
            self.drop(live, reply.status)

    def drop(self, live: LiveRequest, reason: str, outcome: Outcome = "lost") -> None:
        """Give up on a request that is not this engine's any more, or that the server refuses."""
        _log.warning("request given up", **live.names, outcome=outcome, reason=reason)
        live.detached = True
        self._due.pop(live, None)
        self._refused.discard(live)
        self._on_end(live, outcome)
