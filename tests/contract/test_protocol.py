"""The protocol from outside: what docs/protocol.md promises, with plain Redis commands and a real engine."""

from __future__ import annotations

import asyncio
import re
import shlex
import struct
import zlib
from pathlib import Path
from typing import Any

import orjson

from pagemill.engine.async_engine import AsyncEngine
from pagemill.ingest.config import QueueConfig
from tests.contract.conftest import TAG, Outside, serving

PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"


def documented(language: str) -> list[list[str]]:
    """The fenced blocks of one language in docs/protocol.md, as lines."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PROTOCOL.read_text(), re.MULTILINE | re.DOTALL)
    return [block.strip().splitlines() for block in blocks]


def test_the_documented_example(play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside) -> None:
    (subscribe,), (add,), (read,), cancel = documented("redis")

    async def scenario() -> None:
        channel = shlex.split(subscribe)[1]
        assert channel == f"{TAG}:ch:my-request-1"
        async with serving(engine, queue_config):
            live = []
            async for item in outside.live("my-request-1"):
                if not item:
                    await outside.redis.execute_command(*shlex.split(add))
                live.append(item)
            stored = await outside.redis.execute_command(*shlex.split(read))
            assert [orjson.loads(fields[b"e"]) for _, fields in stored] == live[1:]
            assert [entry_id for entry_id, _ in stored] == [b"%d-0" % number for number in range(1, len(live))]
        await outside.assert_nothing_left()
        check_events(live[1:], tokens=16)

        for line in cancel:
            await outside.redis.execute_command(*shlex.split(line))
        assert await outside.redis.pttl(f"{TAG}:req:my-request-1") <= 3_600_000

    play(scenario())


def test_the_end_alone_is_told_on_a_channel_of_its_own(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside
) -> None:
    """Whatever ends a request: an engine that ran it, one that refuses it, one that finds it cancelled."""

    async def end_of(request_id: str, body: Any) -> tuple[bytes, list[bytes | None]]:
        async with outside.redis.pubsub() as pubsub, asyncio.timeout(60):
            await pubsub.subscribe(f"{TAG}:end:{request_id}")
            async for message in pubsub.listen():
                if message["type"] == "subscribe":
                    await outside.add(request_id, body)
                    continue
                fields = await outside.redis.hmget(f"{TAG}:req:{request_id}", "state", "result", "seq")
                return message["data"], fields
        raise AssertionError("no message has come")

    async def scenario() -> None:
        async with serving(engine, queue_config):
            number, (state, result, seq) = await end_of("a", {"prompt": "Hello", "max_tokens": 3, "temperature": 0})
            assert (state, number) == (b"completed", seq)
            (choice,) = orjson.loads(result)
            assert choice["token_ids"] == await outside.token_ids("a") and choice["text"] == await outside.text("a")
            assert int(number) == (await outside.done("a"))["seq"]
            _, (state, result, _) = await end_of("b", {"prompt": "Hello", "no_such_name": 1})
            assert (state, result) == (b"rejected", b"[]")
            await outside.redis.hset(f"{TAG}:req:c", "cancel", 1)
            await outside.redis.expire(f"{TAG}:req:c", 3600)
            _, (state, _, _) = await end_of("c", {"prompt": "Hello"})
            assert state == b"cancelled"

    play(scenario())


def test_the_documented_events_have_the_fields_of_real_ones(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside
) -> None:
    (examples,) = documented("json")
    shapes = {item["type"]: item for item in map(orjson.loads, examples)}

    async def scenario() -> None:
        async with serving(engine, queue_config):
            await outside.add("a", {"prompt": "Hello", "max_tokens": 2, "temperature": 0})
            await outside.done("a")
        for item in await outside.events("a"):
            shape = shapes[item["type"]]
            assert list(item) == list(shape)
            for name in ("usage", "metrics"):
                assert list(item.get(name, ())) == list(shape.get(name, ()))

    play(scenario())


def check_events(events: list[dict[str, Any]], tokens: int) -> None:
    """What holds for every completed request with one choice."""
    assert [item["seq"] for item in events] == list(range(1, len(events) + 1))
    events = [events[0], *(item for item in events[1:] if item["type"] != "started")]
    kinds = [item["type"] for item in events]
    assert kinds[0] == "started" and kinds[-2:] == ["choice", "done"]
    assert set(kinds[1:-2]) == {"delta"}
    token_ids: list[int] = []
    text = ""
    for delta in events[1:-2]:
        assert (delta["offset"], delta["text_offset"]) == (len(token_ids), len(text))
        assert delta["count"] == len(delta["token_ids"])
        token_ids += delta["token_ids"]
        text += delta["text"]
        assert delta["chain"] == f"{zlib.crc32(struct.pack(f'<{len(token_ids)}I', *token_ids)):08x}"
    assert len(token_ids) == tokens and "\ufffd" not in text
    done = events[-1]
    assert done["state"] == "completed" and "error" not in done
    assert done["usage"]["completion_tokens"] == tokens and done["usage"]["prompt_tokens"] > 0
    assert 0 <= done["metrics"]["queue_ms"] <= done["metrics"]["ttft_ms"] <= done["metrics"]["total_ms"]


def test_the_first_token_goes_at_once_and_the_rest_is_gathered(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside
) -> None:
    async def scenario() -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 9, "temperature": 0}
        async with serving(engine, queue_config):
            await outside.add("each", {**body, "flush_ms": 0})
            await outside.add("gathered", {**body, "flush_ms": 60_000})
            await outside.add("whole", {**body, "stream": False})
            for name in ("each", "gathered", "whole"):
                await outside.done(name)
        counts = {
            name: [item["count"] for item in await outside.events(name) if item["type"] == "delta"]
            for name in ("each", "gathered", "whole")
        }
        assert counts == {"each": [1] * 9, "gathered": [1, 8], "whole": [9]}
        texts = {await outside.text(name) for name in counts}
        assert len(texts) == 1

    play(scenario())


def test_results_and_metadata(play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside) -> None:
    async def scenario() -> None:
        body = {"prompt": "Count: one, two,", "max_tokens": 8, "temperature": 0, "metadata": {"order": "991"}}
        async with serving(engine, queue_config):
            await outside.add("a", body, tenant="acme", ttl_ms="30000")
            done = await outside.done("a")
        assert done["metadata"] == {"order": "991"}
        record = await outside.redis.hgetall(f"{TAG}:req:a")
        (choice,) = orjson.loads(record[b"result"])
        assert choice["text"] == await outside.text("a") and choice["token_ids"] == await outside.token_ids("a")
        assert choice["finish_reason"] == "length"
        assert record[b"state"] == b"completed" and record[b"tenant"] == b"acme"
        assert int(record[b"deadline"]) - int(record[b"created"]) == 30_000
        assert orjson.loads(record[b"usage"]) == done["usage"]

    play(scenario())


def test_the_same_seed_gives_the_same_tokens_beside_anything(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside
) -> None:
    async def scenario() -> None:
        body = {"prompt": "My favourite animal is", "max_tokens": 6, "seed": 5}
        async with serving(engine, queue_config):
            await outside.add("alone", body)
            await outside.done("alone")
            await asyncio.gather(*(outside.add(f"r{n}", {**body, "seed": n}) for n in range(4)), outside.add("b", body))
            for name in ("r0", "r1", "r2", "r3", "b"):
                await outside.done(name)
        assert await outside.token_ids("alone") == await outside.token_ids("b")
        assert len({tuple(await outside.token_ids(f"r{n}")) for n in range(4)}) == 4

    play(scenario())


def test_cancelling_by_hand(play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside) -> None:
    async def scenario() -> None:
        body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
        await outside.redis.hset(f"{TAG}:req:early", "cancel", "1")
        await outside.redis.expire(f"{TAG}:req:early", 60)
        async with serving(engine, queue_config):
            await outside.add("running", body)
            await outside.add("silent", {**body, "stream": False})
            await outside.add("early", body)
            await outside.first_delta("running")
            async with asyncio.timeout(60):
                while not await outside.events("silent"):
                    await asyncio.sleep(0.005)
            await outside.redis.hset(f"{TAG}:req:running", "cancel", "1")
            await outside.redis.hset(f"{TAG}:req:silent", "cancel", "1")
            for name in ("running", "silent", "early"):
                done = await outside.done(name, timeout=60)
                assert (done["state"], done["error"]["code"]) == ("cancelled", "cancelled")
                assert done["usage"]["completion_tokens"] < 300
        running = await outside.events("running")
        assert running[-2]["finish_reason"] == "cancelled"
        assert 0 < running[-1]["usage"]["completion_tokens"] < 300
        assert [item["type"] for item in await outside.events("early")] == ["done"]
        await outside.assert_nothing_left()

    play(scenario())


def test_deadlines(play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside) -> None:
    async def scenario() -> None:
        body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True}
        await outside.add("waited", {**body, "ttl_ms": 1})
        await asyncio.sleep(0.01)
        async with serving(engine, queue_config):
            cases: tuple[tuple[str, dict[str, Any] | None], ...]
            cases = (("running", {}), ("silent", {"stream": False}), ("waited", None))
            # One after the other, since the pool does not hold both; `silent` has nothing to say before its end.
            for name, more in cases:
                if more is not None:
                    await outside.add(name, {**body, "ttl_ms": 1000, **more})
                done = await outside.done(name, timeout=60)
                assert (done["state"], done["error"]["code"]) == ("expired", "deadline_exceeded")
                assert done["usage"]["completion_tokens"] < 300
        assert [item["type"] for item in await outside.events("waited")] == ["done"]
        for name in ("running", "silent"):
            assert (await outside.events(name))[0]["type"] == "started"
        await outside.assert_nothing_left()

    play(scenario())
