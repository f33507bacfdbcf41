"""Reading a request's events without a gap: what is stored first, then live, and stored again whenever in doubt.

One `EventHub` holds one pub/sub connection for all requests that a process follows. The channel is only quick; the
`ev` stream is the truth. A live event that comes in order is taken as it is. A hole, a reader that lagged behind, a
reconnection or a long silence leads to the stream, so losing every live message costs time and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import orjson
from redis.exceptions import RedisError

from pagemill.engine.errors import RequestError
from pagemill.ingest.events import TERMINAL_STATES, Transcript
from pagemill.ingest.feed import Feed
from pagemill.ingest.keys import QueueKeys
from pagemill.ingest.listener import listener_opener
from pagemill.ingest.redis import Backoff, Client, is_unavailable

PAGE = 1000  # events read from the stream at once
WATCH_TICK_S = 0.25
BUFFER = 256  # live events kept for a reader that is slower; beyond, it reads the stream

Event = Mapping[str, Any]


class Subscription:
    """The events of one request, from number `after` + 1 on; made by `EventHub.open`, ends with `done`.

    `expected`: the request is known to exist, so its record being away means that it was lost. Otherwise `patience_s`
    is how long a request that nobody has heard of is waited for; None: for ever.

    `watch_ms`: lease of those who watch, 0 where the request goes on without; None: not known yet. `renew_at`: when it
    is to be renewed or asked for, on the monotonic clock.
    """

    def __init__(self, hub: EventHub, request_id: str, *, after: int, expected: bool, patience_s: float | None) -> None:
        shard = hub.keys.shard_of(request_id)
        self.request_id = request_id
        self.channel = shard.channel(request_id).encode()
        self._hub = hub
        self._record = shard.record(request_id)
        self._watch = shard.watch(request_id)
        self._stream = shard.events(request_id)
        self._last = after
        self._after = after
        self._expected = expected
        self._patience_until = None if patience_s is None else time.monotonic() + patience_s
        self._confirmed = asyncio.Event()
        self._wake = asyncio.Event()
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._behind = False
        self.watch_ms: int | None = None
        self.renew_at = 0.0
        self.transcript = Transcript()

    def confirm(self) -> None:
        """The server has subscribed us, for the first time or anew: from here on nothing live is missed."""
        if self._confirmed.is_set():
            self.fall_behind()
        self._confirmed.set()

    def deliver(self, seq: int, data: bytes) -> None:
        """A live event."""
        if len(self._buffer) < BUFFER:
            self._buffer.append((seq, data))
        else:
            self._buffer.clear()
            self._behind = True
        self._wake.set()

    def fall_behind(self) -> None:
        """Live events may have been missed: look into the stream."""
        self._behind = True
        self._wake.set()

    async def events(self) -> AsyncGenerator[Event, None]:
        """Every event once, in order, up to and with `done`. Raises `request_lost` where there will be no `done`."""
        watchdog_s = self._hub.watchdog_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(watchdog_s):
                await self._confirmed.wait()
        while True:
            self._wake.clear()
            self._behind = False
            found = False
            async for item in self._stored():
                found = True
                yield self._take(item)
                if item["type"] == "done":
                    return
            if not found:
                async for item in self._examine():
                    yield self._take(item)
                    if item["type"] == "done":
                        return
            while not self._behind:
                item_or_none = self._next_live()
                if item_or_none is not None:
                    yield self._take(item_or_none)
                    if item_or_none["type"] == "done":
                        return
                    continue
                if self._behind:
                    break
                try:
                    async with asyncio.timeout(watchdog_s):
                        await self._wake.wait()
                except TimeoutError:
                    break
                self._wake.clear()

    def say_watched(self, pipeline: Any, now: float) -> None:
        """Renew the lease of those who watch; or ask what it is, where that is not known."""
        if self.watch_ms is None:
            pipeline.hmget(self._record, ["state", "watch_ms"])
            self.renew_at = now + 1.0
        else:
            pipeline.set(self._watch, "1", px=self.watch_ms)
            self.renew_at = now + self.watch_ms / 3000

    def learn(self, state: bytes | None, watch_ms: bytes | None) -> None:
        """What the record says of the lease. Without a record, nothing yet."""
        if state is not None:
            self.watch_ms = int(watch_ms or 0) if state.decode() not in TERMINAL_STATES else 0
            self.renew_at = 0.0

    async def aclose(self) -> None:
        await self._hub.close(self)

    def _take(self, item: Event) -> Event:
        self._last = item["seq"]
        self._expected = True
        if self._after == 0:
            self.transcript.add(item)
        return item

    def _next_live(self) -> Event | None:
        """The next live event if it is the one that follows; a hole makes the reader fall behind."""
        while self._buffer:
            seq, data = self._buffer[0]
            if seq > self._last + 1:
                self._behind = True
                return None
            self._buffer.popleft()
            if seq == self._last + 1:
                item: Event = orjson.loads(data)
                return item
        return None

    async def _stored(self) -> AsyncGenerator[Event, None]:
        while True:
            page: Any = await self._hub.command("XRANGE", self._stream, f"({self._last}-0", "+", "COUNT", PAGE)
            for _, fields in page:
                item = orjson.loads(fields[b"e"])
                if item["seq"] != self._last + 1:
                    raise RequestError("request_lost", f"events after number {self._last} of the request are missing")
                yield item
            if len(page) < PAGE:
                return

    async def _examine(self) -> AsyncGenerator[Event, None]:
        """Nothing is stored beyond what was read: does the record say why? Yields the end where only it is left."""
        record: Any = await self._hub.command("HMGET", self._record, "state", "seq")
        state, seq = record
        if state is None:
            if self._expected:
                raise RequestError("request_lost", "the request's record is gone")
            if self._patience_until is not None and time.monotonic() > self._patience_until:
                raise RequestError("request_lost", f"no request {self.request_id} is known")
            return
        self._expected = True
        if state.decode() not in TERMINAL_STATES:
            return
        ended = False
        async for item in self._stored():
            ended = item["type"] == "done"
            yield item
        if not ended and int(seq) <= self._last:
            raise RequestError("request_lost", "the request has ended, and its last event is not there")
        if not ended:
            async for item in self._from_record(int(seq)):
                yield item

    async def _from_record(self, seq: int) -> AsyncGenerator[Event, None]:
        """The rest of a request whose events have expired, made of the result in its record."""
        if self._after:
            raise RequestError("request_lost", f"events after number {self._last} have expired; read from the start")
        names = ("state", "attempt", "result", "usage", "metrics", "error")
        values: Any = await self._hub.command("HMGET", self._record, *names)
        if values[0] is None:
            raise RequestError("request_lost", "the request's record is gone")
        state, attempt = values[0].decode(), int(values[1])
        result, usage, metrics, error = (orjson.loads(value) if value else None for value in values[2:])
        for choice in result or ():
            read = self.transcript.choice(choice["index"])
            offset, text_offset, chain = len(read.token_ids), read.text_length, read.chain
            token_ids, text = choice["token_ids"][offset:], choice["text"][text_offset:]
            common = {"seq": self._last + 1, "attempt": attempt, "index": choice["index"]}
            if token_ids or text:
                yield {
                    **common,
                    "type": "delta",
                    "offset": offset,
                    "count": len(token_ids),
                    "token_ids": token_ids,
                    "text": text,
                    "text_offset": text_offset,
                    "logprobs": None if choice.get("logprobs") is None else choice["logprobs"][offset:],
                    "chain": chain,
                    **({"prompt_logprobs": choice["prompt_logprobs"]} if "prompt_logprobs" in choice else {}),
                }
            end = {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
            yield {**common, "seq": self._last + 1, "type": "choice", **end}
        done = {"seq": max(seq, self._last + 1), "attempt": attempt, "type": "done", "state": state}
        yield {**done, "usage": usage or {}, "metrics": metrics or {}, **({"error": error} if error else {})}


class EventHub:
    """Follows any number of requests over one connection that listens; over one for each shard on a Cluster, where a
    shard's channels are heard only at its node. Belongs to one event loop.

    `watchdog_s`: silence after which the stream and the record are looked at.
    """

    def __init__(self, commands: Client, keys: QueueKeys, *, watchdog_s: float = 5.0) -> None:
        self.keys = keys
        self.watchdog_s = watchdog_s
        self._commands = commands
        self._open_listener = listener_opener(commands)
        self._feeds: dict[str, Feed] = {}
        self._watching: asyncio.Task[None] | None = None

    async def open(
        self, request_id: str, *, after: int = 0, expected: bool = False, patience_s: float | None = None
    ) -> Subscription:
        """Follow a request from event `after` + 1 on. Close the subscription when done with it."""
        subscription = Subscription(self, request_id, after=after, expected=expected, patience_s=patience_s)
        await self._feed(request_id).add(subscription)
        if self._watching is None:
            self._watching = asyncio.create_task(self._keep_watch())
        return subscription

    async def close(self, subscription: Subscription) -> None:
        await self._feed(subscription.request_id).remove(subscription)

    async def command(self, *words: str | int) -> Any:
        """A reading command, repeated while Redis is unavailable."""
        backoff = Backoff()
        while True:
            try:
                return await self._commands.execute_command(*words)
            except (RedisError, OSError) as error:
                if not is_unavailable(error):
                    raise
            await backoff.sleep()

    async def aclose(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
        for feed in self._feeds.values():
            await feed.aclose()
        self._feeds.clear()

    async def _keep_watch(self) -> None:
        """Say of every request that is followed, and wants to know, that somebody watches it."""
        while True:
            await asyncio.sleep(WATCH_TICK_S)
            now = time.monotonic()
            followed = [subscription for feed in self._feeds.values() for subscription in feed.first_followers()]
            due = [item for item in followed if item.watch_ms != 0 and item.renew_at <= now]
            if not due:
                continue
            pipeline = self._commands.pipeline(transaction=False)
            for item in due:
                item.say_watched(pipeline, now)
            try:
                replies = await self._commands.run_pipeline(pipeline)
            except (RedisError, OSError) as error:
                if not is_unavailable(error):
                    raise
                for item in due:
                    item.renew_at = 0.0
                continue
            for item, reply in zip(due, replies, strict=True):
                if item.watch_ms is None and isinstance(reply, list):
                    item.learn(*reply)

    def _feed(self, request_id: str) -> Feed:
        shard = self.keys.shard_of(request_id) if self._commands.publishes_sharded else self.keys.shards[0]
        # Any key of the shard names its slot.
        if (feed := self._feeds.get(shard.tag)) is None:
            feed = self._feeds[shard.tag] = Feed(self._open_listener, shard.statistics)
        return feed
