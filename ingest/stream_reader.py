"""Getting entries from one shard's input streams: own ones after a failure, those of dead engines, then new ones."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import structlog
from redis.exceptions import RedisError, ResponseError

from pagemill.engine.errors import ConfigError
from pagemill.engine.policy import AGED_TURN, AGEING_S
from pagemill.ingest import scripts
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.entries import Entry, Offer
from pagemill.ingest.keys import GROUP, PRIORITIES, ShardKeys
from pagemill.ingest.redis import Backoff, Client, connect_blocking, is_group_lost, may_pass
from pagemill.ingest.rounds import Rounds

_PAGE = 100
_GREATEST = b"18446744073709551615-18446744073709551615"  # entry that there can be
REAP_S = 1.0
TAKEN_OVER = 4  # entries of dead engines at a time: as many as a worker begins together
LOSS_LOG_S = 5.0  # streams that somebody deletes again and again do not fill the log
WEIGHTS = (0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 2)  # 8 turns of 12 for high, 3 for normal, 1 for batch priority

_log = structlog.get_logger(__name__)


class Turns:
    """Which stream is read first: priorities share the turns by `WEIGHTS`, and what has waited `AGEING_S` gets one turn
    in `AGED_TURN`, the oldest first. A stream that has nothing leaves its turn to the others, high priority first.

    `waited_ms`: how long the oldest entry of each stream has waited, as far as is known.
    """

    def __init__(self) -> None:
        self.waited_ms: list[int] = [0] * PRIORITIES
        self._turn = 0

    def order(self) -> list[int]:
        """The streams in the order in which they are asked for the next entry."""
        oldest = max(range(PRIORITIES), key=self.waited_ms.__getitem__)
        if self._turn % AGED_TURN == AGED_TURN - 1 and self.waited_ms[oldest] >= AGEING_S * 1000:
            first = oldest
        else:
            first = WEIGHTS[self._turn % len(WEIGHTS)]
        return [first, *(stream for stream in range(PRIORITIES) if stream != first)]

    def take(self) -> None:
        """An entry has been found: the next turn."""
        self._turn += 1


class StreamReader:
    """Reads entries as consumer `owner`. `beat` is awaited before the groups are (re)made, hence before any delivery.
    `may_reap()`: whether an old heartbeat of another engine means that it is dead. `on_declined(stream key, entry)`:
    another engine does not want what it was offered. `on_empty()`: nothing waits, a read is about to wait itself.
    Once it is `stopping` its reads are ended by `Departure`.

    A read must never be cancelled: the server would count its entry as delivered and nobody would have it.
    """

    def __init__(
        self,
        shard: ShardKeys,
        owner: str,
        client: Client,
        rounds: Rounds,
        config: QueueConfig,
        stopping: asyncio.Event,
        beat: Callable[[], Awaitable[None]],
        may_reap: Callable[[], bool],
        on_declined: Callable[[tuple[str, bytes]], None],
        on_empty: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shard = shard
        self._owner = owner
        self._client = client
        self._rounds = rounds
        self._config = config
        self._stopping = stopping
        self._beat = beat
        self._may_reap = may_reap
        self._on_declined = on_declined
        self._on_empty = on_empty
        self._told = shard.told(owner)
        self._clock = clock
        self._blocking = connect_blocking(config.redis_url, owner)
        self._turns = Turns()
        self._looked_at: list[str | bytes] = ["0-0"] * PRIORITIES
        self._grouped = False
        self._losses = 0
        self._has_told_unreadable = False
        self._tell_loss_at = self._tell_found_at = float("-inf")
        self._recover = False
        self._is_empty = False
        self._reap_at = clock()
        self._backoff = Backoff()
        self._away = False

    async def read(self) -> list[Entry]:
        """Entries for this engine, at most one new one of each priority. Empty when nothing came for `block_ms`.

        Redis being away is waited out with growing pauses, one a call; streams and groups that were deleted are made
        again.
        """
        try:
            entries = await self._next()
        except (RedisError, OSError, TimeoutError) as error:
            self._recover = True
            if isinstance(error, ResponseError) and (is_group_lost(error) or "no such key" in str(error)):
                self._grouped = False
                if self._stopping.is_set():
                    return []
                self._losses += 1
                if self._clock() >= self._tell_loss_at:
                    self._tell_loss_at = self._clock() + LOSS_LOG_S
                    _log.warning("stream or group has gone and is made again", reason=str(error), times=self._losses)
                    self._losses = 0
                await asyncio.sleep(0.1)
                return []
            if not may_pass(error):
                # Another program's key in the place of a stream, a user who may not read it: for a person to mend.
                keys = f"{self._shard.streams[0]} to {self._shard.streams[-1]}"
                raise ConfigError(
                    f"the streams {keys} cannot be read: {error}; see to them, or set key_prefix"
                ) from error
            if not self._away:
                _log.warning("redis is unavailable, reading waits", reason=str(error) or type(error).__name__)
            self._away = True
            await self._backoff.sleep()
            return []
        if self._away:
            _log.info("redis is back, reading goes on")
        self._away = False
        self._backoff.reset()
        return entries

    def look_again(self) -> None:
        """Read this consumer's own pending entries before anything else."""
        self._recover = True

    async def aclose(self) -> None:
        await self._blocking.aclose()

    async def _next(self) -> list[Entry]:
        if not self._grouped:
            await self._make_groups()
            self._grouped = True
        if self._recover:
            entries = await self._own_pending()
            self._recover = False
            if entries:
                return entries
        if self._clock() >= self._reap_at:
            entries = await self._reap() or await self._look_around()
            if entries:
                return entries
            # Several engines look at different moments, so that the entries of a dead one are spread over them.
            self._reap_at = self._clock() + min(REAP_S, self._config.heartbeat_timeout_s / 3) * random.uniform(0.5, 1.0)
        # Where a read has just waited in vain whose turn it is need not be asked: the first that comes has it.
        for stream in () if self._is_empty else self._turns.order():
            entries = await self._read_new((self._shard.streams[stream],), block_ms=None)
            if entries:
                self._turns.take()
                return entries
        self._on_empty()
        entries = await self._read_new(self._shard.streams, block_ms=self._config.block_ms)
        self._is_empty = not entries
        return entries

    async def _read_new(self, streams: Sequence[str], block_ms: int | None) -> list[Entry]:
        async with asyncio.timeout((block_ms or 0) / 1000 + 5):
            reply: Any = await self._blocking.xreadgroup(
                GROUP, self._owner, dict.fromkeys((*streams, self._told), ">"), count=1, block=block_ms
            )
        told = [item for stream, items in reply or () if stream == self._told.encode() for item in items]
        entries = self._entries([part for part in reply or () if part[0] != self._told.encode()])
        return entries + await self._hear(told) if told else entries

    async def _hear(self, told: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> list[Entry]:
        """What other engines say. Returns the entries that they offer."""
        offers: list[tuple[int, bytes, Offer]] = []
        for _, fields in told:
            try:
                if b"look" in fields:
                    self._reap_at = self._clock()
                    continue
                stream, entry_id = range(PRIORITIES).index(int(fields[b"stream"])), fields[b"entry"]
                if b"declined" in fields:
                    self._on_declined((self._shard.streams[stream], entry_id))
                    continue
                words = fields[b"from"].decode(), fields[b"offer"].decode()
                offers.append(
                    (stream, entry_id, Offer(*words, level=int(words[1][0]), running=int(fields[b"running"])))
                )
            except (KeyError, ValueError, IndexError) as error:
                # A newer engine may say what this one has no word for, again and again: there may be something.
                self._reap_at = self._clock()
                if not self._has_told_unreadable:
                    _log.warning("what another engine says cannot be read", reason=f"{type(error).__name__}: {error}")
                self._has_told_unreadable = True
        notes = [note for note, _ in told]
        pipeline = self._client.pipeline(transaction=False)
        pipeline.xack(self._told, GROUP, *notes)
        pipeline.xdel(self._told, *notes)
        for stream, entry_id, _ in offers:
            pipeline.xrange(self._shard.streams[stream], entry_id, entry_id)
        _, _, *found = await self._client.run_pipeline(pipeline)
        return [
            Entry(self._shard, stream, entry_id, items[0][1], offer)
            for (stream, entry_id, offer), items in zip(offers, found, strict=True)
            if isinstance(items, list) and items
        ]

    async def _make_groups(self) -> None:
        await self._beat()
        await scripts.run_one(self._client, scripts.open_streams(self._shard, self._owner))

    async def _own_pending(self) -> list[Entry]:
        """What was delivered to this consumer and perhaps never arrived here."""
        entries: list[Entry] = []
        for number, stream in enumerate(self._shard.streams):
            first = b"-"
            while True:
                # One byte more than a body may have: that it is too large is still to be seen.
                args = (GROUP, self._owner, first, _PAGE, self._config.max_body_bytes + 1)
                page: Any = await scripts.run_one(self._client, scripts.Call("own", (stream,), args))
                if not page:
                    break
                for entry_id, flat in page:
                    if flat:
                        fields = dict(zip(flat[::2], flat[1::2], strict=True))
                        entries.append(Entry(self._shard, number, entry_id, fields))
                    else:
                        await self._client.xack(stream, GROUP, entry_id)
                if page[-1][0] == _GREATEST:  # nothing comes after it, and the server refuses to be asked
                    break
                first = b"(" + page[-1][0]
        return entries

    async def _look_around(self) -> list[Entry]:
        """What no read brings any more. Learns how long each stream has waited."""
        oldest = self._rounds.ask(scripts.oldest(self._shard))
        found, waited_ms = await asyncio.gather(self._passed_over(), oldest)
        self._turns.waited_ms = waited_ms
        return found

    async def _reap(self) -> list[Entry]:
        call = scripts.reap(
            self._shard,
            self._owner,
            timeout_ms=int(self._config.heartbeat_timeout_s * 1000),
            count=TAKEN_OVER,
            retry_delay_ms=self._config.retry_delay_ms,
            old_beats_count=self._may_reap(),
        )
        entries = scripts.read_given(self._shard, await scripts.run_one(self._client, call))
        for entry in entries:
            _log.info("entry taken over", **entry.names, stream=entry.stream, entry=entry.entry_id.decode())
        return entries

    async def _passed_over(self) -> list[Entry]:
        """What no read brings any more, since somebody has changed the group by hand."""
        call = scripts.Call(
            "passed_over", self._shard.streams, (GROUP, self._owner, PRIORITIES, self._shard.base, *self._looked_at)
        )
        found, self._looked_at = await self._rounds.ask(call)
        entries = scripts.read_given(self._shard, found)
        if entries and self._clock() >= self._tell_found_at:
            self._tell_found_at = self._clock() + LOSS_LOG_S
            _log.warning("entries found that nobody had: the group was changed by hand", **entries[0].names)
        return entries

    def _entries(self, reply: list[Any]) -> list[Entry]:
        numbers = {stream.encode(): number for number, stream in enumerate(self._shard.streams)}
        return [
            Entry(self._shard, numbers[stream], entry_id, fields or {})
            for stream, items in reply or ()
            for entry_id, fields in items
        ]
