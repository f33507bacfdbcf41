"""Following many requests: one connection that listens for all, one timer for those who wait, one round for leases."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from pagemill.engine.errors import RequestError
from pagemill.ingest import scripts
from pagemill.ingest.end_waiter import EndWaiter
from pagemill.ingest.feed import Feed
from pagemill.ingest.follower import Follower
from pagemill.ingest.gathering import Gatherer
from pagemill.ingest.keys import QueueKeys
from pagemill.ingest.listener import listener_opener
from pagemill.ingest.redis import Backoff, Client, is_unavailable
from pagemill.ingest.subscription import Subscription

TICK_S = 0.25
EXPIRE = 16  # overdue requests ended in one go


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
        self._looks = Gatherer[tuple[str | int, ...]](self._send, size=lambda words: 0)
        self._feeds: dict[str, Feed] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def open(
        self,
        request_id: str,
        *,
        after: int = 0,
        expected: bool = False,
        patience_s: float | None = None,
    ) -> Subscription:
        """Follow a request from event `after` + 1 on. Close the subscription when done with it."""
        subscription = Subscription(self, request_id, after=after, expected=expected, patience_s=patience_s)
        await self._add(subscription)
        return subscription

    async def wait_for_end(
        self, request_id: str, *, expected: bool = False, patience_s: float | None = None
    ) -> EndWaiter:
        """Wait for a request's end alone. Close the waiter when done with it."""
        waiter = EndWaiter(self, request_id, expected=expected, patience_s=patience_s)
        await self._add(waiter)
        return waiter

    async def close(self, follower: Follower) -> None:
        await self._feed(follower.request_id).remove(follower)

    async def expire(self, request_id: str) -> int:
        """End what waits beyond its deadline on the request's shard. Returns the server's ms; 0 where it is away."""
        call = scripts.sweep(self.keys.shard_of(request_id), "", first=0, count=EXPIRE, keeping=self._keeping)
        try:
            return int((await scripts.run_one(self._commands, call))[2])
        except (RedisError, OSError):
            return 0

    async def command(self, *words: str | int, alone: bool = False) -> Any:
        """A reading command, repeated while Redis is unavailable. `alone`: its reply may be long, nobody waits for it
        with his own."""
        backoff = Backoff()
        while True:
            try:
                if alone:
                    return await self._commands.execute_command(*words)
                return await self._looks.ask(words)
            except (RedisError, OSError) as error:
                if str(error).startswith("WRONGTYPE"):
                    raise RequestError("request_lost", "a key of the request holds something else") from error
                if not is_unavailable(error):
                    raise
            await backoff.sleep()

    async def _send(self, commands: Sequence[tuple[str | int, ...]]) -> list[Any]:
        pipeline = self._commands.pipeline(transaction=False)
        for words in commands:
            pipeline.execute_command(*words)
        return await self._commands.run_pipeline(pipeline)

    async def aclose(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        feeds = list(self._feeds.values())  # a request that still starts, or another who closes, may change them
        self._feeds.clear()
        for feed in feeds:
            await feed.aclose()

    async def _keep_looking(self) -> None:
        """One timer for all who wait: each event that comes would set its reader's anew."""
        while True:
            await asyncio.sleep(min(TICK_S, self.watchdog_s / 2))
            now = time.monotonic()
            for feed in self._feeds.values():
                for follower in feed.followers():
                    follower.look(now)

    async def _keep_watch(self) -> None:
        """Say of every request that is followed, and wants to know, that somebody watches it."""
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            followed = [follower for feed in self._feeds.values() for follower in feed.first_followers()]
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

    async def _add(self, follower: Follower) -> None:
        await self._feed(follower.request_id).add(follower)
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._keep_watch()), asyncio.create_task(self._keep_looking())]

    def _feed(self, request_id: str) -> Feed:
        shard = self.keys.shard_of(request_id) if self._commands.publishes_sharded else self.keys.shards[0]
        # Any key of the shard names its slot.
        if (feed := self._feeds.get(shard.tag)) is None:
            feed = self._feeds[shard.tag] = Feed(self._open_listener, shard.statistics)
        return feed
