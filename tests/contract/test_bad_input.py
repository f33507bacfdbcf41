"""Bad input: each kind has its named error at once, and whoever runs beside it does not notice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pagemill.engine.async_engine import AsyncEngine
from pagemill.ingest.config import QueueConfig
from tests.contract.conftest import TAG, Outside, held, serving

X = {"prompt": "x"}

# name: body, code, param
REFUSED: dict[str, tuple[Any, str, str | None]] = {
    "not-json": (b"prompt=x", "invalid_request", "body"),
    "half-json": (b'{"prompt":"x"', "invalid_request", "body"),
    "empty-body": (b"", "invalid_request", "body"),
    "not-utf8": (b'{"prompt":"\xff\xfe"}', "invalid_request", "body"),
    "surrogate": (b'{"prompt":"\\ud800"}', "invalid_request", "body"),
    "nan": (b'{"prompt":"x","temperature":NaN}', "invalid_request", "body"),
    "infinite": (b'{"prompt":"x","temperature":1e999}', "invalid_request", "body"),
    "deep": (b'{"prompt":"x","metadata":' + b"[" * 2000 + b"]" * 2000 + b"}", "invalid_request", "body"),
    "nested": (b'{"prompt":"x","metadata":' + b"[" * 100 + b"1" + b"]" * 100 + b"}", "invalid_request", "body"),
    "list": (b"[]", "invalid_request", "body"),
    "null": (b"null", "invalid_request", "body"),
    "too-large": ({"prompt": "x" * (2 << 20)}, "too_large", "body"),
    "unknown-field": ({**X, "max_token": 3}, "invalid_request", "max_token"),
    "no-prompt": ({"max_tokens": 3}, "invalid_request", "prompt"),
    "two-prompts": ({**X, "prompt_token_ids": [1]}, "invalid_request", "prompt_token_ids"),
    "empty-prompt": ({"prompt": ""}, "invalid_request", "prompt"),
    "no-messages": ({"messages": []}, "invalid_request", "messages"),
    "no-tokens": ({"prompt_token_ids": []}, "invalid_request", "prompt_token_ids"),
    "prompt-number": ({"prompt": 3}, "invalid_request", "prompt"),
    "prompt-list": ({"prompt": ["x"]}, "invalid_request", "prompt"),
    "role": ({"messages": [{"role": "pirate", "content": "x"}]}, "invalid_request", "messages[0].role"),
    "content": ({"messages": [{"role": "user", "content": 3}]}, "invalid_request", "messages[0].content"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "invalid_request",
        "messages[0].content[0]",
    ),
    "message-field": ({"messages": [{"role": "user", "text": "x"}]}, "invalid_request", "messages[0].text"),
    "ids-strings": ({"prompt_token_ids": ["1"]}, "invalid_request", "prompt_token_ids"),
    "ids-floats": ({"prompt_token_ids": [1.0]}, "invalid_request", "prompt_token_ids"),
    "ids-booleans": ({"prompt_token_ids": [True]}, "invalid_request", "prompt_token_ids"),
    "ids-negative": ({"prompt_token_ids": [-1]}, "invalid_request", "prompt_token_ids"),
    "ids-huge": (b'{"prompt_token_ids":[1180591620717411303424]}', "invalid_request", "prompt_token_ids"),
    "ids-vocabulary": ({"prompt_token_ids": [5, 49152]}, "invalid_request", "prompt_token_ids"),
    "max-tokens-0": ({**X, "max_tokens": 0}, "invalid_request", "max_tokens"),
    "max-tokens-negative": ({**X, "max_tokens": -1}, "invalid_request", "max_tokens"),
    "max-tokens-text": ({**X, "max_tokens": "3"}, "invalid_request", "max_tokens"),
    "max-tokens-float": ({**X, "max_tokens": 3.5}, "invalid_request", "max_tokens"),
    "max-tokens-true": ({**X, "max_tokens": True}, "invalid_request", "max_tokens"),
    "temperature-text": ({**X, "temperature": "hot"}, "invalid_request", "temperature"),
    "temperature-negative": ({**X, "temperature": -0.1}, "invalid_request", "temperature"),
    "top-p-0": ({**X, "top_p": 0}, "invalid_request", "top_p"),
    "stop-number": ({**X, "stop": 3}, "invalid_request", "stop"),
    "stop-empty": ({**X, "stop": [""]}, "invalid_request", "stop"),
    "stop-vocabulary": ({**X, "stop_token_ids": [1 << 30]}, "invalid_request", "stop_token_ids"),
    "stream-text": ({**X, "stream": "yes"}, "invalid_request", "stream"),
    "ttl": ({**X, "ttl_ms": 0}, "invalid_request", "ttl_ms"),
    "priority": ({**X, "priority": 3}, "invalid_request", "priority"),
    "tenant": ({**X, "tenant": "a:b{c}"}, "invalid_request", "tenant"),
    "metadata": ({**X, "metadata": {"k": 1}}, "invalid_request", "metadata.k"),
    "n": ({**X, "n": 65}, "invalid_request", "n"),
    "logprobs": ({**X, "logprobs": 21}, "invalid_request", "logprobs"),
    "penalty": ({**X, "presence_penalty": 2.5}, "invalid_request", "presence_penalty"),
    "bias-vocabulary": ({**X, "logit_bias": {"99999999": 1}}, "invalid_request", "logit_bias"),
    "bias-text": ({**X, "logit_bias": {"the": 1}}, "invalid_request", "logit_bias"),
    "allowed-none": ({**X, "allowed_token_ids": []}, "invalid_request", "allowed_token_ids"),
    "format": ({**X, "response_format": {"type": "xml"}}, "invalid_request", "response_format"),
    "schema": ({**X, "structured_outputs": {"json": {"type": "strange"}}}, "invalid_request", "structured_outputs"),
    "regex": ({**X, "structured_outputs": {"regex": "(a"}}, "invalid_request", "structured_outputs"),
    "model": ({**X, "model": "gpt-7"}, "unsupported_model", "model"),
    "too-long": ({"prompt_token_ids": [5] * 512}, "prompt_too_long", "prompt"),
    "too-long-text": ({"prompt": "word " * 200_000}, "prompt_too_long", "prompt"),
    "too-long-chat": (
        {"messages": [{"role": "user", "content": "wörd" * 100_000}] * 2},
        "prompt_too_long",
        "prompt",
    ),
    "never-fits": ({"prompt_token_ids": [5] * 450}, "never_fits", "prompt"),
    "never-ends": ({**X, "max_tokens": 480, "ignore_eos": True}, "never_fits", "prompt"),
}


async def refusal(outside: Outside, request_id: str, body: Any) -> list[dict[str, Any]]:
    """Send a body; its events as the channel brings them."""
    events = []
    async for item in outside.live(request_id, timeout=60):
        if not item:
            await outside.add(request_id, body)
        else:
            events.append(item)
    return events


def test_each_kind_has_its_error_at_once(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside
) -> None:
    """Within 100 ms, as `make bench-recovery` tells. Here: while the engine stands still in the middle of a request,
    and before anything that looks after requests now and then has come round."""
    config = queue_config.replace(heartbeat_timeout_s=600.0, poll_ms=60_000)

    async def scenario() -> None:
        async with serving(engine, config):
            await outside.add("running", {**X, "max_tokens": 400, "ignore_eos": True})
            await outside.first_delta("running")
            with held(engine):
                for name, (body, code, param) in REFUSED.items():
                    events = await refusal(outside, name, body)
                    (done,) = events
                    assert (done["type"], done["state"], done["seq"]) == ("done", "rejected", 1), name
                    assert done["error"]["code"] == code, (name, done)
                    assert param is None or done["error"]["param"] == param, (name, done)
                    assert done["error"]["message"]
                    assert await outside.events(name) == events
                assert (await outside.events("running"))[-1]["type"] == "delta"
                await outside.redis.hset(f"{TAG}:req:running", "cancel", "1")
            assert (await outside.done("running"))["state"] == "cancelled"
        unreadable = {"not-json", "half-json", "empty-body", "not-utf8", "surrogate", "nan", "infinite", "deep"}
        letters = await outside.redis.xrange(f"{TAG}:dlq")
        assert {fields[b"id"].decode() for _, fields in letters} == unreadable
        assert {fields[b"reason"] for _, fields in letters} == {b"unreadable"}
        await outside.assert_nothing_left()

    play(scenario())


def test_what_cannot_be_answered_goes_to_the_dead_letters(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside
) -> None:
    entries: dict[str, dict[Any, Any]] = {
        "unknown_version": {"v": "99", "id": "a", "body": "{}"},
        "unknown_version ": {"x": "y"},
        "no_id": {"v": "1", "body": "{}"},
        "invalid_id": {"v": "1", "id": "a b", "body": "{}"},
        "invalid_id ": {"v": "1", "id": b"\xff", "body": "{}"},
        "invalid_id  ": {"v": "1", "id": "x" * 129, "body": "{}"},
        "invalid_id   ": {"v": "1", "id": "a}:req:b", "body": "{}"},
        "no_body": {"v": "1", "id": "a"},
        "many": {"v": "2", **{f"f{number}": "x" for number in range(5000)}},
    }

    async def scenario() -> None:
        async with serving(engine, queue_config):
            for fields in entries.values():
                await outside.redis.xadd(f"{TAG}:in:1", fields)
            await outside.add("good", {"prompt": "Hello", "max_tokens": 2})
            assert (await outside.done("good"))["state"] == "completed"
        letters = await outside.redis.xrange(f"{TAG}:dlq")
        reasons = [name.strip() if name != "many" else "unknown_version" for name in entries]
        assert sorted(fields[b"reason"].decode() for _, fields in letters) == sorted(reasons)
        await outside.assert_nothing_left()

    play(scenario())


@pytest.mark.parametrize("field", [{"tenant": "a b"}, {"ttl_ms": "soon"}, {"ttl_ms": "0"}, {"ttl_ms": "9" * 30}])
def test_bad_fields_beside_a_good_body(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside, field: dict[str, str]
) -> None:
    async def scenario() -> None:
        async with serving(engine, queue_config):
            await outside.add("a", X, **field)
            done = await outside.done("a", timeout=60)
        assert (done["state"], done["error"]["param"]) == ("rejected", next(iter(field)))

    play(scenario())


def test_a_blob_that_is_missing_too_large_or_something_else(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside
) -> None:
    async def scenario() -> None:
        stream = f"{TAG}:in:1"
        await outside.redis.set(f"{TAG}:blob:good", '{"prompt":"Hello","max_tokens":2}', ex=60)
        await outside.redis.set(f"{TAG}:blob:large", b"x" * (2 << 20), ex=60)
        await outside.redis.hset(f"{TAG}:blob:hash", "prompt", "Hello")
        await outside.redis.expire(f"{TAG}:blob:hash", 60)
        async with serving(engine, queue_config):
            for name in ("good", "large", "missing", "hash"):
                await outside.redis.xadd(stream, {"v": "1", "id": name, "blob": "1"})
            assert (await outside.done("good"))["state"] == "completed"
            assert (await outside.done("large"))["error"]["code"] == "too_large"
            assert (await outside.done("missing"))["error"]["code"] == "request_lost"
            assert (await outside.done("hash"))["error"]["code"] == "request_lost"
        assert not await outside.redis.keys(f"{TAG}:blob:*")
        await outside.assert_nothing_left()

    play(scenario())


def test_neighbours_are_untouched(play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside) -> None:
    """All the bad input at once, beside two good requests that give what they give alone."""
    good = {"prompt": "The capital of France is", "max_tokens": 10, "temperature": 0, "ignore_eos": True}

    async def scenario() -> None:
        async with serving(engine, queue_config):
            await outside.add("alone", good)
            await outside.done("alone")
            await outside.add("good.1", good)
            await outside.first_delta("good.1")
            for name, (body, _, _) in REFUSED.items():
                await outside.add(name, body)
            await outside.add("good.2", good)
            for name in REFUSED:
                assert (await outside.done(name))["state"] == "rejected"
            for name in ("good.1", "good.2"):
                assert (await outside.done(name))["state"] == "completed"
                assert await outside.token_ids(name) == await outside.token_ids("alone")
                assert (await outside.done(name))["metrics"]["attempts"] == 1
        await outside.assert_nothing_left()

    play(scenario())


def test_a_duplicate_harms_neither_the_first_nor_its_reader(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside
) -> None:
    async def scenario() -> None:
        body = {"prompt": "Once", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        async with serving(engine, queue_config):
            live = []
            async for item in outside.live("a"):
                if not item:
                    await outside.add("a", body)
                elif item["type"] == "delta" and item["offset"] == 0:
                    await outside.add("a", {"prompt": "Twice", "max_tokens": 2})
                    await outside.add("a", b"not even JSON", stream=0)
                live.append(item)
            await outside.add("a", {"prompt": "Thrice"})
            async with asyncio.timeout(60):
                while await outside.redis.xlen(f"{TAG}:dlq") < 3:
                    await asyncio.sleep(0.005)
        assert [item["seq"] for item in live[1:]] == list(range(1, len(live)))
        assert live[-1]["state"] == "completed" and live[-1]["usage"]["completion_tokens"] == 16
        assert await outside.events("a") == live[1:]
        letters = await outside.redis.xrange(f"{TAG}:dlq")
        assert {fields[b"reason"] for _, fields in letters} == {b"duplicate_id"}
        assert len({fields[b"body"] for _, fields in letters}) == 3
        await outside.assert_nothing_left()

    play(scenario())
