"""What goes wrong around a request: engines that die or stop, a Redis that restarts, forgets or is not there yet."""

from __future__ import annotations

import asyncio
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis.asyncio as aioredis

from pagemill.engine.async_engine import AsyncEngine
from pagemill.engine.errors import EngineDeadError, RequestError
from pagemill.ingest.client import AsyncClient
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.embedded import EmbeddedServer, free_port
from pagemill.ingest.events import Transcript
from pagemill.ingest.worker import Worker
from tests.contract.conftest import ENGINE, STORY, TAG, EngineProcess, Outside, serving
from tests.contract.engine_process import LEASE_S
from tests.contract.test_protocol import check_events


def test_a_killed_engines_request_goes_on_where_it_stopped(
    play: Any,
    engine: AsyncEngine,
    queue_config: QueueConfig,
    engine_processes: dict[str, EngineProcess],
    story: list[int],
) -> None:
    process = engine_processes["killed"]
    config = queue_config.replace(queue=process.queue, heartbeat_timeout_s=LEASE_S)

    async def scenario() -> None:
        outside = Outside(config.redis_url, process.queue)
        await process.serves(outside)
        await outside.add("a", {**STORY, "flush_ms": 0})
        await outside.add("silent", {**STORY, "stream": False})
        await outside.first_delta("a")
        reader = AsyncClient(config)
        result = asyncio.create_task(reader.attach("a").result(timeout=60))
        process.process.send_signal(signal.SIGKILL)
        process.process.wait()
        assert 0 < len(await outside.token_ids("a")) < 24
        async with serving(engine, config):
            assert (await outside.done("a"))["metrics"]["attempts"] == 2
            await outside.done("silent")
            names = await outside.engines()
            consumers = await outside.redis.xinfo_consumers(f"{outside.tag}:in:1", "engines")
        events = await outside.events("a")
        assert [item["attempt"] for item in events if item["type"] == "started"] == [1, 2]
        check_events(events, tokens=24)
        assert await outside.token_ids("a") == await outside.token_ids("silent") == story
        assert (await result).token_ids == story and (await result).text == await outside.text("silent")
        await reader.aclose()
        # The dead consumer is gone; its heartbeat is left to grow old.
        assert len(consumers) == 1 and consumers[0]["name"] in names
        await outside.assert_nothing_left()
        await outside.aclose()

    play(scenario())


async def num_waiting(outside: Outside) -> int:
    """How many engines of this queue wait in a read."""
    engines = {name.decode() for name in await outside.engines()}
    clients = await outside.redis.client_list()
    return sum(
        client["cmd"] == "xreadgroup" and "b" in client["flags"] and client["name"] in engines for client in clients
    )


def test_two_engines_share_a_stream_and_one_leaves(
    play: Any,
    engine: AsyncEngine,
    queue_config: QueueConfig,
    engine_processes: dict[str, EngineProcess],
    story: list[int],
) -> None:
    """Each request runs once, on either; SIGTERM hands over what cannot be finished in time, burning no attempt."""
    process = engine_processes["leaving"]
    config = queue_config.replace(queue=process.queue, heartbeat_timeout_s=LEASE_S)

    async def scenario() -> None:
        outside = Outside(config.redis_url, process.queue)
        await process.serves(outside)
        async with serving(engine, config) as worker:
            # A process that has told its first heartbeat may not read yet, and six are soon done.
            async with asyncio.timeout(60):
                while await num_waiting(outside) < 2:
                    await asyncio.sleep(0.002)
            for number in range(6):
                await outside.add(f"r{number}", {**STORY, "max_tokens": 6, "max_attempts": 1})
            owners = set()
            for number in range(6):
                done = await outside.done(f"r{number}", timeout=60)
                assert done["state"] == "completed" and done["metrics"]["attempts"] == 1
                assert await outside.token_ids(f"r{number}") == story[:6]
                owners.add(await outside.redis.hget(f"{outside.tag}:req:r{number}", "owner"))
            assert len(owners) == 2 and worker.owner.encode() in owners
            # The process finishes for half a second only, which is less than two of its steps: what it still runs then
            # has to be handed over. Each of the two that wait gets at least one.
            async with asyncio.timeout(60):
                while await num_waiting(outside) < 2:
                    await asyncio.sleep(0.002)
            body = {**STORY, "max_tokens": 40, "max_attempts": 1}
            for number in range(4):
                await outside.add(f"s{number}", body)
            for number in range(4):
                await outside.first_delta(f"s{number}")
            process.process.send_signal(signal.SIGTERM)
            attempts = set()
            for number in range(4):
                done = await outside.done(f"s{number}", timeout=60)
                assert done["state"] == "completed"
                attempts.add(done["metrics"]["attempts"])
                assert (await outside.token_ids(f"s{number}"))[:24] == story
            assert attempts == {1, 2}
            assert await asyncio.to_thread(process.process.wait, 60) == 0
            assert await outside.engines() == [worker.owner.encode()]
        await outside.assert_nothing_left()
        await outside.aclose()

    play(scenario())


def test_stopping_finishes_what_runs_and_leaves_the_rest(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside
) -> None:
    async def scenario() -> None:
        body = {**STORY, "max_tokens": 6}
        async with serving(engine, queue_config.replace(drain_timeout_s=60)) as worker:
            await outside.add("running", body)
            await outside.first_delta("running")
            worker.stop()
            for number in range(3):
                await outside.add(f"late{number}", body)
        assert (await outside.done("running"))["metrics"]["attempts"] == 1
        assert await outside.redis.xlen(f"{TAG}:in:1") == 3
        assert not await outside.redis.exists(f"{TAG}:req:late0", f"{TAG}:req:late1", f"{TAG}:req:late2")
        async with serving(engine, queue_config):
            for number in range(3):
                assert (await outside.done(f"late{number}"))["metrics"]["attempts"] == 1
        await outside.assert_nothing_left()

    play(scenario())


def test_poison_is_given_up(play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside) -> None:
    """A request whose engines keep dying ends as failed, with its entry among the dead letters."""

    async def scenario() -> None:
        await outside.add("a", {**STORY, "max_attempts": 2})
        async with serving(engine, queue_config):
            await outside.first_delta("a")
            record = f"{TAG}:req:a"
            await outside.redis.hset(record, mapping={"attempt": 2, "owner": "crashed"})
            await outside.redis.xclaim(
                f"{TAG}:in:1", "engines", "crashed", 0, [await outside.redis.hget(record, "entry")]
            )
            done = await outside.done("a", timeout=60)
        assert (done["state"], done["error"]["code"], done["attempt"]) == ("failed", "poison", 3)
        assert done["usage"]["completion_tokens"] == len(await outside.token_ids("a")) > 0
        ((_, letter),) = await outside.redis.xrange(f"{TAG}:dlq")
        assert letter[b"reason"] == b"poison" and letter[b"attempts"] == b"3" and b"body" in letter
        await outside.assert_nothing_left()

    play(scenario())


def test_an_engine_that_was_taken_over_stops_working(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside
) -> None:
    async def scenario() -> None:
        async with serving(engine, queue_config) as worker:
            for body in ({**STORY, "max_tokens": 300}, {**STORY, "max_tokens": 300, "stream": False}):
                name = f"stream-{body.get('stream', True)}"
                await outside.add(name, body)
                async with asyncio.timeout(60):
                    while not worker.num_live or not await outside.events(name):
                        await asyncio.sleep(0.01)
                # What the scripts `adopt` and `begin` of an engine that lives do.
                record = f"{TAG}:req:{name}"
                await outside.redis.zadd(f"{TAG}:hb", {"other": 1 << 45})
                await outside.redis.xclaim(
                    f"{TAG}:in:1", "engines", "other", 0, [await outside.redis.hget(record, "entry")]
                )
                await outside.redis.hset(record, mapping={"attempt": 2, "owner": "other"})
                async with asyncio.timeout(60):
                    while worker.num_live or engine.num_live:
                        await asyncio.sleep(0.01)
                assert (await outside.events(name))[-1]["type"] != "done"

    play(scenario())


def test_an_entry_that_came_back_while_it_was_still_known_is_not_forgotten(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside, story: list[int]
) -> None:
    """Another engine took a request over and died, and this one adopted it before it had noticed any of that."""

    async def scenario() -> None:
        async with serving(engine, queue_config):
            await outside.add("a", {**STORY, "flush_ms": 0})
            await outside.first_delta("a")
            await outside.redis.hset(f"{TAG}:req:a", mapping={"attempt": 2, "owner": "died"})
            done = await outside.done("a", timeout=60)
        assert (done["state"], done["metrics"]["attempts"]) == ("completed", 3)
        assert await outside.token_ids("a") == story
        await outside.assert_nothing_left()

    play(scenario())


def test_everything_deleted_under_a_running_engine(play: Any, engine: AsyncEngine, any_redis_url: str) -> None:
    """A blocked reader is told `UNBLOCKED` by Redis 7.0 and `NOGROUP` by later servers."""
    config = QueueConfig(redis_url=any_redis_url, block_ms=500, poll_ms=50)

    async def scenario() -> None:
        outside = Outside(any_redis_url)
        async with serving(engine, config) as worker, AsyncClient(config, watchdog_s=0.3) as client:
            handle = await client.submit(**STORY | {"max_tokens": 300})
            await outside.first_delta(handle.id)
            await outside.redis.flushall()
            with pytest.raises(RequestError, match=r"record is gone|missing"):
                await handle.result(timeout=60)
            await outside.add("after", {**STORY, "max_tokens": 2})
            assert (await outside.done("after", timeout=60))["state"] == "completed"
            async with asyncio.timeout(60):
                while worker.num_live:
                    await asyncio.sleep(0.01)
            # A group deleted on its own is made again as well, and finds what is unfinished.
            await outside.redis.xgroup_destroy(f"{TAG}:in:1", "engines")
            await outside.add("again", {**STORY, "max_tokens": 2})
            assert (await outside.done("again", timeout=60))["state"] == "completed"
        await outside.assert_nothing_left()
        await outside.aclose()

    play(scenario())


def test_several_shards(play: Any, engine: AsyncEngine, queue_config: QueueConfig) -> None:
    config = queue_config.replace(shards=3)

    async def scenario() -> None:
        async with serving(engine, config), AsyncClient(config) as client:
            handles = [await client.submit(**STORY | {"max_tokens": 2}) for _ in range(8)]
            assert len({client.keys.shard_number(handle.id) for handle in handles}) > 1
            texts = {(await handle.result(timeout=60)).text for handle in handles}
            assert len(texts) == 1
            # An entry where no reader of its id would look.
            misplaced = Outside(config.redis_url)
            wrong = next(name for name in "abcdef" if client.keys.shard_number(name) != 0)
            await misplaced.add(wrong, STORY)
            async with asyncio.timeout(60):
                while not await misplaced.redis.xlen(f"{TAG}:dlq"):
                    await asyncio.sleep(0.01)
            ((_, letter),) = await misplaced.redis.xrange(f"{TAG}:dlq")
            assert letter[b"reason"] == b"wrong_shard"
        for shard in range(3):
            misplaced.tag = f"pm:{{default.{shard}}}"
            await misplaced.assert_nothing_left()
        await misplaced.aclose()

    play(scenario())


def test_a_cancelled_worker_gives_back_what_runs(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside, story: list[int]
) -> None:
    async def scenario() -> None:
        worker = Worker(engine, queue_config)
        task = asyncio.create_task(worker.run())
        await outside.add("a", {**STORY, "max_attempts": 1})
        await outside.first_delta("a")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await outside.redis.hget(f"{TAG}:req:a", "state") == b"queued"
        assert not await outside.engines()
        async with serving(engine, queue_config):
            assert (await outside.done("a"))["metrics"]["attempts"] == 2
        assert await outside.token_ids("a") == story

    play(scenario())


SAMPLED: dict[str, Any] = {**STORY, "temperature": 1.0, "seed": 5, "flush_ms": 0, "max_tokens": 40}


@pytest.mark.parametrize("differs", [False, True])
def test_a_stream_that_lost_its_end_is_written_anew_with_a_rewind_where_it_differs(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside, differs: bool
) -> None:
    """The engine is gone as well; another one goes on from the events that are left."""

    async def scenario() -> None:
        worker = Worker(engine, queue_config)
        task = asyncio.create_task(worker.run())
        await outside.add("a", SAMPLED)
        async with asyncio.timeout(60):
            while len(await outside.events("a")) < 9:
                await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        before = await outside.events("a")
        await outside.redis.xdel(f"{TAG}:ev:a", *(f"{item['seq']}-0" for item in before[4:]))
        kept = sum(item["count"] for item in before[:4] if item["type"] == "delta")
        if differs:
            await outside.redis.hset(f"{TAG}:req:a", "seed", 6)
        async with serving(engine, queue_config), AsyncClient(queue_config) as client:
            await outside.done("a")
            events = await outside.events("a")
            assert [item["seq"] for item in events] == list(range(1, len(events) + 1)) and events[:4] == before[:4]
            rewinds = [item for item in events if item["type"] == "rewind"]
            assert [(item["index"], item["to_offset"]) for item in rewinds] == ([(0, kept)] if differs else [])
            ids = await outside.token_ids("a")
            first = [token for item in before if item["type"] == "delta" for token in item["token_ids"]]
            assert len(ids) == 40 and (ids[: len(first)] != first) == differs
            # Whoever comes now was told nothing that is not true.
            assert [token async for delta in client.attach("a") for token in delta.token_ids] == ids
        await outside.assert_nothing_left()

    play(scenario())


def test_a_reader_outlives_a_redis_that_went_back_in_time(play: Any, engine: AsyncEngine, tmp_path: Path) -> None:
    """Restarted with an older append-only file, and with an engine that generates other tokens than were told."""

    async def scenario() -> None:
        server = EmbeddedServer(tmp_path / "data", port=free_port(), arguments=("--appendfsync", "always"))
        await asyncio.to_thread(server.start)
        config = QueueConfig(redis_url=server.url, block_ms=100, poll_ms=50, heartbeat_timeout_s=1.0)
        seen: list[Any] = []

        async def read(client: AsyncClient) -> None:
            async for event in client.attach("a").events():
                seen.append(event)

        async def reach(count: int) -> None:
            async with asyncio.timeout(60):
                while len(seen) < count:
                    await asyncio.sleep(0.005)

        try:
            async with AsyncClient(config, watchdog_s=0.3) as client:
                task = asyncio.create_task(Worker(engine, config).run())
                await client.submit(**SAMPLED, id="a")
                reading = asyncio.create_task(read(client))
                await reach(5)
                await asyncio.to_thread(shutil.copytree, tmp_path / "data", tmp_path / "old")
                await reach(12)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(shutil.rmtree, tmp_path / "data")
                await asyncio.to_thread(shutil.copytree, tmp_path / "old", tmp_path / "data")
                await asyncio.to_thread(server.start)
                async with aioredis.Redis.from_url(server.url) as plain:
                    await plain.hset(f"{TAG}:req:a", "seed", 6)
                async with serving(engine, config):
                    async with asyncio.timeout(60):
                        await reading
            transcript = Transcript.of(seen)
            assert transcript.done is not None and transcript.done["state"] == "completed"
            assert any(item["type"] == "rewind" for item in seen)
            async with aioredis.Redis.from_url(server.url) as plain:
                (choice,) = orjson.loads(await plain.hget(f"{TAG}:req:a", "result"))
            assert transcript.choice(0).token_ids == choice["token_ids"] and len(choice["token_ids"]) == 40
            assert transcript.choice(0).text == choice["text"]
        finally:
            server.stop()

    play(scenario())


def test_keys_of_another_type_harm_only_their_request(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside
) -> None:
    async def scenario() -> None:
        await outside.redis.set(f"{TAG}:req:a", "a string", ex=60)
        async with serving(engine, queue_config):
            await outside.add("a", STORY)
            await outside.add("b", {**STORY, "max_tokens": 2})
            assert (await outside.done("b"))["state"] == "completed"
            async with asyncio.timeout(60):
                while not await outside.redis.xlen(f"{TAG}:dlq"):
                    await asyncio.sleep(0.01)
            ((_, letter),) = await outside.redis.xrange(f"{TAG}:dlq")
            assert letter[b"reason"] == b"refused" and b"WRONGTYPE" in letter[b"error"]
        await outside.assert_nothing_left()

    play(scenario())


def test_a_redis_that_comes_late_and_restarts(play: Any, engine: AsyncEngine, tmp_path: Path, story: list[int]) -> None:
    """The engine waits for Redis; a kill -9 of Redis mid-generation loses nothing, on either side."""

    async def scenario() -> None:
        server = EmbeddedServer(tmp_path, port=free_port())
        config = QueueConfig(redis_url=server.url, block_ms=100, heartbeat_timeout_s=5)
        worker = Worker(engine, config)
        task = asyncio.create_task(worker.run())
        await asyncio.sleep(0.3)
        assert not worker.ready.is_set() and not task.done()
        try:
            await asyncio.to_thread(server.start)
            async with AsyncClient(config, watchdog_s=1) as client:
                handle = await client.submit(**STORY, flush_ms=0)
                seen = []
                async for delta in handle:
                    seen.append(delta)
                    if len(seen) == 5:
                        await asyncio.to_thread(server.kill)
                        await asyncio.to_thread(server.start)
                assert [token for delta in seen for token in delta.token_ids] == story
                assert "".join(delta.text for delta in seen) == (await handle.result()).text
                assert (await handle.result()).metrics["attempts"] == 1
            worker.stop()
            await task
            async with aioredis.Redis.from_url(server.url) as client:
                assert await client.xlen(f"{TAG}:in:1") == 0
        finally:
            server.stop()

    play(scenario())


def test_an_engine_stops_while_redis_is_away(play: Any, engine: AsyncEngine, refusing_url: str) -> None:
    async def scenario() -> None:
        never = Worker(engine, QueueConfig(redis_url=refusing_url))
        task = asyncio.create_task(never.run())
        await asyncio.sleep(0.1)
        never.stop()
        async with asyncio.timeout(60):
            await task

        server = EmbeddedServer()
        await asyncio.to_thread(server.start)
        outside = Outside(server.url)
        worker = Worker(engine, QueueConfig(redis_url=server.url, block_ms=100, drain_timeout_s=0.5))
        task = asyncio.create_task(worker.run())
        await outside.add("a", {**STORY, "max_tokens": 300})
        await outside.first_delta("a")
        await outside.aclose()
        await asyncio.to_thread(server.stop)
        worker.stop()
        async with asyncio.timeout(60):
            await task
        async with asyncio.timeout(60):
            while engine.num_live:
                await asyncio.sleep(0.01)

    play(scenario())


def test_the_death_of_an_engine_ends_its_worker_and_loses_nothing(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside, story: list[int]
) -> None:
    """A device error: `run` raises, and the next engine goes on with the tokens that are out."""

    async def scenario() -> None:
        dying = await AsyncEngine.create(ENGINE)
        step = dying._parts.core.step

        def failing_step() -> Any:
            if tokens_out.is_set():
                raise RuntimeError("the device is gone")
            return step()

        tokens_out = threading.Event()
        dying._parts.core.step = failing_step  # type: ignore[method-assign]
        await outside.add("a", {**STORY, "flush_ms": 0})
        serving_task = asyncio.create_task(Worker(dying, queue_config).run())
        await outside.first_delta("a")
        tokens_out.set()
        with pytest.raises(EngineDeadError, match="device is gone"):
            await serving_task
        await dying.stop()
        assert not await outside.engines()
        assert await outside.redis.xlen(f"{TAG}:in:1") == 1
        async with serving(engine, queue_config):
            assert (await outside.done("a"))["metrics"]["attempts"] == 2
        assert await outside.token_ids("a") == story
        await outside.assert_nothing_left()

    play(scenario())
