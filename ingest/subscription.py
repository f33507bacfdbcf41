"""Reading a request's events without a gap: what is stored first, then live, and stored again whenever in doubt.

The channel is only quick; the `ev` stream is the truth. A live event that comes in order is taken as it is. A hole, a
reader that lagged behind, a reconnection or a long silence leads to the stream, so losing every live message costs time
and nothing else.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import orjson
import structlog

from pagemill.engine.errors import RequestError
from pagemill.ingest.events import Transcript, extend_chain, read_live_payload
from pagemill.ingest.follower import Follower
from pagemill.ingest.replay import Event as Event
from pagemill.ingest.replay import Replay

if TYPE_CHECKING:
    from pagemill.ingest.event_hub import EventHub

PAGE = 1000  # events read from the stream at once
MAX_RESTARTS = 8
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


class Subscription(Follower):
    """The events of one request, from number `after` + 1 on; made by `EventHub.open`, ends with `done`.

    For whoever wants each of them; to wait for the end alone is cheaper (`EndWaiter`).
    """

    def __init__(self, hub: EventHub, request_id: str, *, after: int, expected: bool, patience_s: float | None) -> None:
        channel = hub.keys.shard_of(request_id).channel(request_id)
        super().__init__(hub, request_id, channel, expected=expected, patience_s=patience_s)
        self._last = after
        self._after = after
        self._buffer: deque[tuple[int, bytes]] = deque()
        self.transcript = Transcript()
        self._attempt = 0
        self._replay: Replay | None = None
        self._restarts = 0

    def hear(self, message: bytes) -> None:
        if (payload := read_live_payload(message)) is not None:
            self.deliver(*payload)

    def deliver(self, seq: int, data: bytes) -> None:
        """A live event."""
        if len(self._buffer) < BUFFER:
            self._buffer.append((seq, data))
        else:
            self._buffer.clear()
            self._behind = True
        self._wake.set()

    async def events(self) -> AsyncGenerator[Event, None]:
        """Every event once, in order, up to and with `done`. Raises `request_lost` where there will be no `done`.

        If the server loses events that were told here, what replaces them is compared with them: see `Replay`.
        """
        await self._until_confirmed()
        while True:
            self._wake.clear()
            self._behind = False
            try:
                async for item in self._until_behind():
                    yield item
                    if item["type"] == "done":
                        return
            except _RewrittenError:
                self._start_over()

    async def _until_behind(self) -> AsyncGenerator[Event, None]:
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
            await self._until_woken()
            self._wake.clear()

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
            page: Any = await self._hub.command(
                "XRANGE", self._stream, f"({self._last}-0", "+", "COUNT", PAGE, alone=True
            )
            for entry_id, fields in page:
                if int(entry_id.partition(b"-")[0]) != self._last + 1:
                    raise RequestError("request_lost", f"events after number {self._last} of the request are missing")
                yield _read_event(fields.get(b"e", b""), self._last + 1)
            if len(page) < PAGE:
                return

    async def _examine(self) -> AsyncGenerator[Event, None]:
        """Nothing is stored beyond what was read: does the record say why? Yields the end where only it is left."""
        standing = await self._look_at_record()
        if standing is None:
            return
        seq = standing.seq
        if seq is not None and seq < self._last:
            raise _RewrittenError
        if not standing.has_ended:
            await self._look_at_deadline(standing.deadline)
            return
        ended = False
        async for item in self._stored():
            ended = item["type"] == "done"
            yield item
        if not ended and (seq or 0) <= self._last:
            raise RequestError("request_lost", "the request has ended, and its last event is not there")
        if not ended:
            async for item in self._from_record(seq or 0):
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
