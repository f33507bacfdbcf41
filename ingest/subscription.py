"""Reading a request's events without a gap: what is stored first, then live, and stored again whenever in doubt.

One `EventHub` holds one pub/sub connection for all requests that a process follows. The channel is only quick; the
`ev` stream is the truth. A live event that comes in order is taken as it is. A hole, a reader that lagged behind, a
reconnection or a long silence leads to the stream, so losing every live message costs time and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

import orjson
import structlog
from redis.exceptions import RedisError

from pagemill.engine.errors import RequestError
from pagemill.ingest import scripts
from pagemill.ingest.events import TERMINAL_STATES, Transcript, extend_chain
from pagemill.ingest.feed import Feed
from pagemill.ingest.keys import QueueKeys
from pagemill.ingest.listener import listener_opener
from pagemill.ingest.redis import Backoff, Client, is_unavailable
from pagemill.ingest.replay import Event as Event
from pagemill.ingest.replay import Replay

PAGE = 1000  # events read from the stream at once
MAX_RESTARTS = 8
OVERDUE_MS = 30_000  # after its deadline a request that no engine ends is given up by who waits for it
CLOCKS_APART_MS = 60_000  # of this machine and the server, at most; else it takes so much longer
WATCH_TICK_S = 0.25
EXPIRE = 16  # overdue requests ended in one go
BUFFER = 256  # live events kept for a reader that is slower; beyond, it reads the stream

_log = structlog.get_logger(__name__)


class _RewrittenError(Exception):
    """What is stored is not what was told."""


def _read_event(data: bytes, seq: int) -> Event:
    """Event number `seq`. Raises `request_lost` for what is something else."""
    try:
        item = orjson.loads(data)
    except orjson.JSONDecodeError:
        item = None
    if not isinstance(item, dict) or item.get("seq") != seq or not isinstance(item.get("type"), str):
        raise RequestError("request_lost", f"event {seq} of the request cannot be read")
    if type(item.get("attempt")) is not int:
        raise RequestError("request_lost", f"event {seq} of the request does not say its attempt")
    return item


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
        self._attempt = 0
        self._replay: Replay | None = None
        self._restarts = 0

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
        """Every event once, in order, up to and with `done`. Raises `request_lost` where there will be no `done`.

        If the server loses events that were told here, what replaces them is compared with them: see `Replay`.
        """
        watchdog_s = self._hub.watchdog_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(watchdog_s):
                await self._confirmed.wait()
        while True:
            self._wake.clear()
            self._behind = False
            try:
                async for item in self._until_behind(watchdog_s):
                    yield item
                    if item["type"] == "done":
                        return
            except _RewrittenError:
                self._start_over()

    async def _until_behind(self, watchdog_s: float) -> AsyncGenerator[Event, None]:
        """What is stored, then what comes live, until the stream has to be looked at again."""
        found = False
        async for item in self._stored():
            found = True
            for news in self._take(item):
                yield news
        if not found:
            async for item in self._examine():
                for news in self._take(item):
                    yield news
        while not self._behind:
            item_or_none = self._next_live()
            if item_or_none is not None:
                for news in self._take(item_or_none):
                    yield news
                continue
            if self._behind:
                return
            try:
                async with asyncio.timeout(watchdog_s):
                    await self._wake.wait()
            except TimeoutError:
                return
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

    def _take(self, item: Event) -> list[Event]:
        """What the reader is to be told of the next event: itself, or what is new of it after a rewriting."""
        try:
            return self._fold(item)
        except (LookupError, TypeError, ValueError, AttributeError, struct.error) as error:
            raise RequestError("request_lost", f"event {item['seq']} of the request cannot be read") from error

    def _fold(self, item: Event) -> list[Event]:
        is_delta = self._after == 0 and item["type"] == "delta"
        if is_delta and not self._truth.choice(item["index"]).continues(item):
            raise _RewrittenError
        self._last = item["seq"]
        self._attempt = max(self._attempt, item["attempt"])
        self._expected = True
        if self._replay is not None:
            return self._replay.feed(item)
        if self._after:
            return [item]
        # One that takes nothing back is for readers who had more.
        is_idle = item["type"] == "rewind" and item["to_offset"] >= len(self.transcript.choice(item["index"]).token_ids)
        self.transcript.add(item)
        return [] if is_idle else [item]

    @property
    def _truth(self) -> Transcript:
        """What the stream says, as far as it was read."""
        return self.transcript if self._replay is None else self._replay.truth

    def _start_over(self) -> None:
        """Read from the first event on, telling only what is new or different."""
        self._restarts += 1
        if self._after or self._restarts > MAX_RESTARTS:
            raise RequestError("request_lost", "events that were told have been lost; read from the start")
        _log.info("events were lost and written again, they are compared", request_id=self.request_id)
        self._replay = Replay(self.transcript)
        self._last = 0

    def _next_live(self) -> Event | None:
        """The next live event if it is the one that follows; a hole makes the reader fall behind."""
        while self._buffer:
            seq, data = self._buffer[0]
            if seq > self._last + 1:
                self._behind = True
                return None
            self._buffer.popleft()
            try:
                item = _read_event(data, seq)
            except RequestError:  # somebody else's message: what is stored is the truth
                self._behind = True
                return None
            if seq == self._last + 1:
                return item
            if item["attempt"] > self._attempt > 0:
                # An engine that is new to us writes numbers that we have had: the server has lost what we were told.
                raise _RewrittenError
        return None

    async def _stored(self) -> AsyncGenerator[Event, None]:
        while True:
            page: Any = await self._hub.command("XRANGE", self._stream, f"({self._last}-0", "+", "COUNT", PAGE)
            for entry_id, fields in page:
                if int(entry_id.partition(b"-")[0]) != self._last + 1:
                    raise RequestError("request_lost", f"events after number {self._last} of the request are missing")
                yield _read_event(fields.get(b"e", b""), self._last + 1)
            if len(page) < PAGE:
                return

    async def _examine(self) -> AsyncGenerator[Event, None]:
        """Nothing is stored beyond what was read: does the record say why? Yields the end where only it is left."""
        record: Any = await self._hub.command("HMGET", self._record, "state", "seq", "deadline")
        state, seq, deadline = record
        if state is None:
            if self._expected:
                raise RequestError("request_lost", "the request's record is gone")
            if self._patience_until is not None and time.monotonic() > self._patience_until:
                raise RequestError("request_lost", f"no request {self.request_id} is known")
            return
        self._expected = True
        if not (deadline or b"").isdigit() or not (seq or b"0").isdigit():
            raise RequestError("request_lost", "the request's record has been damaged")
        if seq is not None and int(seq) < self._last:
            raise _RewrittenError
        if state.decode() not in TERMINAL_STATES:
            await self._look_at_deadline(int(deadline))
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

    async def _look_at_deadline(self, deadline: int) -> None:
        """Engines end what is past its deadline. Where none lives, those who wait must not do so for ever."""
        if time.time() * 1000 < deadline - CLOCKS_APART_MS:
            return
        now = await self._hub.expire(self.request_id)
        if now > deadline + OVERDUE_MS:
            raise RequestError(
                "deadline_exceeded", "the deadline has passed, and no engine has said how it ended", param="ttl_ms"
            )

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
            read = self._truth.choice(choice["index"])
            offset, text_offset = len(read.token_ids), read.text_length
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
                    "chain": extend_chain(read.chain, token_ids),
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

    def __init__(
        self,
        commands: Client,
        keys: QueueKeys,
        *,
        watchdog_s: float = 5.0,
        keeping: scripts.Keeping,
    ) -> None:
        self.keys = keys
        self._keeping = keeping
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

    async def expire(self, request_id: str) -> int:
        """End what waits beyond its deadline on the request's shard. Returns the server's ms; 0 where it is away."""
        call = scripts.sweep(self.keys.shard_of(request_id), "", first=0, count=EXPIRE, keeping=self._keeping)
        try:
            return int((await scripts.run_one(self._commands, call))[2])
        except (RedisError, OSError):
            return 0

    async def command(self, *words: str | int) -> Any:
        """A reading command, repeated while Redis is unavailable."""
        backoff = Backoff()
        while True:
            try:
                return await self._commands.execute_command(*words)
            except (RedisError, OSError) as error:
                if str(error).startswith("WRONGTYPE"):
                    raise RequestError("request_lost", "a key of the request holds something else") from error
                if not is_unavailable(error):
                    raise
            await backoff.sleep()

    async def aclose(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
        feeds = list(self._feeds.values())  # a request that still starts, or another who closes, may change them
        self._feeds.clear()
        for feed in feeds:
            await feed.aclose()

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
