"""Reading without a gap, against a real Valkey; the events come from the scripts that an engine uses."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
import pytest
from redis.exceptions import ResponseError

from pagemill.engine.errors import RequestError
from pagemill.ingest import scripts
from pagemill.ingest.client import AsyncClient, Client, QueueUnavailableError, RequestFailed
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.entries import Entry
from pagemill.ingest.events import NO_CHAIN, event, extend_chain
from pagemill.ingest.keys import GROUP, QueueKeys
from pagemill.ingest.redis import connect_commands
from pagemill.ingest.subscription import SHEAF

Run = Callable[[Coroutine[Any, Any, Any]], Any]


class Producer:
    """Owns one request and publishes `count` one-token deltas and the end of it."""

    def __init__(self, config: QueueConfig, request_id: str) -> None:
        self.redis = connect_commands(config.redis_url, "producer")
        self.shard = QueueKeys(config.key_prefix, config.queue).shard_of(request_id)
        self.request_id = request_id
        self.seq = 0
        self.chain = NO_CHAIN
        self.attempt = 1
        self.entry: Entry | None = None

    async def begin(self) -> None:
        stream = self.shard.streams[1]
        if not await self.redis.exists(self.shard.record(self.request_id)):
            await self.redis.xadd(stream, {"v": 1, "id": self.request_id, "body": "{}"})
        with contextlib.suppress(ResponseError):  # the group is there
            await self.redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
        reply: Any = await self.redis.xreadgroup(GROUP, "e1", {stream: ">"}, count=1)
        ((_, ((entry_id, fields),)),) = reply
        self.entry = Entry(self.shard, 1, entry_id, fields)
        call = scripts.begin(self.entry, "e1", self.request_id, ttl_ms=60_000, tenant="default", seed=1)
        assert (await scripts.run_one(self.redis, call))[0] == b"ok"

    async def delta(self, text: str | None = None, token_id: int | None = None) -> None:
        self.seq += 1
        token_id = self.seq if token_id is None else token_id
        self.chain = extend_chain(self.chain, [token_id])
        fields = {"index": 0, "offset": self.seq - 1, "count": 1, "token_ids": [token_id]}
        fields |= {"text": f"{self.seq} " if text is None else text, "text_offset": 0, "logprobs": None}
        data = event(self.seq, self.attempt, "delta", **fields, chain=self.chain)
        call = scripts.append(self.shard, self.request_id, "e1", self.attempt, self.seq - 1, [data])
        assert (await scripts.run_one(self.redis, call)).startswith(b"ok")

    async def done(self, state: str = "completed", **fields: Any) -> None:
        assert self.entry is not None
        tokens = list(range(1, self.seq + 1))
        text = "".join(f"{token} " for token in tokens)
        choice = {"index": 0, "text": text, "token_ids": tokens, "finish_reason": "stop", "stop_reason": None}
        ends = [
            event(self.seq + 1, self.attempt, "choice", index=0, finish_reason="stop", stop_reason=None),
            event(
                self.seq + 2,
                self.attempt,
                "done",
                state=state,
                usage={"completion_tokens": self.seq},
                metrics={},
                **fields,
            ),
        ]
        call = scripts.finish(
            self.entry,
            self.request_id,
            "e1",
            self.attempt,
            self.seq,
            ends,
            state=state,
            result=orjson.dumps([choice]),
            usage=orjson.dumps({"completion_tokens": self.seq}),
            metrics=b"{}",
            error=orjson.dumps(fields["error"]) if "error" in fields else b"",
            num_tokens=self.seq,
            result_ttl_ms=3_600_000,
            replay_ttl_ms=600_000,
        )
        assert (await scripts.run_one(self.redis, call)).startswith(b"ok")

    async def aclose(self) -> None:
        await self.redis.aclose()


def expected_text(count: int) -> str:
    return "".join(f"{number} " for number in range(1, count + 1))


def test_early_late_and_restarting_readers_see_the_same(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        producer = Producer(queue_config, "a")
        async with AsyncClient(queue_config) as client, AsyncClient(queue_config) as other:
            handle = client.attach("a")
            early = asyncio.create_task(handle.result(timeout=60))
            await producer.begin()
            for _ in range(20):
                await producer.delta()
            middle = asyncio.create_task(other.attach("a").result(timeout=60))

            async def restarting() -> list[int]:
                seen: list[int] = []
                while True:
                    async for item in other.attach("a").events(after=seen[-1] if seen else 0):
                        seen.append(item["seq"])
                        if item["type"] == "done":
                            return seen
                        if len(seen) % 7 == 0:
                            break

            restarted = asyncio.create_task(restarting())
            for _ in range(20):
                await producer.delta()
            await producer.done()
            results = [await early, await middle, await other.attach("a").result(timeout=60)]
            assert [result.text for result in results] == [expected_text(40)] * 3
            assert results[0].token_ids == list(range(1, 41)) and results[0].finish_reason == "stop"
            assert await restarted == list(range(1, 43))
            # The handle keeps the result, and iterating starts again at the first token.
            assert [delta.seq async for delta in handle] == list(range(1, 41))
        await producer.aclose()

    run(scenario())


def test_losing_live_messages_costs_nothing_but_time(
    queue_config: QueueConfig, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagemill.ingest.subscription import Subscription

    lossy = random.Random(1)
    deliver = Subscription.deliver
    lost = 0

    def drop_some(self: Subscription, seq: int, data: bytes) -> None:
        nonlocal lost
        if lossy.random() < 0.4 or seq == 102:  # `done` among them
            lost += 1
        else:
            deliver(self, seq, data)

    monkeypatch.setattr(Subscription, "deliver", drop_some)

    async def scenario() -> None:
        producer = Producer(queue_config, "a")
        async with AsyncClient(queue_config, watchdog_s=0.2) as client:
            reader = asyncio.create_task(client.attach("a").result(timeout=60))
            await producer.begin()
            for _ in range(100):
                await producer.delta()
            await producer.done()
            assert (await reader).text == expected_text(100)
        assert lost > 20
        await producer.aclose()

    run(scenario())


def test_who_waits_for_the_end_is_not_woken_for_what_comes_before(queue_config: QueueConfig, run: Run) -> None:
    """It takes a sheaf at a time; what lies there for as long as a silence may last it takes as well."""

    async def scenario() -> None:
        async with (
            AsyncClient(queue_config, watchdog_s=600.0) as patient,
            AsyncClient(queue_config, watchdog_s=0.2) as hasty,
            AsyncClient(queue_config) as iterates,
        ):
            handle = await patient.submit(prompt="x")
            waiting = [asyncio.create_task(client.attach(handle.id).result()) for client in (patient, hasty)]
            taken = asyncio.create_task(collect(iterates.attach(handle.id).events()))
            (held, soon) = [await follower(client) for client in (patient, hasty)]
            producer = Producer(queue_config, handle.id)
            await producer.begin()
            for _ in range(SHEAF - 1):
                await producer.delta()
            async with asyncio.timeout(60):
                while len(held._buffer) < SHEAF - 1 or soon._last < SHEAF - 1:
                    await asyncio.sleep(0.005)
            assert held._last == 0
            await producer.delta()
            async with asyncio.timeout(60):
                while held._last < SHEAF:
                    await asyncio.sleep(0.005)
            await producer.delta()
            async with asyncio.timeout(60):
                while len(held._buffer) < 1:
                    await asyncio.sleep(0.005)
            await producer.done()
            for result in await asyncio.gather(*waiting):
                assert result.text == expected_text(SHEAF + 1)
            assert [item["seq"] for item in await taken] == list(range(1, SHEAF + 4))
            await producer.aclose()

    run(scenario())


async def follower(client: AsyncClient) -> Any:
    """A client's only subscription, once it waits for what comes live."""
    async with asyncio.timeout(60):
        while True:
            for feed in client._hub._feeds.values():
                for subscription in feed.followers():
                    if subscription._overdue_at < float("inf"):
                        return subscription
            await asyncio.sleep(0.005)


async def collect(items: Any) -> list[Any]:
    return [item async for item in items]


def test_a_hole_in_the_live_messages_is_filled_at_once(
    queue_config: QueueConfig, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagemill.ingest.subscription import Subscription

    deliver = Subscription.deliver

    def drop_some(self: Subscription, seq: int, data: bytes) -> None:
        if seq not in (3, 4, 8):
            deliver(self, seq, data)

    monkeypatch.setattr(Subscription, "deliver", drop_some)

    async def scenario() -> None:
        producer = Producer(queue_config, "a")
        async with AsyncClient(queue_config, watchdog_s=600) as client:  # silence is not what brings them
            await producer.begin()
            await producer.delta()
            seen = []
            async with asyncio.timeout(60):
                async for item in client.attach("a").events():
                    seen.append(item["seq"])
                    if item["seq"] == 1:
                        for _ in range(9):
                            await producer.delta()
                        await producer.done()
            assert seen == list(range(1, 13))
        await producer.aclose()

    run(scenario())


def test_a_slow_reader_falls_back_to_the_stream(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        producer = Producer(queue_config, "a")
        await producer.begin()
        await producer.delta()
        async with AsyncClient(queue_config) as client:
            seen = []
            async for item in client.attach("a").events():
                seen.append(item["seq"])
                if item["seq"] == 1:
                    for _ in range(1000):  # more than a reader's buffer holds
                        await producer.delta("x")
                    await producer.done()
            assert seen == list(range(1, 1004))
        await producer.aclose()

    run(scenario())


def test_the_subscription_connection_may_break(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        producer = Producer(queue_config, "a")
        await producer.begin()
        await producer.delta()
        seen = []
        # The watchdog is slow here: only the reconnection itself can bring what was missed.
        async with AsyncClient(queue_config, watchdog_s=600) as client, asyncio.timeout(60):
            async for item in client.attach("a").events():
                seen.append(item["seq"])
                if item["seq"] in (1, 11):
                    assert await producer.redis.client_kill_filter(_type="pubsub") == 1
                if item["seq"] in (1, 11, 21):
                    for _ in range(10):
                        await producer.delta()
                if item["seq"] == 31:
                    await producer.done()
        assert seen == list(range(1, 34))
        await producer.aclose()

    run(scenario())


def test_many_requests_share_one_subscription_connection(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        producers = [Producer(queue_config, f"r{number}") for number in range(20)]
        async with AsyncClient(queue_config) as client:
            readers = [asyncio.create_task(client.attach(p.request_id).result(timeout=60)) for p in producers]
            twin = asyncio.create_task(client.attach("r0").result(timeout=60))
            for producer in producers:
                await producer.begin()
            for _ in range(10):
                await asyncio.gather(*(producer.delta() for producer in producers))
            connections = await producers[0].redis.client_list(_type="pubsub")
            assert len(connections) == 1 and int(connections[0]["sub"]) == 20
            await asyncio.gather(*(producer.done() for producer in producers))
            assert {(await reader).text for reader in readers} == {expected_text(10)}
            assert (await twin).text == expected_text(10)
            async with asyncio.timeout(60):  # nothing is followed any more
                while await producers[0].redis.client_list(_type="pubsub"):
                    await asyncio.sleep(0.01)
        for producer in producers:
            await producer.aclose()

    run(scenario())


def test_requests_that_vanish_are_reported(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        producer = Producer(queue_config, "a")
        async with AsyncClient(queue_config, watchdog_s=0.1, patience_s=0.2) as client:
            with pytest.raises(RequestError) as caught:
                await client.attach("nobody").result(timeout=60)
            assert caught.value.code == "request_lost"

            handle = await client.submit(prompt="x", id="a")
            reader = asyncio.create_task(handle.result(timeout=60))
            await producer.begin()
            await producer.delta()
            await producer.redis.flushall()
            with pytest.raises(RequestError) as caught:
                await reader
            assert caught.value.code == "request_lost"

            # A request that waits in the queue is not lost, however long it waits.
            waiting = await client.submit(prompt="x")
            with pytest.raises(TimeoutError):
                await waiting.result(timeout=0.6)
        await producer.aclose()

    run(scenario())


def test_a_result_outlives_its_events(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        producer = Producer(queue_config, "a")
        await producer.begin()
        for _ in range(5):
            await producer.delta()
        await producer.done()
        await producer.redis.delete(producer.shard.events("a"))
        async with AsyncClient(queue_config) as client:
            result = await client.attach("a").result(timeout=60)
            assert (result.text, result.state) == (expected_text(5), "completed")
            with pytest.raises(RequestError) as caught:
                async for _ in client.attach("a").events(after=3):
                    pass
            assert caught.value.code == "request_lost"
        await producer.aclose()

    run(scenario())


def test_what_does_not_complete_raises(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        producer = Producer(queue_config, "a")
        await producer.begin()
        await producer.delta()
        await producer.done("failed", error={"code": "engine_error", "message": "boom", "param": None})
        async with AsyncClient(queue_config) as client:
            handle = client.attach("a")
            with pytest.raises(RequestFailed, match="boom") as caught:
                async for delta in handle:
                    assert delta.text == "1 "
            assert caught.value.code == "engine_error" and caught.value.result.text == "1 "
            with pytest.raises(RequestFailed):
                await handle.result()
        await producer.aclose()

    run(scenario())


def test_submitting(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        async with AsyncClient(queue_config) as client:
            shard = client.keys.shards[0]
            redis = connect_commands(queue_config.redis_url, "test")
            handle = await client.submit(prompt="x", max_tokens=3, priority=0, idempotency_key="k", ttl_ms=5000)
            ((_, fields),) = await redis.xrange(shard.streams[0])  # type: ignore[misc]
            assert fields[b"v"] == b"1" and fields[b"id"].decode() == handle.id
            body = {"prompt": "x", "max_tokens": 3, "priority": 0, "ttl_ms": 5000, "idempotency_key": "k"}
            assert orjson.loads(fields[b"body"]) == body
            again = await client.submit(idempotency_key="k", ttl_ms=5000, priority=0, max_tokens=3, prompt="x")
            assert (again.id, again.replayed, handle.replayed) == (handle.id, True, False)
            with pytest.raises(RequestError) as caught:
                await client.submit(prompt="y", idempotency_key="k")
            assert caught.value.code == "idempotency_conflict"
            await client.submit({"prompt_token_ids": [1, 2]}, id="mine")
            with pytest.raises(RequestError) as caught:
                await client.submit(prompt="x", id="mine")
            assert caught.value.code == "duplicate_id"
            long = await client.submit(prompt="x" * 100_000)
            assert await redis.strlen(shard.blob(long.id)) > 100_000
            assert b"body" not in (await redis.xrange(shard.streams[1]))[1][1]  # type: ignore[index,operator]
            assert await client.cancel(long.id) == "cancelled"
            with pytest.raises(RequestFailed) as failed:
                await long.result(timeout=60)
            assert failed.value.code == "cancelled"
            await redis.aclose()

    run(scenario())


def test_bad_requests_are_refused_before_they_are_sent(refusing_url: str, run: Run) -> None:
    async def scenario() -> None:
        async with AsyncClient(refusing_url) as client:
            bad: list[tuple[dict[str, Any], str | None]] = [
                ({}, "prompt"),
                ({"prompt": ""}, "prompt"),
                ({"prompt": "x", "messages": [{"role": "user", "content": "y"}]}, "messages"),
                ({"prompt": "x", "temperature": float("nan")}, "temperature"),
                ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
                ({"prompt": "x", "max_token": 1}, "max_token"),
                ({"prompt": "\ud800"}, "prompt"),
                ({"prompt": "x" * (1 << 20)}, "body"),
                ({"prompt": "x", "id": "a b"}, "id"),
            ]
            for arguments, param in bad:
                with pytest.raises(RequestError) as caught:
                    await client.submit(**arguments)
                assert caught.value.param == param
            with pytest.raises(QueueUnavailableError):
                await client.submit(prompt="x")

    run(scenario())


def test_the_synchronous_client(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        producer = Producer(queue_config, "a")

        def consume() -> tuple[str, str, list[int]]:
            with Client(queue_config) as client:
                handle = client.submit(prompt="x", id="a")
                submitted.set()
                first = next(iter(handle)).text
                text = "".join(delta.text for delta in handle)
                result = handle.result(timeout=60)
                assert result.text == text
                with pytest.raises(TimeoutError):
                    client.submit(prompt="x").result(timeout=0.05)
                return first, text, [item["seq"] for item in handle.events()]

        submitted = asyncio.Event()
        loop = asyncio.get_running_loop()
        submitted_set = submitted.set
        submitted.set = lambda: loop.call_soon_threadsafe(submitted_set)  # type: ignore[method-assign,assignment]
        consumer = asyncio.create_task(asyncio.to_thread(consume))
        await submitted.wait()
        await producer.begin()
        for _ in range(10):
            await producer.delta()
        await producer.done()
        assert await consumer == ("1 ", expected_text(10), list(range(1, 13)))
        await producer.aclose()

    run(scenario())


def test_a_burst_of_events_leaves_turns_to_others(queue_config: QueueConfig, run: Run) -> None:
    """An engine tells of all its requests at once; whoever else the process serves does not wait for all of it."""
    turns, taken, count = 0, [], 640

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def scenario() -> None:
        async with AsyncClient(queue_config) as client:
            subscription: Any = await client.follow("a", after=0, expected=True)
            async with asyncio.timeout(60):
                await subscription._confirmed.wait()
            subscription.deliver = lambda seq, data: taken.append(turns)
            task = asyncio.create_task(others())
            publish = "for n = 1, ARGV[1] do redis.call('PUBLISH', KEYS[1], n .. ' {}') end"
            await client._redis.execute_command("EVAL", publish, 1, subscription.channel, count)
            async with asyncio.timeout(60):
                while len(taken) < count:
                    await asyncio.sleep(0.01)
            task.cancel()
            await subscription.aclose()
        assert len(set(taken)) >= count // 16 - 1

    run(scenario())


def test_the_synchronous_client_after_a_fork(queue_config: QueueConfig) -> None:
    script = """
import os, sys
from pagemill.ingest.client import Client
client = Client(sys.argv[1])
client.submit(prompt="x", id="parent")
client._lock.acquire()  # as another thread would at that moment
pid = os.fork()
if pid == 0:
    client.submit(prompt="x", id="child")
    os._exit(0)
client._lock.release()
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print(client.cancel("child"), client.cancel("parent"))
events = client.attach("parent").events()
next(events)  # and left open: the interpreter must end all the same
"""
    command = [sys.executable, "-W", "ignore", "-c", script, queue_config.redis_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.stdout, done.returncode) == ("cancelled cancelled\n", 0), done.stderr


def test_the_client_needs_neither_torch_nor_transformers() -> None:
    script = (
        "import sys, pagemill.ingest.client; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.stdout == "[]\n", done.stderr


def test_a_deadline_counts_although_no_engine_lives(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        async with AsyncClient(queue_config, watchdog_s=0.1) as client:
            waits = await client.submit(prompt="x", ttl_ms=150)
            with pytest.raises(RequestFailed) as failed:
                await waits.result(timeout=60)
            assert (failed.value.code, failed.value.result.state) == ("deadline_exceeded", "expired")
            producer = Producer(queue_config, "a")
            await producer.begin()
            await producer.delta()
            await producer.redis.hset(producer.shard.record("a"), "deadline", 1)
            with pytest.raises(RequestError, match="no engine has said"):
                await client.attach("a").result(timeout=60)
            await producer.aclose()

    run(scenario())
