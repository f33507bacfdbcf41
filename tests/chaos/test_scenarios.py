"""Failures one at a time, on engines that are processes of their own: what `make chaos` mixes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from pagemill.engine.errors import RequestError
from pagemill.ingest.client import AsyncClient, RequestFailed
from tests.chaos.checking import check_nothing_left
from tests.chaos.engine_host import DEADLY
from tests.chaos.engines import EngineHost
from tests.chaos.model import make_model
from tests.chaos.reading import plain_client

TAG = "pm:{default.0}"
STREAM = (f"{TAG}:in:1", "engines")
SETTINGS = {"heartbeat_timeout_s": 2.5, "block_ms": 100, "poll_ms": 50, "drain_timeout_s": 1.0}
# Waits of the engines that are longer than a test has patience, so that an answer says that nobody waited for them.
PATIENCE_S = 40
LONG_WAITS = {"heartbeat_timeout_s": 120.0, "block_ms": 60_000, "drain_timeout_s": 120.0}
PROMPT: dict[str, Any] = {"prompt": "the stream", "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def module_host(loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHost]:
    folder = tmp_path_factory.mktemp("engines")
    made = EngineHost(make_model(folder / "model"), folder, SETTINGS)
    loop.run(made.__aenter__())
    yield made
    loop.run(made.__aexit__())


@pytest.fixture
def host(loop: asyncio.Runner, module_host: EngineHost) -> Iterator[EngineHost]:
    """No engine yet; those that a test starts end with it."""
    yield module_host

    async def end() -> None:
        for engine in module_host.alive:
            engine.thaw()
            engine.kill()
            await engine.ended.wait()

    loop.run(end())


@pytest.fixture
def play(loop: asyncio.Runner) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    return loop.run


async def first_token(client: AsyncClient, request_id: str) -> None:
    async for _ in client.attach(request_id):
        return


def test_a_server_that_forgets_everything_is_served_again_at_once(
    play: Any, host: EngineHost, any_redis_url: str
) -> None:
    """Within a second, as `make bench-recovery` tells. Here: long before a blocking read or a lease has run out."""

    async def scenario() -> None:
        async with AsyncClient(any_redis_url, watchdog_s=0.3) as client, plain_client(any_redis_url) as redis:
            for _ in range(2):
                await host.start(redis_url=any_redis_url, device_ms=100, **LONG_WAITS)
            long = await client.submit(**PROMPT, max_tokens=200)
            await first_token(client, long.id)
            await redis.flushall()
            after = await client.submit(**PROMPT, max_tokens=2)
            assert (await after.result(timeout=PATIENCE_S)).state == "completed"
            with pytest.raises(RequestError) as lost:
                await long.result(timeout=60)
            assert lost.value.code == "request_lost"
            async with asyncio.timeout(60):
                while await redis.xlen(f"{TAG}:in:1"):
                    await asyncio.sleep(0.01)
            await check_nothing_left(redis, TAG)

    play(scenario())


def test_a_stream_that_is_deleted_all_the_time_does_not_fill_the_log(
    play: Any, host: EngineHost, any_redis_url: str
) -> None:
    """At most one line a second, whatever happens: ten in ten seconds."""

    async def scenario() -> None:
        async with AsyncClient(any_redis_url) as client, plain_client(any_redis_url) as redis:
            # A lease that no pause of the machine can end: that would be told as well.
            engine = await host.start(redis_url=any_redis_url, heartbeat_timeout_s=120.0)
            await (await client.submit(**PROMPT, max_tokens=1)).result(timeout=60)
            log = host.log_of(engine)
            before = len(log.read_text().splitlines())
            began, deleted = asyncio.get_running_loop().time(), 0
            while deleted <= 30 or asyncio.get_running_loop().time() < began + 3:
                deleted += await redis.delete(f"{TAG}:in:0", f"{TAG}:in:1", f"{TAG}:in:2")
                await asyncio.sleep(0.02)
            told = log.read_text().splitlines()[before:]
            assert 1 <= len(told) <= asyncio.get_running_loop().time() - began, told
            await (await client.submit(**PROMPT, max_tokens=1)).result(timeout=60)

    play(scenario())


@pytest.mark.parametrize("how", ["killed", "frozen", "leaves"])
def test_nothing_waits_for_the_engine_that_has_its_beginning_when_that_is_away(
    play: Any, host: EngineHost, redis_url: str, how: str
) -> None:
    """While its heartbeat is fresh it is offered what it could do best; a moment later the others do it. How long that
    is, `make bench-recovery` tells; here the heartbeat stays fresh, so who waits for it waits for ever."""
    prefix = [3 + place % 90 for place in range(128)]

    def body(number: int) -> dict[str, Any]:
        return {"prompt_token_ids": [*prefix, 100 + number], "max_tokens": 2, "temperature": 0, "ignore_eos": True}

    async def keep_fresh(redis: Any, owner: str) -> None:
        """However long it takes, nobody is served because a heartbeat has grown old."""
        while True:
            seconds, _ = await redis.time()
            await redis.zadd(f"{TAG}:hb", {owner: seconds * 1000 + 999}, xx=True)
            await asyncio.sleep(0.2)

    async def scenario() -> None:
        settings = {"redis_url": redis_url, "heartbeat_timeout_s": 120.0, "drain_timeout_s": 120.0}
        async with AsyncClient(redis_url) as client, plain_client(redis_url) as redis:
            has = await host.start(**settings)
            first = await client.submit(**body(0))
            await first.result(timeout=60)
            owner = (await redis.hget(f"{TAG}:req:{first.id}", "owner")).decode()
            await host.start(**settings)
            async with asyncio.timeout(60):
                while await redis.zcard(f"{TAG}:hb") < 2 or not await redis.exists(f"{TAG}:warm:{owner}"):
                    await asyncio.sleep(0.01)
            # Who leaves says so in the place of its heartbeat.
            fresh = asyncio.create_task(keep_fresh(redis, owner) if how != "leaves" else asyncio.sleep(0))
            {"killed": has.kill, "frozen": has.freeze, "leaves": has.terminate}[how]()
            if how == "killed":
                async with asyncio.timeout(60):
                    while any(info["name"] == owner for info in await redis.client_list()):
                        await asyncio.sleep(0.01)
            handles = [await client.submit(**body(number)) for number in range(10, 26)]
            # The read that it was waiting in brings a frozen engine one that nobody else sees; it goes on with that.
            # One that leaves may be brought more until it has heard of it, and they are no later than the others.
            stuck = {
                item["message_id"] for item in await redis.xpending_range(*STREAM, "-", "+", 9, consumername=owner)
            }
            late = [h for h in handles if await redis.hget(f"{TAG}:req:{h.id}", "entry") in stuck]
            if how == "leaves":
                late = []
            assert len(late) <= (0 if how == "killed" else 1)
            async with asyncio.timeout(60):
                for handle in handles:
                    if handle not in late:
                        assert (await handle.result()).metrics["attempts"] == 1
            if how != "leaves":
                assert await redis.xlen(f"{TAG}:to:{owner}"), "nothing was offered to the one that is away"
            fresh.cancel()
            has.thaw()
            for handle in late:
                assert (await handle.result(timeout=60)).metrics["attempts"] == 1
            async with asyncio.timeout(60):
                while await redis.xlen(STREAM[0]):
                    await asyncio.sleep(0.01)
            await check_nothing_left(redis, TAG)

    play(scenario())


def test_a_generation_of_five_leases_runs_once(play: Any, host: EngineHost, redis_url: str) -> None:
    async def scenario() -> None:
        async with AsyncClient(redis_url) as client:
            for _ in range(2):
                await host.start(redis_url=redis_url, device_ms=65)
            result = await (await client.submit(**PROMPT, max_tokens=200, max_attempts=1)).result(timeout=60)
            assert result.metrics["total_ms"] > 5000 * SETTINGS["heartbeat_timeout_s"]
            assert result.metrics["attempts"] == 1 and len(result.token_ids) == 200

    play(scenario())


def test_64_in_flight_on_a_killed_engine_finish_on_another(play: Any, host: EngineHost, redis_url: str) -> None:
    async def scenario() -> None:
        async with AsyncClient(redis_url) as client, plain_client(redis_url) as redis:
            doomed = await host.start(redis_url=redis_url, device_ms=1000)  # dead long before it could end any
            handles = [await client.submit(**PROMPT, max_tokens=20, seed=number) for number in range(64)]
            await first_token(client, handles[0].id)
            doomed.kill()
            await host.start(redis_url=redis_url)
            results = await asyncio.gather(*(handle.result(timeout=60) for handle in handles))
            assert {tuple(result.token_ids) for result in results} == {tuple(results[0].token_ids)}
            assert max(result.metrics["attempts"] for result in results) == 2
            await check_nothing_left(redis, TAG)

    play(scenario())


def test_a_request_that_kills_its_engine_ends_and_its_neighbours_complete(
    play: Any, host: EngineHost, redis_url: str
) -> None:
    async def keep_one_alive(deaths: list[int]) -> None:
        while True:
            engine = await host.start(redis_url=redis_url, device_ms=5)
            await engine.ended.wait()
            deaths.append(engine.pid)

    async def scenario() -> None:
        async with AsyncClient(redis_url) as client, plain_client(redis_url) as redis:
            deaths: list[int] = []
            keepers = [asyncio.create_task(keep_one_alive(deaths)) for _ in range(2)]
            body = {**PROMPT, "max_tokens": 150}
            before = [await client.submit(**body, seed=number, max_attempts=3) for number in range(4)]
            deadly = await client.submit(prompt_token_ids=[*DEADLY, 9], max_tokens=4, max_attempts=3)
            behind = [await client.submit(**body, seed=number, max_attempts=3) for number in range(4)]
            with pytest.raises(RequestFailed) as failed:
                await deadly.result(timeout=60)
            assert failed.value.code == "poison"
            results = await asyncio.gather(*(handle.result(timeout=60) for handle in before + behind))
            assert {len(result.token_ids) for result in results} == {150}
            assert len(deaths) == 3
            for keeper in keepers:
                keeper.cancel()
            letters = await redis.xrange(f"{TAG}:dlq")
            assert [fields[b"id"] for _, fields in letters] == [deadly.id.encode()]
            await check_nothing_left(redis, TAG)

    play(scenario())
