"""What one connection listens to, and who follows each channel; whenever it is lost it is made anew."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING

import structlog
from redis.exceptions import ConnectionError, RedisError

from pagemill.ingest.listener import Listener, OpenListener
from pagemill.ingest.redis import Backoff, is_unavailable

if TYPE_CHECKING:
    from pagemill.ingest.follower import Follower

# A step of an engine tells something to all of its requests at once. So many readers are woken before whoever else the
# process serves has a turn.
TURN = 16

_log = structlog.get_logger(__name__)


class Feed:
    """The channels that one connection listens to, made anew whenever it is lost. `key` lies where they do."""

    def __init__(self, open_listener: OpenListener, key: str) -> None:
        self._open_listener = open_listener
        self._key = key
        self._listener: Listener | None = None
        self._lock = asyncio.Lock()
        self._channels: dict[bytes, list[Follower]] = {}
        self._ready: set[bytes] = set()
        self._was_up = False
        self._task: asyncio.Task[None] | None = None

    async def add(self, follower: Follower) -> None:
        """Hear a follower's channel for it, from its `confirm` on."""
        channel = follower.channel
        self._channels.setdefault(channel, []).append(follower)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        async with self._lock:
            if channel in self._ready:
                follower.confirm()
            elif self._listener is not None:
                # Where this fails the connection is lost, and the next one subscribes to every channel.
                with contextlib.suppress(RedisError, OSError):
                    await self._listener.subscribe(channel)

    def followers(self) -> list[Follower]:
        """Whoever hears something."""
        return [follower for followers in self._channels.values() for follower in followers]

    def first_followers(self) -> list[Follower]:
        """One follower of each channel: of each request, or two."""
        return [followers[0] for followers in self._channels.values() if followers]

    async def remove(self, follower: Follower) -> None:
        followers = self._channels.get(follower.channel, [])
        if follower in followers:
            followers.remove(follower)
        if not followers and self._channels.pop(follower.channel, None) is not None:
            self._ready.discard(follower.channel)
            async with self._lock:
                # Somebody may have come meanwhile and counts on the channel.
                if self._listener is not None and follower.channel not in self._channels:
                    with contextlib.suppress(RedisError, OSError):
                        await self._listener.unsubscribe(follower.channel)

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        backoff = Backoff()
        while True:
            try:
                await self._listen(backoff)
            except (RedisError, OSError) as error:
                if not is_unavailable(error):
                    _log.error("subscription refused by redis", reason=str(error))
                elif self._was_up:
                    reason = str(error) or type(error).__name__
                    _log.info("subscription connection lost, it is made anew", reason=reason)
                self._was_up = False
            await backoff.sleep()

    async def _listen(self, backoff: Backoff) -> None:
        """Connect, subscribe to every channel, and hand out what comes until the connection is lost."""
        listener = await self._open_listener(self._key)
        asking = asyncio.create_task(listener.keep_asking())
        try:
            async with self._lock:
                await listener.subscribe(*self._channels)
                self._listener, self._was_up = listener, True
            for number in itertools.count(1):
                kind, channel, data = await listener.next()
                backoff.reset()
                self._route(kind, channel, data)
                if number % TURN == 0:
                    await asyncio.sleep(0)
        finally:
            # First, and without a wait: whoever subscribes from now on waits for the next connection.
            self._listener = None
            self._ready.clear()
            asking.cancel()
            await listener.aclose()
            await asyncio.gather(asking, return_exceptions=True)

    def _route(self, kind: str, channel: bytes, data: bytes) -> None:
        followers = self._channels.get(channel, ())
        if kind == "message":
            for follower in followers:
                follower.hear(data)
        elif kind == "subscribe":
            if followers:
                self._ready.add(channel)
            for follower in followers:
                follower.confirm()
        elif channel in self._ready:
            raise ConnectionError("the server has ended a subscription: its slot has moved")
