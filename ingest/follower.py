"""Whoever follows one request through an `EventHub`: told by a channel, looking at the record where in doubt."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagemill.engine.errors import RequestError
from pagemill.ingest.events import TERMINAL_STATES

if TYPE_CHECKING:
    from pagemill.ingest.event_hub import EventHub

OVERDUE_MS = 30_000  # after its deadline a request that no engine ends is given up by who waits for it
CLOCKS_APART_MS = 60_000  # of this machine and the server, at most; else it takes so much longer


@dataclass(frozen=True, slots=True)
class Standing:
    """What a record says. `seq`: events so far, None where that has gone; `deadline`: server ms; `more`: the values of
    the fields that were asked for beside these."""

    state: str
    seq: int | None
    deadline: int
    more: Sequence[bytes | None]

    @property
    def has_ended(self) -> bool:
        return self.state in TERMINAL_STATES


class Follower(abc.ABC):
    """Follows one request; made by an `EventHub`. Close it when done with it.

    `channel`: the one that it hears. `expected`: the request is known to exist, so its record being away means that it
    was lost. Otherwise `patience_s` is how long a request that nobody has heard of is waited for; None: for ever.

    `watch_ms`: lease of those who watch, 0 where the request goes on without; None: not known yet. `renew_at`: when it
    is to be renewed or asked for, on the monotonic clock.
    """

    def __init__(
        self, hub: EventHub, request_id: str, channel: str, *, expected: bool, patience_s: float | None
    ) -> None:
        shard = hub.keys.shard_of(request_id)
        self.request_id = request_id
        self.channel = channel.encode()
        self._hub = hub
        self._record = shard.record(request_id)
        self._watch = shard.watch(request_id)
        self._stream = shard.events(request_id)
        self._expected = expected
        self._patience_until = None if patience_s is None else time.monotonic() + patience_s
        self._confirmed = asyncio.Event()
        self._wake = asyncio.Event()
        self._behind = False
        self._overdue_at = float("inf")
        self.watch_ms: int | None = None
        self.renew_at = 0.0

    def confirm(self) -> None:
        """The server has subscribed us, for the first time or anew: from here on nothing live is missed."""
        if self._confirmed.is_set():
            self.fall_behind()
        self._confirmed.set()

    @abc.abstractmethod
    def hear(self, message: bytes) -> None:
        """What the channel brings."""

    def fall_behind(self) -> None:
        """Live messages may have been missed: look at what is stored."""
        self._behind = True
        self._wake.set()

    def look(self, now: float) -> None:
        """Said now and then: who has heard nothing for `watchdog_s` looks at what is stored."""
        if now >= self._overdue_at:
            self.fall_behind()

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

    async def _until_confirmed(self) -> None:
        """Where it takes long, what is stored is looked at without it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._hub.watchdog_s):
                await self._confirmed.wait()

    async def _until_woken(self) -> None:
        self._overdue_at = time.monotonic() + self._hub.watchdog_s
        await self._wake.wait()
        self._overdue_at = float("inf")

    async def _look_at_record(self, *more: str) -> Standing | None:
        """None: it has no record yet. Raises `request_lost` where there is none any more, or a damaged one."""
        reply: Any = await self._hub.command("HMGET", self._record, "state", "seq", "deadline", *more)
        state, seq, deadline = reply[:3]
        if state is None:
            if self._expected:
                raise RequestError("request_lost", "the request's record is gone")
            if self._patience_until is not None and time.monotonic() > self._patience_until:
                raise RequestError("request_lost", f"no request {self.request_id} is known")
            return None
        self._expected = True
        if not (deadline or b"").isdigit() or not (seq or b"0").isdigit():
            raise RequestError("request_lost", "the request's record has been damaged")
        return Standing(state.decode(), None if seq is None else int(seq), int(deadline), reply[3:])

    async def _look_at_deadline(self, deadline: int) -> None:
        """Engines end what is past its deadline. Where none lives, those who wait must not do so for ever."""
        if time.time() * 1000 < deadline - CLOCKS_APART_MS:
            return
        now = await self._hub.expire(self.request_id)
        if now > deadline + OVERDUE_MS:
            raise RequestError(
                "deadline_exceeded", "the deadline has passed, and no engine has said how it ended", param="ttl_ms"
            )
