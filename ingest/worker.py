"""The engine's side of the queue: stream -> engine -> events.

The idea. An entry is taken only while the engine has room, so whatever it cannot start stays visible to every other
engine. `begin` makes this engine the owner; from then on each write is fenced by owner, attempt and offset, so an
engine that was believed dead and comes back can harm nobody. `finish` writes the end and removes the entry in one step:
an entry is in the stream exactly while its request is unfinished, and a crash at any point leaves it there.

Invariants. A heartbeat precedes the first read, and while it cannot be refreshed nothing new is taken: entries are only
adopted from an engine whose heartbeat is old. Heartbeats stop with the steps (`leases`), so a device that hangs loses
its requests like a process that died. A read is never cancelled, since the server would have delivered to nobody; after
a read that failed, this consumer's own pending entries are read again. Every loop survives Redis going away; only the
death of the engine ends `run` with an error.

What may have ended an engine runs with nothing beside it (`quarantine`), so a fatal request costs the engines
`max_attempts` deaths and the others no attempt. Entries of a tenant at its cap are delivered and wait (`tenant_lines`),
since a consumer group cannot pass an entry over. While there is no room `lookout` answers those who would wait in vain.
Whoever leaves keeps what runs, and the rest is the others' at once (`departure`).

Rejected: an ack at delivery (loses requests in a crash); renewing leases with XCLAIM (steals entries back from their
new owner); one connection for blocking reads and commands (a read would hold up every append).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Container, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import structlog
from redis.exceptions import RedisError

from pagemill.engine.async_engine import AsyncEngine
from pagemill.engine.errors import EngineDeadError
from pagemill.ingest import scripts
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.departure import Departure
from pagemill.ingest.entries import Entry, UnreadableEntry
from pagemill.ingest.inspection import wait_until_fit
from pagemill.ingest.intake import Intake, Postponed
from pagemill.ingest.keys import QueueKeys, ShardKeys
from pagemill.ingest.leases import Lease
from pagemill.ingest.live_request import Ending, LiveRequest, cancelled_error, expired_error, unwatched_error
from pagemill.ingest.lookout import Lookout
from pagemill.ingest.outbox import Outbox, Outcome
from pagemill.ingest.patrol import Patrol
from pagemill.ingest.placement import HeldPrefixes, Offers, is_wanted
from pagemill.ingest.quarantine import Quarantine
from pagemill.ingest.redis import Client, connect_commands, may_pass
from pagemill.ingest.rounds import Rounds
from pagemill.ingest.starter import Starter
from pagemill.ingest.stream_reader import StreamReader
from pagemill.ingest.tasks import end, first_of
from pagemill.ingest.tenant_lines import TenantLines

MAX_STARTING = 4  # entries between delivery and the engine's queue

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


class Worker:
    """Serves one queue with one engine: `await run()` until `stop()` is called or the engine dies.

    `owner` is this engine's name as a consumer, fresh for each worker, so that a restart never mistakes the entries of
    its predecessor for its own.
    """

    def __init__(self, engine: AsyncEngine, config: QueueConfig) -> None:
        self._engine = engine
        self._config = config
        self._keys = QueueKeys(config.key_prefix, config.queue, config.shards)
        self.owner = f"{socket.gethostname()[:32]}-{os.getpid()}-{secrets.token_hex(4)}"
        self._client: Client = connect_commands(config.redis_url, self.owner)
        self._rounds = Rounds(self._client)
        self._stopping = asyncio.Event()
        places = config.head_start_ms > 0 and engine.config.enable_prefix_caching
        held = HeldPrefixes(engine.is_cached, engine.info.block_size) if places else None
        self._offers = Offers(config.head_start_ms / 1000)
        self._intake = Intake(self._client, config, self.owner, engine.info.model_name, self._stopping, held)
        self._outbox = Outbox(self._client, config, on_cancel=self._on_cancel, on_end=self._on_end)
        self._starter = Starter(engine, self._intake, self._outbox, held)
        self._live: dict[str, LiveRequest] = {}
        self._taken: set[tuple[str, bytes]] = set()
        self._quarantine = Quarantine(self._take, is_empty=lambda: not self._live, run_alone=self._run_alone)
        self._lines = TenantLines()
        self._patrol = Patrol(
            self._client,
            self.owner,
            config.poll_ms / 1000,
            self._rounds,
            self._live.values,
            on_cancel=self._on_cancel,
            on_loss=self._outbox.drop,
        )
        self._readers: dict[ShardKeys, StreamReader] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Semaphore(MAX_STARTING)
        self._empty = asyncio.Event()
        self._empty.set()
        self._lease = Lease(engine, config, self._rounds, self.owner, self._stopping, held)
        self._departure = Departure(self._client, self._keys, self.owner)
        self.ready = asyncio.Event()
        self.finished = 0

    @property
    def num_live(self) -> int:
        """Requests that this engine owns now."""
        return len(self._live)

    def stop(self) -> None:
        """Take nothing new, let what runs finish within `drain_timeout_s`, give back the rest; then `run` returns."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until stopped; cancelled, it gives back at once what runs. Waits for a Redis that is not there yet.

        Raises `EngineDeadError` when the device fails (its requests stay in the stream for the next engine) and
        `ConfigError` when the server is too old or not fit (see `inspection`).
        """
        tasks: list[asyncio.Task[Any]] = []
        readers: list[asyncio.Task[None]] = []
        try:
            if not await wait_until_fit(self._client, self._keys, self._config.redis_url, self._stopping):
                return
            death = asyncio.create_task(self._engine.wait_for_death())
            stopping = asyncio.create_task(self._stopping.wait())
            loops = [self._outbox.run(), self._lease.run(), self._patrol.run(), self._quarantine.run(), self._promote()]
            loops += [self._lookout(shard).run() for shard in self._keys.shards]
            tasks = [death, stopping, *map(asyncio.create_task, loops)]
            readers = [asyncio.create_task(self._read(shard)) for shard in self._keys.shards]
            _log.info("engine serves the queue", queue=self._config.queue, owner=self.owner)
            for ended in await first_of([*tasks, *readers]):
                if isinstance(ended, EngineDeadError):
                    raise ended
            self._stopping.set()
            await self._drain(readers, death)
        except asyncio.CancelledError:
            await self._give_back()
            raise
        finally:
            self._stopping.set()
            await end([*tasks, *self._serving])
            await self._hand_on()
            # Readers are not cancelled: a cancelled read could strand the entry that it was being given.
            await asyncio.gather(*readers, return_exceptions=True)
            if self._lease.was_renewed and await self._departure.retire():
                _log.info("engine has left the queue", owner=self.owner, finished=self.finished)
            await self._client.aclose()

    # -- the life of the worker ----------------------------------------------------------------------------------

    async def _drain(self, readers: list[asyncio.Task[None]], death: asyncio.Task[EngineDeadError]) -> None:
        async def finished() -> None:
            self._quarantine.open()
            await self._hand_on()
            await asyncio.gather(*readers)
            await asyncio.gather(*self._serving)
            await self._hand_on()
            await self._empty.wait()

        if self._live:
            _log.info("stopping: running requests finish", requests=len(self._live))
        waiter = asyncio.create_task(finished())
        try:
            done, _ = await asyncio.wait(
                {waiter, death}, timeout=self._config.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if death in done:
                raise death.result()
            if waiter in done:
                waiter.result()
            else:
                await self._give_back()
        finally:
            await end([waiter])

    async def _give_back(self) -> None:
        """Publish what the running requests have so far and leave them to the next engine."""
        await end(list(self._serving))
        lives = [live for live in self._live.values() if live.ending is None]
        if lives:
            _log.warning("stopping: requests are given back", requests=len(lives))
        for live in lives:
            live.detached = True
            self._engine.abort(live.request_id)
            self._outbox.flush_now(live)
        try:
            async with asyncio.timeout(max(1.0, min(5.0, self._config.drain_timeout_s))):
                await self._outbox.join()
        except TimeoutError:
            # The next engine computes the tokens again that are not out yet.
            _log.warning("what was generated could not be told in time", requests=len(lives))
        await self._hand_on(running=True)

    async def _hand_on(self, *, running: bool = False) -> None:
        if self._lease.was_renewed:
            await self._departure.hand_on(running=running)

    # -- entries -------------------------------------------------------------------------------------------------

    async def _read(self, shard: ShardKeys) -> None:
        reader = self._readers[shard] = StreamReader(
            shard,
            self.owner,
            self._client,
            self._rounds,
            self._config,
            self._stopping,
            self._lease.renew,
            lambda: self._lease.may_reap,
            self._offers.decline,
            self.ready.set,
        )
        try:
            while await self._wait_for_room():
                for entry in await reader.read():
                    await self._take_on(entry)
                self.ready.set()
        finally:
            await reader.aclose()

    async def _take_on(self, entry: Entry) -> None:
        place = (entry.stream_key, entry.entry_id)
        if place not in self._taken:
            self._taken.add(place)
            await self._starting.acquire()
            self._spawn(self._serve(entry))

    def _lookout(self, shard: ShardKeys) -> Lookout:
        return Lookout(
            shard,
            self.owner,
            self._engine.info.model_name,
            self._client,
            self._rounds,
            self._config,
            self._stopping,
            is_full=lambda: not self._engine.has_room() or not self._quarantine.is_clear,
            may_reap=lambda: self._lease.may_reap,
            on_given=lambda entry: self._spawn(self._take_on(entry)),
        )

    async def _wait_for_room(self) -> bool:
        """Wait until something new may be taken. False: the worker stops."""
        while not self._stopping.is_set():
            is_late = self.ready.is_set() and not self._lease.is_fresh
            if is_late or not self._quarantine.is_clear:
                await asyncio.sleep(0.05)
            elif self._engine.has_room():
                return True
            else:
                room = asyncio.create_task(self._engine.wait_for_room())
                stopping = asyncio.create_task(self._stopping.wait())
                await asyncio.wait({room, stopping}, return_when=asyncio.FIRST_COMPLETED)
                await end([room, stopping])
        return False

    async def _serve(self, entry: Entry) -> None:
        try:
            if entry.offer is not None and not is_wanted(entry.offer, len(self._live)):
                self._taken.discard((entry.stream_key, entry.entry_id))
                await scripts.run_one(self._client, scripts.decline(entry, self.owner))
                return
            async with self._quarantine.passing():
                may_offer = entry.offer is None and self._offers.may_offer
                running = len(self._live) if may_offer else None
                self._postpone(entry, await self._take(entry, busy=self._lines, running=running))
        except (RedisError, OSError) as error:
            if not may_pass(error):  # unheard, whoever offers it begins it a little later
                raise
        finally:
            self._starting.release()

    async def _wait_for_other(self, entry: Entry, other: str) -> None:
        """Leave an entry to another engine for a while; then begin it here, if it has not been begun."""
        declined = await self._offers.wait(entry)
        async with self._quarantine.passing():
            outcome = await self._take(entry, busy=self._lines)
            if outcome is not None:
                self._offers.avoid(other, silent=not declined)
            self._postpone(entry, outcome)

    def _postpone(self, entry: Entry, outcome: LiveRequest | Postponed | None) -> None:
        """Put an entry aside if it cannot be begun yet."""
        if isinstance(outcome, Postponed):
            if outcome.reason == "offered":
                self._spawn(self._wait_for_other(entry, outcome.to))
            elif outcome.reason == "busy":
                self._lines.add(outcome.tenant, entry)
            else:
                self._quarantine.add(entry, old=outcome.reason == "old suspect")

    async def _promote(self) -> None:
        """Begin entries of tenants that had as many requests running as they may."""
        while True:
            await self._lines.wait(self._config.poll_ms / 1000)
            for tenant in self._lines:
                try:
                    while self._engine.has_room() and (entry := self._lines.first(tenant)) is not None:
                        if not await self._begin_postponed(tenant, entry):
                            break
                except (RedisError, OSError) as error:
                    if not may_pass(error):
                        raise

    async def _begin_postponed(self, tenant: str, entry: Entry) -> bool:
        """Whether the tenant's first entry has left its line."""
        found: Any = await self._client.xrange(entry.stream_key, entry.entry_id, entry.entry_id)
        outcome: LiveRequest | Postponed | None = None
        if found:
            async with self._quarantine.passing():
                outcome = await self._take(replace(entry, fields=found[0][1]))
            if outcome == Postponed("busy", tenant):
                return False
        else:
            self._taken.discard((entry.stream_key, entry.entry_id))
        self._lines.remove(tenant, entry)
        self._postpone(entry, outcome)
        return True

    async def _run_alone(self, entry: Entry) -> None:
        """Serve a suspect, and return once it needs not be alone any more."""
        live = await self._take(entry, alone=True)
        while isinstance(live, LiveRequest) and self._live.get(live.request_id) is live:
            if live.has_told_tokens and live.begun.alone < 2:
                break
            await asyncio.sleep(0.01)

    async def _take(
        self, entry: Entry, *, alone: bool = False, busy: Container[str] = (), running: int | None = None
    ) -> LiveRequest | Postponed | None:
        """Own an entry and start its request. What goes wrong with it is seen to here."""
        live: LiveRequest | Postponed | None = None
        try:
            avoided = self._offers.avoided if running is not None else ()
            live = await self._intake.take(entry, alone=alone, busy=busy, running=running, avoided=avoided)
            if isinstance(live, LiveRequest):
                self._live[live.request_id] = live
                self._empty.clear()
                await self._starter.start(live)
        except EngineDeadError:
            pass  # `run` ends with it, and the entry is still in the stream.
        except Exception as error:
            name = entry.entry_id.decode()
            if isinstance(error, RedisError | OSError) and may_pass(error):  # and this worker stops
                _log.warning("entry left to others", **entry.names, entry=name, reason=str(error))
            else:
                _log.error("entry cannot be served", **entry.names, entry=name, reason=str(error), exc_info=error)
                if isinstance(live, LiveRequest):
                    self._outbox.drop(live, str(error), "refused")
                else:
                    await self._intake.bury(entry, UnreadableEntry("refused", str(error)))
        finally:
            if live is None:
                self._taken.discard((entry.stream_key, entry.entry_id))
        return live

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    # -- what the outbox and the server say ----------------------------------------------------------------------

    def _on_cancel(self, live: LiveRequest, why: str) -> None:
        if live.ending is not None or live.stopping is not None or live.detached:
            return
        endings = {
            "cancelled": Ending("cancelled", cancelled_error()),
            "unwatched": Ending("cancelled", unwatched_error()),
            "expired": Ending("expired", expired_error()),
        }
        live.stopping = endings[why]
        self._engine.abort(live.request_id)

    def _on_end(self, live: LiveRequest, outcome: Outcome) -> None:
        entry = live.entry
        self._taken.discard((entry.stream_key, entry.entry_id))
        if self._live.get(live.request_id) is live:
            del self._live[live.request_id]
        if not self._live:
            self._empty.set()
            self._quarantine.notice()
        self._lines.notice()
        if outcome == "written":
            self.finished += 1
            _log.info("request ended", **live.names, **live.outcome)
            return
        self._engine.abort(live.request_id)
        if outcome == "refused":
            self._spawn(
                self._intake.bury(entry, UnreadableEntry("refused", "the server does not take this request's events"))
            )
        else:
            # Another engine may have had it and died: then it may be ours again, adopted while it was still known here.
            self._readers[entry.shard].look_again()
