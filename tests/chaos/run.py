"""One run: engines, a server, proxies between them and the clients, requests, faults, and the checks."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis.asyncio as aioredis

from pagemill.engine.errors import RequestError
from pagemill.ingest.client import AsyncClient, Client, RequestFailed
from pagemill.ingest.embedded import EmbeddedServer, free_port
from tests.chaos import checking
from tests.chaos.catalogue import Task, make_bodies, undisturbed
from tests.chaos.engines import EngineHost, EngineProcess
from tests.chaos.fault_proxy import FaultProxy
from tests.chaos.faults import Faults
from tests.chaos.model import make_model
from tests.chaos.producing import Producers, Sent
from tests.chaos.reading import Fold, Manner, Violation, plain_client, read

QUEUE = "chaos"
TAG = f"pm:{{{QUEUE}.0}}"
HEARTBEAT_TIMEOUT_S = 1.5
KEPT = {"result_ttl_s": 86_400, "replay_ttl_s": 86_400}  # everything is looked at in the end


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is. `duration_s`: no request is sent after that, if `least` have ended and as many faults happened;
    `patience_s`: how long one may take at most."""

    requests: int = 10_000
    seed: int = 1
    duration_s: float = 3600.0
    least: int = 0
    engines: int = 3
    in_flight: int = 192
    bodies: int = 300
    server: str | None = None
    fsync: str = "always"
    pause_s: tuple[float, float] = (0.3, 2.0)
    patience_s: float = 180.0


@dataclass(slots=True)
class Outcome:
    """What a run did, by name. `requests` are all that were accepted."""

    requests: list[Sent] = field(default_factory=list)
    rows: dict[str, Counter[str]] = field(default_factory=dict)
    seconds: float = 0.0

    def table(self) -> str:
        lines = []
        for title, counts in self.rows.items():
            lines.append(title)
            lines += [f"  {name:28} {count:>9,}" for name, count in sorted(counts.items())]
        return "\n".join(lines)


def violations(error: BaseException) -> list[Violation]:
    """The violations in an error or a group of errors."""
    if isinstance(error, BaseExceptionGroup):
        return [found for inner in error.exceptions for found in violations(inner)]
    return [error] if isinstance(error, Violation) else []


class Run:
    """Use `run_chaos`."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.outcome = Outcome()
        self.manners: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.ended = 0

    async def run(self) -> Outcome:
        plan, started = self.plan, time.monotonic()
        arguments = ("--appendfsync", plan.fsync)
        server = EmbeddedServer(self.folder / "redis", port=free_port(), program=plan.server, arguments=arguments)
        await asyncio.to_thread(make_model, self.folder / "model")
        async with contextlib.AsyncExitStack() as stack:
            await asyncio.to_thread(server.start)
            stack.callback(server.stop)
            rng = random.Random(f"{plan.seed} proxies")
            engine_side = await stack.enter_async_context(FaultProxy(server.port or 0, rng))
            client_side = await stack.enter_async_context(FaultProxy(server.port or 0, rng))
            settings = {
                "redis_url": engine_side.url,
                "queue": QUEUE,
                "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
                "block_ms": 100,
                "poll_ms": 50,
                "drain_timeout_s": 0.3,
                **KEPT,
            }
            host = await stack.enter_async_context(EngineHost(self.folder / "model", self.folder, settings))
            direct = await stack.enter_async_context(plain_client(server.url))
            await host.start()
            tasks = await self._undisturbed(server.url)
            for _ in range(plan.engines - 1):
                await host.start()
            faults = Faults(
                host=host,
                server=server,
                proxies=[engine_side, client_side],
                heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
                rng=random.Random(f"{plan.seed} faults"),
                pause_s=plan.pause_s,
            )
            try:
                await self._disturbed(client_side.url, tasks, faults)
                await self._check(direct, host)
            except (Violation, BaseExceptionGroup) as error:
                for violation in violations(error):
                    await checking.tell(direct, TAG, violation)
                raise
            self.outcome.rows["faults"] = faults.counts
        self.outcome.rows["readers"] = self.manners
        self.outcome.rows["tokens, as readers saw them"] = self.tokens
        self.outcome.seconds = time.monotonic() - started
        return self.outcome

    async def _undisturbed(self, url: str) -> list[Task]:
        bodies = make_bodies(random.Random(f"{self.plan.seed} bodies"), self.plan.bodies)
        async with AsyncClient(url, queue=QUEUE) as client:
            tasks = await undisturbed(client, bodies)
        assert len(tasks) > self.plan.bodies / 2
        return tasks

    async def _disturbed(self, url: str, tasks: list[Task], faults: Faults) -> None:
        """Send and read everything while `faults` run; they end when all has been sent."""
        plan = self.plan
        seats = asyncio.Semaphore(plan.in_flight)
        until = time.monotonic() + plan.duration_s
        clients = [AsyncClient(url, queue=QUEUE, watchdog_s=1.0, patience_s=None, **KEPT) for _ in range(4)]
        thread_client = Client(url, queue=QUEUE, watchdog_s=1.0, patience_s=None, **KEPT)
        # Threads of their own: those of the loop are wanted for starting the server again.
        threads = ThreadPoolExecutor(plan.in_flight, thread_name_prefix="reader")
        async with contextlib.AsyncExitStack() as stack:
            for client in clients:
                await stack.enter_async_context(client)
            stack.callback(threads.shutdown)
            stack.callback(thread_client.close)
            self._threads = threads
            raw = await stack.enter_async_context(plain_client(url))
            producers = Producers(clients, raw, TAG)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(faults.run())
                    progress = group.create_task(self._tell_progress(faults))
                    for number in range(plan.requests):
                        await seats.acquire()
                        if time.monotonic() > until and min(self.ended, faults.counts.total()) >= plan.least:
                            break
                        rng = random.Random(f"{plan.seed} request {number}")
                        one = self._one(number, rng.choice(tasks), producers, thread_client, url, rng)
                        group.create_task(one).add_done_callback(lambda _: seats.release())
                    await faults.stop()
                    progress.cancel()
            finally:
                await faults.stop()
            self.outcome.rows["producers"] = producers.counts

    async def _tell_progress(self, faults: Faults) -> None:
        while True:
            await asyncio.sleep(10)
            told = f"{len(self.outcome.requests)} requests accepted, {self.ended} ended and read"
            print(f"{told}; {len(faults.host.alive)} engines, {faults.counts.total()} faults", file=sys.stderr)

    async def _one(
        self, number: int, task: Task, producers: Producers, thread_client: Client, url: str, rng: random.Random
    ) -> None:
        """The life of one request: sent, perhaps cancelled, read by one or two readers."""
        name = f"c{number}"
        try:
            async with asyncio.timeout(self.plan.patience_s), asyncio.TaskGroup() as readers:
                if rng.random() < 0.4:
                    producers.counts["by XADD"] += 1
                    if rng.random() < 0.3:
                        self.manners["early"] += 1
                        readers.create_task(self._outside(url, name, task, Manner(), rng))
                    sent = await producers.by_xadd(task, name, rng)
                else:
                    producers.counts["by the client"] += 1
                    sent = await producers.by_client(task, name, rng)
                self.outcome.requests.append(sent)
                name = sent.request_id
                for _ in range(rng.choice((1, 1, 2))):
                    readers.create_task(self._reader(sent, producers, thread_client, url, rng))
                if rng.random() < 0.08:
                    await asyncio.sleep(rng.uniform(0, 0.3))
                    await producers.cancel(sent, rng)
            self.ended += 1
        except BaseExceptionGroup as error:
            for violation in violations(error):  # at once: unwinding may take its time
                print(violation, file=sys.stderr)
            raise
        except TimeoutError as error:
            raise Violation(name, f"it has not ended after {self.plan.patience_s:g} s") from error

    def _reader(
        self, sent: Sent, producers: Producers, thread_client: Client, url: str, rng: random.Random
    ) -> Coroutine[Any, Any, None]:
        kinds = {
            "losing 40 %": Manner(loss=0.4),
            "slow": Manner(pause_s=0.05),
            "late": Manner(comes_after_s=rng.uniform(0, 2)),
            "plain": Manner(),
        }
        kind = rng.choice((*kinds, "client", "client", "client", "thread"))
        self.manners[kind] += 1
        if kind in kinds:
            return self._outside(url, sent.request_id, sent.task, kinds[kind], rng)
        if kind == "client":
            return self._by_client(rng.choice(producers.clients), sent)
        return self._on_a_thread(thread_client, sent)

    async def _outside(self, url: str, name: str, task: Task, manner: Manner, rng: random.Random) -> None:
        fold = await read(url, TAG, name, manner, rng)
        fold.check(task)
        self._count(fold)

    async def _by_client(self, client: AsyncClient, sent: Sent) -> None:
        handle = client.attach(sent.request_id)
        try:
            self._take(sent, [delta async for delta in handle])
        except RequestFailed as error:
            self._failed(sent, error)
        except RequestError as error:
            raise Violation(sent.request_id, f"the client says {error.code}: {error}") from error

    async def _on_a_thread(self, client: Client, sent: Sent) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, self._by_thread, client, sent)

    def _by_thread(self, client: Client, sent: Sent) -> None:
        try:
            self._take(sent, list(client.attach(sent.request_id)))
        except RequestFailed as error:
            self._failed(sent, error)
        except RequestError as error:
            raise Violation(sent.request_id, f"the client says {error.code}: {error}") from error

    def _take(self, sent: Sent, deltas: list[Any]) -> None:
        for index, answer in enumerate(sent.task.answers):
            mine = [delta for delta in deltas if delta.index == index]
            ids = tuple(token_id for delta in mine for token_id in delta.token_ids)
            text = "".join(delta.text for delta in mine)
            if ids != answer.token_ids or text != answer.text:
                raise Violation(sent.request_id, f"the client's reader saw {ids}, {text!r} and not {answer}")
            self.tokens["read"] += len(ids)

    def _failed(self, sent: Sent, error: RequestFailed) -> None:
        if error.result.state != "cancelled" or not sent.may_be_cancelled:
            raise Violation(sent.request_id, f"it ended as {error.result.state}: {error}")

    def _count(self, fold: Fold) -> None:
        self.tokens["read"] += sum(len(choice.token_ids) for choice in fold.choices.values())

    async def _check(self, direct: aioredis.Redis, host: EngineHost) -> None:
        for engine in host.engines.values():
            if not engine.asked_to_end and engine.status is not None:
                raise Violation(f"engine {engine.pid}", f"ended by itself; see {host.log_of(engine)}")
        requests = self.outcome.requests
        self.outcome.rows["ended"] = await checking.check_requests(direct, TAG, requests)
        await checking.check_nothing_left(direct, TAG)
        letters = await checking.check_dead_letters(direct, TAG, requests)
        self.outcome.rows["ended"]["dead letters (sent twice)"] = letters
        await self._check_engines(direct, host)

    async def _check_engines(self, direct: aioredis.Redis, host: EngineHost) -> None:
        """Those alive hold no blocks; told to end they find their pools whole and leave the lists."""
        alive: list[EngineProcess] = host.alive
        deadline = time.monotonic() + 60
        while True:
            engines = await checking.living_engines(direct, TAG, 2 * HEARTBEAT_TIMEOUT_S)
            busy = [told for told in engines if told["running"] or told["free_blocks"] < told["num_blocks"] - 1]
            if len(engines) == len(alive) and not busy:
                break
            if time.monotonic() > deadline:
                raise Violation("engines", f"{len(alive)} are alive; blocks are still held by {busy} of {engines}")
            await asyncio.sleep(0.05)
        for engine in alive:
            engine.terminate()
        async with asyncio.timeout(60):
            await asyncio.gather(*(engine.ended.wait() for engine in alive))
        for engine in host.engines.values():
            if engine.status not in (0, -9):
                raise Violation(f"engine {engine.pid}", f"exit status {engine.status}; see {host.log_of(engine)}")


@contextlib.asynccontextmanager
async def _folder(keep: Path | None) -> AsyncIterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="pagemill-chaos-") as name:
        yield Path(name)


async def run_chaos(plan: Plan, keep: Path | None = None) -> Outcome:
    """Do what `plan` says. Raises an `ExceptionGroup` or a `Violation` at the first request of which the claim does
    not hold. `keep`: a folder for logs and data that stays."""
    async with _folder(keep) as folder:
        return await Run(plan, folder).run()
