"""What clients do besides reading: what they send, what they refuse to send, and what they import for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
import pytest

from pagemill.engine.errors import RequestError
from pagemill.ingest.client import AsyncClient, Client, QueueUnavailableError, RequestFailed
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.redis import connect_commands
from tests.ingest.producer import Producer, expected_text

Run = Callable[[Coroutine[Any, Any, Any]], Any]


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
                ({"prompt_token_ids": 5}, "prompt_token_ids"),
                ({"prompt": {"prompt_token_ids": 1.5}}, "prompt_token_ids"),
                ({"prompt_token_ids": "ab"}, "prompt_token_ids"),
                ({"prompt_token_ids": {"1": 2}}, "prompt_token_ids"),
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


def test_the_synchronous_client_after_a_fork(queue_config: QueueConfig) -> None:
    script = """
import os, sys
from pagemill.ingest.client import Client
client = Client(sys.argv[1])
client.submit(prompt="x", id="parent")
client.cancel("parent")
events = client.attach("parent").events()
next(events)
client._lock.acquire()  # as another thread would at that moment
pid = os.fork()
if pid == 0:
    client.submit(prompt="x", id="child")
    try:
        next(events)
    except RuntimeError:  # begun by the parent's thread, which is not here
        os._exit(0)
    os._exit(1)
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
