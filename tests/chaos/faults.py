"""What goes wrong, and when: drawn from the seed, until `stop`."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import redis.asyncio as aioredis
from redis.exceptions import RedisError

from pagemill.ingest.embedded import EmbeddedServer
from tests.chaos.engines import EngineHost, EngineProcess
from tests.chaos.fault_proxy import FaultProxy


@dataclass(slots=True)
class Faults:
    """Does harm to engines, server and connections, with `pause_s` (shortest, longest) between two blows.

    Once `stop` has returned, all engines run again, the server is up and connections work.
    """

    host: EngineHost
    server: EmbeddedServer
    proxies: list[FaultProxy]
    heartbeat_timeout_s: float
    rng: random.Random
    pause_s: tuple[float, float] = (0.3, 2.0)
    counts: Counter[str] = field(default_factory=Counter)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _lasting: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> None:
        kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "engine killed": (6, self._kill_engine),
            "engine frozen": (4, self._freeze_engine),
            "engine told to end": (3, self._end_engine),
            "redis killed": (2, self._kill_redis),
            "connections cut": (5, self._cut),
            "replies lost": (8, self._lose_replies),
            "network slow": (3, self._slow),
            "connections stalled": (3, self._stall),
            "subscribers thrown out": (3, self._throw_out),
            "scripts forgotten": (2, self._forget_scripts),
        }
        names, weights = list(kinds), [weight for weight, _ in kinds.values()]
        while not await self._stopped_within(self.rng.uniform(*self.pause_s)):
            name = self.rng.choices(names, weights)[0]
            self.counts[name] += 1
            await kinds[name][1]()

    async def stop(self) -> None:
        self._stopping.set()
        await asyncio.gather(*self._lasting)
        for proxy in self.proxies:
            proxy.delay(0)
            proxy.resume()
        for engine in self.host.alive:
            engine.thaw()

    # -- engines -------------------------------------------------------------------------------------------------

    def _victim(self) -> EngineProcess | None:
        running = [engine for engine in self.host.alive if not engine.frozen and not engine.asked_to_end]
        return self.rng.choice(running) if len(running) > 1 else None

    async def _kill_engine(self) -> None:
        if (engine := self._victim()) is not None:
            engine.kill()
            self._last(self._replace(self.rng.uniform(0, 1)))

    async def _end_engine(self) -> None:
        if (engine := self._victim()) is not None:
            engine.terminate()
            self._last(self._replace(self.rng.uniform(0, 1)))

    async def _replace(self, after_s: float) -> None:
        await self._stopped_within(after_s)
        await self.host.start()

    async def _freeze_engine(self) -> None:
        if (engine := self._victim()) is not None:
            engine.freeze()
            self._last(self._thaw(engine, self.rng.uniform(0.1, 3 * self.heartbeat_timeout_s)))

    async def _thaw(self, engine: EngineProcess, after_s: float) -> None:
        await self._stopped_within(after_s)
        engine.thaw()

    # -- the server ----------------------------------------------------------------------------------------------

    async def _kill_redis(self) -> None:
        await asyncio.to_thread(self.server.kill)
        await self._stopped_within(self.rng.uniform(0, 1))
        await asyncio.to_thread(self.server.start)

    async def _throw_out(self) -> None:
        await self._command("CLIENT", "KILL", "TYPE", "pubsub")

    async def _forget_scripts(self) -> None:
        await self._command("SCRIPT", "FLUSH")

    async def _command(self, *words: str) -> None:
        async with aioredis.Redis.from_url(self.server.url, protocol=2) as client:
            with contextlib.suppress(RedisError, OSError):
                await client.execute_command(*words)

    # -- the network ---------------------------------------------------------------------------------------------

    async def _cut(self) -> None:
        self.rng.choice(self.proxies).cut(self.rng.choice((0.2, 0.5, 1.0)))

    async def _lose_replies(self) -> None:
        self.rng.choice(self.proxies).lose_replies(self.rng.choice((0.2, 0.5, 1.0)))

    async def _slow(self) -> None:
        proxy = self.rng.choice(self.proxies)
        proxy.delay(self.rng.uniform(0.01, 0.2))
        self._last(self._mend(lambda: proxy.delay(0), self.rng.uniform(0.2, 1.0)))

    async def _stall(self) -> None:
        proxy = self.rng.choice(self.proxies)
        proxy.stall(self.rng.choice((0.3, 1.0)))
        self._last(self._mend(proxy.resume, self.rng.choice((0.3, 0.3, 1.0, 1.0, 3.0, 7.0))))

    async def _mend(self, mend: Callable[[], None], after_s: float) -> None:
        await self._stopped_within(after_s)
        mend()

    # ------------------------------------------------------------------------------------------------------------

    def _last(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._lasting.add(task)
        task.add_done_callback(self._lasting.discard)

    async def _stopped_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()
