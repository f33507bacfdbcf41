"""Random faults on servers in company: a Cluster of three whose slots move, Sentinels that fail over.

A failover may lose what the old master had acknowledged, so the claim is a weaker one than on one server: whoever reads
a stream is told the undisturbed text, or a named error; never another text, and never nothing. Afterwards the queue
works.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis.asyncio as aioredis
from redis.exceptions import RedisError

from pagemill.engine.errors import RequestError
from pagemill.ingest.client import AsyncClient, QueueUnavailableError
from pagemill.ingest.embedded import EmbeddedServer
from tests.chaos import servers
from tests.chaos.catalogue import Task, make_bodies, undisturbed
from tests.chaos.engines import EngineHost
from tests.chaos.model import make_model
from tests.chaos.reading import Violation

QUEUE = "chaos"
TAG = f"pm:{{{QUEUE}.0}}"
SETTINGS = {"queue": QUEUE, "heartbeat_timeout_s": 1.5, "block_ms": 100, "poll_ms": 50, "drain_timeout_s": 0.3}
NAMED = ("request_lost", "poison", "deadline_exceeded")
MAX_READONLY = 200  # answers of a master that has become a replica, for each failover: not a loop


@dataclass(slots=True)
class Company:
    """The servers of one deployment, the URL that names them, and what is done to them, with weights."""

    url: str
    nodes: list[EmbeddedServer]
    rng: random.Random
    sentinel_ports: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def faults(self) -> dict[str, tuple[int, Callable[[], Awaitable[None]]]]:
        if self.sentinel_ports:
            return {"master killed": (1, self._kill_master), "failover asked for": (1, self._fail_over)}
        return {
            "node killed": (2, self._kill_node),
            "slot moved": (4, self._move_slot),
            "subscribers thrown out": (2, lambda: self._everywhere("CLIENT", "KILL", "TYPE", "pubsub")),
            "scripts forgotten": (1, lambda: self._everywhere("SCRIPT", "FLUSH")),
        }

    async def _everywhere(self, *words: str) -> None:
        for node in self.nodes:
            async with aioredis.Redis(port=node.port or 0, protocol=2) as client:
                with contextlib.suppress(RedisError, OSError):
                    await client.execute_command(*words)

    async def _kill_node(self) -> None:
        node = await asyncio.to_thread(servers.slot_owner, self.nodes, f"{TAG}:stat")
        await asyncio.to_thread(node.kill)
        await asyncio.sleep(self.rng.uniform(0, 1))
        await asyncio.to_thread(node.start)

    async def _move_slot(self) -> None:
        target, pause_s = self.rng.choice(self.nodes), self.rng.choice((0, 0, 0.05))
        async with asyncio.timeout(60):
            while True:
                # A node that has just come back takes a moment to know its company again. A move that stays half done
                # is no fault of a cluster that anything could go on after: whoever began it has to end it.
                with contextlib.suppress(RedisError, OSError):
                    await asyncio.to_thread(servers.move_slot, self.nodes, f"{TAG}:stat", target, pause_s)
                    return
                await asyncio.sleep(0.2)

    async def _master(self) -> int:
        async with aioredis.Redis(port=self.sentinel_ports[0], protocol=2) as sentinel:
            (_, port) = await sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster")
        return int(port)

    async def _kill_master(self) -> None:
        port = await self._master()
        node = next(node for node in self.nodes if node.port == port)
        await asyncio.to_thread(node.kill)
        async with asyncio.timeout(90):
            while await self._master() == port:
                await asyncio.sleep(0.05)
        await asyncio.to_thread(node.start)
        await self._settled()

    async def _fail_over(self) -> None:
        port = await self._master()
        async with aioredis.Redis(port=self.sentinel_ports[0], protocol=2) as sentinel:
            with contextlib.suppress(RedisError):
                await sentinel.execute_command("SENTINEL", "FAILOVER", "mymaster")
        async with asyncio.timeout(90):
            while await self._master() == port:
                await asyncio.sleep(0.05)
        await self._settled()

    async def _settled(self) -> None:
        """One is the master, the other follows it."""
        async with asyncio.timeout(90):
            while True:
                states = []
                for node in self.nodes:
                    async with aioredis.Redis(port=node.port or 0, protocol=2) as client:
                        with contextlib.suppress(RedisError, OSError):
                            info = await client.info("replication")
                            states.append(info["role"] if info["role"] == "master" else info["master_link_status"])
                if sorted(states) == ["master", "up"]:
                    return
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def company(deployment: str, folder: Path, rng: random.Random) -> AsyncIterator[Company]:
    """The servers of a deployment, "cluster" or "sentinel"."""
    with contextlib.ExitStack() as stack:
        if deployment == "cluster":
            nodes = await asyncio.to_thread(stack.enter_context, servers.cluster())
            hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
            yield Company(f"redis+cluster://{hosts}", nodes, rng)
        else:
            nodes, ports = await asyncio.to_thread(stack.enter_context, servers.sentinels(folder))
            hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
            yield Company(f"redis+sentinel://{hosts}/mymaster/0", nodes, rng, ports)


async def run_company(
    deployment: str,
    folder: Path,
    *,
    requests: int,
    seed: int,
    duration_s: float,
    engines: int = 2,
    in_flight: int = 32,
    blows: Sequence[str] = (),
) -> Counter[str]:
    """Send and read `requests` while servers and engines break, for `duration_s` at most; by these `blows` where they
    are given, and until they have been dealt. Returns what happened, by name. Raises `Violation` for a text that is not
    the undisturbed one, an error without a name, or a queue that does not work afterwards."""
    rng = random.Random(f"{seed} {deployment}")
    await asyncio.to_thread(make_model, folder / "model")
    async with company(deployment, folder, rng) as made:
        settings = {**SETTINGS, "redis_url": made.url}
        async with EngineHost(folder / "model", folder, settings) as host, _client(made.url) as client:
            for _ in range(engines):
                await host.start()
            tasks = await undisturbed(client, make_bodies(random.Random(seed), 24))
            breaking = asyncio.create_task(_break(made, host, random.Random(f"{seed} blows"), blows))
            ended: Counter[str] = Counter()
            seats, until = asyncio.Semaphore(in_flight), time.monotonic() + duration_s
            try:
                async with asyncio.TaskGroup() as group:
                    for number in range(requests):
                        await seats.acquire()
                        if time.monotonic() > until or breaking.done():
                            break
                        one = _one(client, f"c{number}", rng.choice(tasks), ended)
                        group.create_task(one).add_done_callback(lambda _: seats.release())
                        await asyncio.sleep(rng.uniform(0, 0.05))
                    breaking.cancel()
            finally:
                breaking.cancel()
                await asyncio.wait({breaking})
            if not breaking.cancelled():
                breaking.result()
            await _check_afterwards(made, client, tasks[0])
    return ended + made.counts


def _client(url: str) -> AsyncClient:
    return AsyncClient(url, queue=QUEUE, watchdog_s=0.5)


async def _break(made: Company, host: EngineHost, rng: random.Random, blows: Sequence[str]) -> None:
    """Deal these blows, or for ever such as are drawn. A blow that has begun is brought to its end."""
    kinds = made.faults

    def drawn() -> Iterator[str]:
        while True:
            yield rng.choices([*kinds, "engine killed"], [*(weight for weight, _ in kinds.values()), 1])[0]

    for name in blows or drawn():
        await asyncio.sleep(rng.uniform(0.3, 1.2))
        made.counts[name] += 1
        if name == "engine killed":
            rng.choice(host.alive).kill()
            await host.start()
            continue
        blow = asyncio.ensure_future(kinds[name][1]())
        try:
            await asyncio.shield(blow)
        except asyncio.CancelledError:
            await blow
            raise


async def _one(client: AsyncClient, name: str, task: Task, ended: Counter[str]) -> None:
    try:
        async with asyncio.timeout(120):
            while True:
                try:
                    handle = await client.submit(**task.body, id=name, max_attempts=100)
                    break
                except QueueUnavailableError:
                    ended["submits repeated"] += 1
                    await asyncio.sleep(0.05)
                except RequestError as error:
                    if error.code != "duplicate_id":
                        raise Violation(name, f"submit says {error.code}: {error}") from error
                    handle = client.attach(name)
                    break
            deltas = [delta async for delta in handle]
    except RequestError as error:
        if error.code not in NAMED:
            raise Violation(name, f"it ended as {error.code}: {error}") from error
        ended[error.code] += 1
        return
    except TimeoutError as error:
        raise Violation(name, "it has not ended after two minutes") from error
    for index, answer in enumerate(task.answers):
        ids = tuple(token for delta in deltas if delta.index == index for token in delta.token_ids)
        if ids != answer.token_ids:
            raise Violation(name, f"it is {ids} and not {answer.token_ids}")
    ended["completed"] += 1


async def _check_afterwards(made: Company, client: AsyncClient, task: Task) -> None:
    if made.sentinel_ports:
        await made._settled()
    after: Counter[str] = Counter()
    await _one(client, "after", task, after)
    if not after["completed"]:
        raise Violation("after", f"the queue does not work any more: {after}")
    failovers = made.counts["master killed"] + made.counts["failover asked for"]
    for node in made.nodes:
        async with aioredis.Redis(port=node.port or 0, protocol=2) as plain:
            errors: Any = await plain.info("errorstats")
        count = errors.get("errorstat_READONLY", {}).get("count", 0)
        if count > MAX_READONLY * max(1, failovers):
            raise Violation("replica", f"it was written to {count} times")


def report(deployment: str, counts: Counter[str], seconds: float) -> str:
    lines = [f"  {name:28} {count:>9,}" for name, count in sorted(counts.items())]
    return "\n".join([deployment, *lines, f"{seconds:.0f} s: the claim holds"])


def main(deployment: str, folder: Path, *, requests: int, seed: int, duration_s: float) -> int:
    """Run it and print what happened. Returns the exit status."""
    started = time.monotonic()
    work = run_company(deployment, folder, requests=requests, seed=seed, duration_s=duration_s)
    try:
        counts = asyncio.run(work)
    except (Violation, ExceptionGroup) as error:
        print(f"the claim does not hold on {deployment}, seed {seed}: {error}", file=sys.stderr)
        for inner in error.exceptions if isinstance(error, ExceptionGroup) else ():
            print(f"  {inner!r}", file=sys.stderr)
        return 1
    print(report(deployment, counts, time.monotonic() - started))
    return 0
