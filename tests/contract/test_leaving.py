"""An engine that leaves keeps what runs until that has ended; whatever else it holds is for the others at once.

Reads, leases and drains last longer here than a test has patience, so an answer says that nobody waited for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from pagemill.engine.async_engine import AsyncEngine
from pagemill.engine.config import EngineConfig
from pagemill.ingest import leases, scripts
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.keys import QueueKeys
from pagemill.ingest.leases import Lease
from pagemill.ingest.redis import connect_commands
from pagemill.ingest.rounds import Rounds
from pagemill.ingest.worker import Worker
from tests.contract.conftest import TAG, Outside
from tests.contract.test_leases import Steps, prompt, tiny
from tests.ingest.bare_engine import Engine

__all__ = ["tiny"]

PATIENCE_S = 40
LONG: dict[str, Any] = {"heartbeat_timeout_s": 120.0, "block_ms": 60_000, "drain_timeout_s": 120.0}
LONG |= {"head_start_ms": 0, "retry_delay_ms": 0}


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.005)


async def begun(outside: Outside, request_id: str) -> None:
    await until(lambda: outside.redis.hget(f"{TAG}:req:{request_id}", "owner"))


async def is_waiting(outside: Outside, worker: Worker) -> bool:
    """Whether it waits in a read."""
    clients = await outside.redis.client_list()
    return any(
        client["name"] == worker.owner and client["cmd"] == "xreadgroup" and "b" in client["flags"]
        for client in clients
    )


async def holders(outside: Outside) -> dict[bytes, int]:
    """Consumers and how many entries they hold."""
    pending = await outside.redis.xpending(f"{TAG}:in:1", "engines")
    return {consumer["name"]: consumer["pending"] for consumer in pending["consumers"]}


async def leave_suspects(outside: Outside, config: QueueConfig, *names: str) -> None:
    """Somebody has begun these, and is gone."""
    client = connect_commands(config.redis_url, "dead")
    dead = Engine(client, "dead")
    (shard,) = QueueKeys(config.key_prefix, config.queue).shards
    await dead.beat()
    await dead.call(scripts.open_streams(shard, "dead"))
    for number, name in enumerate(names):
        await outside.add(name, prompt(number))
        await dead.begin(await dead.take(), name)
    await dead.call(scripts.retire(shard, "dead"))
    await client.aclose()


async def hold(kind: str, worker: Worker, outside: Outside) -> tuple[str, str]:
    """Have an engine run one request and hold another, which it has not begun: their ids."""
    if kind == "suspect":
        await until(lambda: asyncio.sleep(0, bool(worker._live and worker._quarantine._suspects)))
        return ("runs", "held") if "runs" in worker._live else ("held", "runs")
    await outside.add("runs", prompt(0))
    await begun(outside, "runs")
    if kind == "only read":
        take = worker._intake.take

        async def late(*arguments: Any, **options: Any) -> Any:
            await worker._stopping.wait()
            return await take(*arguments, **options)

        worker._intake.take = late  # type: ignore[method-assign]
    await outside.add("held", prompt(1))
    if kind == "of a busy tenant":
        await until(lambda: asyncio.sleep(0, "default" in worker._lines))
    await until(lambda: asyncio.sleep(0, len(worker._taken) == 2))
    return "runs", "held"


@pytest.mark.parametrize("others", ["wait", "are full", "come later"])
@pytest.mark.parametrize("kind", ["suspect", "of a busy tenant", "only read"])
def test_what_an_engine_that_leaves_has_not_begun_is_begun_by_others_while_it_drains(
    play: Callable[..., Any], tiny: EngineConfig, queue_config: QueueConfig, outside: Outside, kind: str, others: str
) -> None:
    leaves_config = queue_config.replace(**LONG)
    if kind == "of a busy tenant":
        leaves_config = leaves_config.replace(max_tenant_running_requests=1)

    async def scenario() -> None:
        engines = [await AsyncEngine.create(tiny) for _ in range(2)]
        leaves, heir = Worker(engines[0], leaves_config), Worker(engines[1], queue_config.replace(**LONG))
        steps = Steps(engines[0])
        steps.go.clear()
        if kind == "suspect":
            await leave_suspects(outside, leaves_config, "runs", "held")
        leaving = asyncio.create_task(leaves.run())
        runs, held = await hold(kind, leaves, outside)

        is_full = others == "are full"
        has_room = engines[1].has_room
        engines[1].has_room = lambda: not is_full and has_room()  # type: ignore[method-assign]
        if others != "come later":
            serving = asyncio.create_task(heir.run())
            await until(lambda: outside.redis.zscore(f"{TAG}:hb", heir.owner)) if is_full else None
            await until(lambda: is_waiting(outside, heir)) if not is_full else None
        leaves.stop()
        if others != "wait":

            async def is_nobodys() -> bool:
                return await holders(outside) == {leaves.owner.encode(): 1, b"delayed": 1}

            await until(is_nobodys)
        if others == "come later":
            serving = asyncio.create_task(heir.run())
        is_full = False
        engines[1]._room.set()
        done = await outside.done(held, timeout=PATIENCE_S)
        assert done["metrics"]["attempts"] == (2 if kind == "suspect" else 1)
        assert not leaving.done() and await outside.redis.hget(f"{TAG}:req:{runs}", "state") == b"running"
        steps.go.set()
        assert (await outside.done(runs))["state"] == "completed"
        await asyncio.wait_for(leaving, PATIENCE_S)
        heir.stop()
        await asyncio.wait_for(serving, PATIENCE_S)
        for engine in engines:
            await engine.stop()
        await outside.assert_nothing_left()

    play(scenario())


def test_a_raw_entry_that_is_given_back_while_the_others_are_full_is_answered_in_time(
    play: Callable[..., Any], tiny: EngineConfig, queue_config: QueueConfig, outside: Outside
) -> None:
    """It was only read, so nothing but its body says when it ends, and whether it can be served at all."""

    async def scenario() -> None:
        engines = [await AsyncEngine.create(tiny) for _ in range(2)]
        leaves, full = (Worker(engine, queue_config.replace(**LONG)) for engine in engines)
        take, held = leaves._intake.take, asyncio.Event()

        async def late(*arguments: Any, **options: Any) -> Any:
            await held.wait()
            return await take(*arguments, **options)

        leaves._intake.take = late  # type: ignore[method-assign]
        leaving = asyncio.create_task(leaves.run())
        await outside.add("late", {**prompt(0), "ttl_ms": 2_000})
        await outside.add("bad", {**prompt(1), "max_tokens": 0})
        await outside.redis.xadd(f"{TAG}:in:1", {"v": "1", "id": "no body"})
        await until(lambda: asyncio.sleep(0, len(leaves._taken) == 3))
        engines[1].has_room = lambda: False  # type: ignore[method-assign]
        serving = asyncio.create_task(full.run())
        await until(lambda: outside.redis.zscore(f"{TAG}:hb", full.owner))
        leaves.stop()
        for name, state, code in (
            ("bad", "rejected", "invalid_request"),
            ("late", "expired", "deadline_exceeded"),
        ):
            done = await outside.done(name, timeout=PATIENCE_S)
            assert (done["state"], done["error"]["code"], done["metrics"]["attempts"]) == (state, code, 0)
        await until(lambda: outside.redis.xlen(f"{TAG}:dlq"))
        held.set()
        del engines[1].has_room  # type: ignore[method-assign]
        engines[1]._room.set()
        full.stop()
        await asyncio.wait_for(asyncio.gather(leaving, serving), PATIENCE_S)
        for engine in engines:
            await engine.stop()
        for stream in range(3):
            assert await outside.redis.xlen(f"{TAG}:in:{stream}") == 0

    play(scenario())


def test_an_engine_that_has_nothing_to_do_leaves_without_waiting_for_its_read(
    play: Callable[..., Any], tiny: EngineConfig, queue_config: QueueConfig, outside: Outside
) -> None:
    async def scenario() -> None:
        engine = await AsyncEngine.create(tiny)
        worker = Worker(engine, queue_config.replace(**LONG))
        task = asyncio.create_task(worker.run())
        await until(lambda: is_waiting(outside, worker))
        worker.stop()
        await asyncio.wait_for(task, PATIENCE_S)
        await engine.stop()
        assert not await outside.engines()

    play(scenario())


def test_an_engine_that_begins_to_leave_says_so_with_a_heartbeat_at_once(
    play: Callable[..., Any],
    tiny: EngineConfig,
    queue_config: QueueConfig,
    outside: Outside,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leases, "BEAT_S", 3600.0)
    config = queue_config.replace(heartbeat_timeout_s=4 * 3600.0)

    async def scenario() -> None:
        engine, stopping = await AsyncEngine.create(tiny), asyncio.Event()
        client = connect_commands(config.redis_url, "leaves")
        lease = Lease(engine, config, Rounds(client), "leaves", stopping)

        async def leaves() -> Any:
            return orjson.loads(await outside.redis.hget(f"{TAG}:engines", "leaves"))["leaving"]

        await lease.renew()
        task = asyncio.create_task(lease.run())
        assert await leaves() is False
        stopping.set()
        await until(leaves)
        task.cancel()
        await asyncio.wait({task})
        await client.aclose()
        await engine.stop()

    play(scenario())


@pytest.mark.parametrize("how", ["the time is over", "at once"])
def test_what_is_given_back_is_taken_by_an_engine_that_waits_in_a_read(
    play: Callable[..., Any], tiny: EngineConfig, queue_config: QueueConfig, outside: Outside, how: str
) -> None:
    config = queue_config.replace(**LONG)

    async def scenario() -> None:
        engines = [await AsyncEngine.create(tiny) for _ in range(2)]
        steps = Steps(engines[0])
        steps.hold_when_begun = True
        drain_s = 0.0 if how == "the time is over" else 120.0
        leaves, heir = Worker(engines[0], config.replace(drain_timeout_s=drain_s)), Worker(engines[1], config)
        leaving = asyncio.create_task(leaves.run())
        await outside.add("runs", {**prompt(0), "max_tokens": 100, "max_attempts": 1})
        await outside.first_delta("runs")
        serving = asyncio.create_task(heir.run())
        await until(lambda: is_waiting(outside, heir))
        if how == "at once":
            leaving.cancel()
        leaves.stop()
        done = await outside.done("runs", timeout=PATIENCE_S)
        assert (done["state"], done["metrics"]["attempts"]) == ("completed", 2)
        assert len(await outside.token_ids("runs")) == 100
        steps.hold_when_begun = False
        steps.go.set()
        heir.stop()
        await asyncio.wait({leaving, serving}, timeout=PATIENCE_S)
        assert leaving.done() and serving.done()
        for engine in engines:
            await engine.stop()
        await outside.assert_nothing_left()

    play(scenario())
