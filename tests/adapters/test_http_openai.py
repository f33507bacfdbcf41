"""OpenAI's routes, through OpenAI's own client and through plain HTTP, with a real engine behind them."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
import redis.asyncio as aioredis

from pagemill.engine.async_engine import AsyncEngine
from pagemill.ingest.config import QueueConfig
from tests.adapters.http_gateway import ENDLESS, GREEDY, HI, Web
from tests.contract.conftest import held

MODEL = "smollm2-135m"


def test_chat_by_the_official_client(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        async with web.openai() as client:
            assert [model.id for model in (await client.models.list()).data] == [MODEL]
            assert (await client.models.retrieve(MODEL)).id == MODEL
            whole = await client.chat.completions.create(model=MODEL, messages=HI, **GREEDY)
            (choice,) = whole.choices
            assert choice.finish_reason in ("stop", "length") and choice.message.role == "assistant"
            assert whole.usage is not None and whole.usage.total_tokens == (
                whole.usage.prompt_tokens + whole.usage.completion_tokens
            )
            stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True, **GREEDY)
            chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [
            choice.finish_reason
        ]
        assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
        assert all(chunk.usage is None for chunk in chunks), "nobody asked"

    tried(scenario)


def test_the_frames_of_a_stream(tried: Any) -> None:
    """Data frames and comments only, roles first, one end a choice, usage once and last, then [DONE]."""

    async def scenario(web: Web) -> None:
        body = {"messages": HI, "n": 2, "stream": True, "stream_options": {"include_usage": True}, **GREEDY}
        answer = await web.post("/v1/chat/completions", body)
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["Cache-Control"] == "no-cache, no-transform"
        assert answer.headers["X-Accel-Buffering"] == "no" and "Content-Encoding" not in answer.headers
        *chunks, usage, end = answer.frames
        assert end == "[DONE]"
        assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks[:2]] == ["assistant", "assistant"]
        assert [chunk["choices"][0]["index"] for chunk in chunks[:2]] == [0, 1]
        ends = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
        assert sorted(choice["index"] for choice in ends) == [0, 1] and all(choice["delta"] == {} for choice in ends)
        assert all(chunk["usage"] is None for chunk in chunks)
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 12

    tried(scenario)


def test_several_prompts_are_choices_one_after_the_other(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        prompts = ["The capital of France is", "One two three"]
        single = [
            (await web.post("/v1/completions", {"prompt": prompt, **GREEDY})).json["choices"][0]["text"]
            for prompt in prompts
        ]
        answer = (await web.post("/v1/completions", {"prompt": prompts, **GREEDY, "n": 2, "seed": 3})).json
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in answer["choices"]] == [single[0]] * 2 + [single[1]] * 2
        body = {"prompt": prompts, **GREEDY, "stream": True, "echo": True}
        texts = ["", ""]
        for chunk in (await web.post("/v1/completions", body)).frames[:-1]:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == [prompt + text for prompt, text in zip(prompts, single, strict=True)]
        ids = (await web.post("/v1/completions", {"prompt": prompts[0], **GREEDY, "token_ids": True})).json
        again = await web.post("/v1/completions", {"prompt": [[504, 3575], [504, 3575]], **GREEDY})
        assert len(again.json["choices"]) == 2 and len(ids["choices"][0]["token_ids"]) == 6

    tried(scenario)


def test_log_probabilities_in_both_shapes(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        async with web.openai() as client:
            body: dict[str, Any] = {"model": MODEL, "messages": HI, "logprobs": True, "top_logprobs": 2, **GREEDY}
            chat = await client.chat.completions.create(**body)
            stream = await client.chat.completions.create(**body, stream=True)
            streamed = [
                entry
                async for chunk in stream
                if chunk.choices[0].logprobs
                for entry in chunk.choices[0].logprobs.content or ()
            ]
            content = chat.choices[0].logprobs.content if chat.choices[0].logprobs else None
            assert content is not None and len(content) == 6 and all(len(item.top_logprobs) == 2 for item in content)
            assert [item.token for item in streamed] == [item.token for item in content]
            whole: dict[str, Any] = {"model": MODEL, "prompt": "Ein Käse für 5 €:", "logprobs": 2, "echo": True}
            old = await client.completions.create(**whole, **GREEDY)
            shape = old.choices[0].logprobs
            assert shape is not None and shape.tokens and shape.text_offset
            assert shape.token_logprobs and shape.token_logprobs[0] is None and shape.token_logprobs[1] is not None
            text = old.choices[0].text
            for token, offset in zip(shape.tokens, shape.text_offset, strict=True):
                assert token.startswith("bytes:") or text[offset : offset + len(token)] == token
            parts: list[str] = []
            async for chunk in await client.completions.create(**whole, **GREEDY, stream=True):
                if chunk.choices[0].logprobs:
                    parts += chunk.choices[0].logprobs.tokens or []
            assert parts == shape.tokens
        bare = (await web.post("/v1/completions", {"prompt": "Hi", "logprobs": 0, **GREEDY})).json["choices"][0]
        assert len(bare["logprobs"]["tokens"]) == 6 and all(len(top) == 1 for top in bare["logprobs"]["top_logprobs"])
        none = (
            await web.post("/v1/completions", {"prompt": "Hi there", "max_tokens": 0, "echo": True, "logprobs": 1})
        ).json
        assert none["choices"][0]["text"] == "Hi there" and none["usage"]["completion_tokens"] == 0
        assert "".join(none["choices"][0]["logprobs"]["tokens"]) == "Hi there"

    tried(scenario)


def test_nulls_hints_and_answers_sent_back_are_taken(tried: Any) -> None:
    """What clients of OpenAI and LangChain send although it says nothing."""

    async def scenario(web: Web) -> None:
        history = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"at":"Rome"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ]
        nulls = dict.fromkeys(
            ("max_tokens", "stop", "stream", "seed", "logit_bias", "tools", "response_format", "n", "user")
        )
        body = {"model": MODEL, "messages": history, **nulls, "max_completion_tokens": 4, "store": False, "user": "me"}
        answer = await web.post("/v1/chat/completions", body)
        assert answer.status == 200, answer.text
        again = {"messages": [*history, answer.json["choices"][0]["message"], *HI], "max_tokens": 2, "stream": None}
        assert (await web.post("/v1/chat/completions/", again)).status == 200

    tried(scenario)


def test_stop_and_a_form_and_a_limit(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"enum": ["yes", "no"]}}}
        answer = (
            await web.post("/v1/chat/completions", {"messages": HI, "response_format": form, "max_tokens": 9})
        ).json
        assert answer["choices"][0]["message"]["content"] in ('"yes"', '"no"')
        assert answer["choices"][0]["finish_reason"] == "stop"
        stopped = await web.post("/v1/completions", {"prompt": "1, 2, 3, 4,", **GREEDY, "stop": [" 6"], "stream": True})
        text = "".join(chunk["choices"][0]["text"] for chunk in stopped.frames[:-1])
        assert text == " 5,", text
        (end,) = [c["choices"][0] for c in stopped.frames[:-1] if c["choices"][0]["finish_reason"]]
        assert (end["finish_reason"], end["stop_reason"]) == ("stop", " 6")

    tried(scenario)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_generation(tried: Any, engine: AsyncEngine, stream: bool) -> None:
    async def scenario(web: Web) -> None:
        async with web.socket() as (reader, writer):
            body = b'{"prompt":["Once upon a time","Two"],"max_tokens":300,"ignore_eos":true,"stream":%s}' % (
                b"true" if stream else b"false"
            )
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            if stream:
                assert b"200 OK" in await reader.readuntil(b"\r\n")
                await reader.readuntil(b"data: ")
            else:
                async with asyncio.timeout(60):
                    while not engine.num_live:
                        await asyncio.sleep(0.005)
        async with asyncio.timeout(60):
            while engine.num_live:
                await asyncio.sleep(0.005)
        counted = (await web.get("/metrics")).text
        assert 'pagemill_queue_events_total{event="cancelled",queue="default"} 2.0' in counted

    tried(scenario)


def test_who_leaves_costs_the_step_under_way(tried: Any, engine: AsyncEngine) -> None:
    """The engine stands still from the first token on until it has heard of it, and makes no further one."""

    async def scenario(web: Web) -> None:
        body = {**ENDLESS, "stream": True}
        async with web.session.post(f"{web.url}/v1/completions", json=body) as answer:
            await answer.content.readuntil(b"\n\n")
            with held(engine):
                before = engine.output_tokens
                answer.close()
                async with asyncio.timeout(60):
                    while not engine._inbox:
                        await asyncio.sleep(0.005)
        async with asyncio.timeout(60):
            while engine.num_live:
                await asyncio.sleep(0.005)
        assert engine.output_tokens - before <= 2, "one was on its way"

    tried(scenario)


def test_an_answer_is_never_shorter_without_saying_so(tried: Any) -> None:
    """A generation that somebody cancels ends a stream with an error, which OpenAI's client raises, and no [DONE]."""

    async def scenario(web: Web) -> None:
        async with web.openai() as client:
            stream = await client.completions.create(
                model=MODEL, prompt=ENDLESS["prompt"], max_tokens=300, stream=True, extra_body={"ignore_eos": True}
            )
            with pytest.raises(openai.APIError, match="cancelled"):
                async for chunk in stream:
                    if chunk.choices[0].text:
                        await web.post(f"/v1/requests/{chunk.id.removeprefix('cmpl-')}/cancel")

    tried(scenario)


def test_an_idempotency_key_finds_the_same_answer(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        key = {"Idempotency-Key": "order 991"}
        body = {"prompt": ["Name a fruit:", "Name a bird:"], "max_tokens": 4, "temperature": 1.0}
        first = await web.post("/v1/completions", body, headers=key)
        again = await web.post("/v1/completions", body, headers=key)
        assert again.json["choices"] == first.json["choices"] and again.json["id"] == first.json["id"]
        assert "Idempotent-Replayed" not in first.headers and again.headers["Idempotent-Replayed"] == "true"
        other = await web.post("/v1/completions", {**body, "max_tokens": 5}, headers=key)
        assert (other.status, other.error["code"]) == (409, "idempotency_conflict")
        assert other.headers["x-should-retry"] == "false"

    tried(scenario)


def test_a_callback_is_kept_with_the_request(tried: Any, queue_config: QueueConfig) -> None:
    """Webhooks are delivered by their own role; the routes only pass on who wants one."""

    async def scenario(web: Web) -> None:
        callback = {"url": "https://hooks.example/x"}
        for path, body in (
            ("chat/completions", {"messages": HI, **GREEDY}),
            ("completions", {"prompt": "Hi", **GREEDY}),
            ("responses", {"input": "Hi", "temperature": 0, "max_output_tokens": 6}),
        ):
            answer = await web.post(f"/v1/{path}", {**body, "callback": callback})
            assert answer.status == 200, answer.text
        async with aioredis.Redis.from_url(queue_config.redis_url, protocol=2) as server:
            assert await server.zcard("pm:{default.0}:hook:due") == 3
            await server.delete(*await server.keys("pm:{default.0}:hook:*"))

    tried(scenario)


LONG = [{"role": "user", "content": "x " * 900}]
# Route, body, status, param where it is certain, code where it is not invalid_request.
REFUSED: list[tuple[str, dict[str, Any], int, str | None, str | None]] = [
    ("chat/completions", {"messages": []}, 400, "messages", None),
    ("chat/completions", {}, 400, "messages", None),
    ("chat/completions", {"messages": HI, "max_tokens": 0}, 400, "max_tokens", None),
    ("chat/completions", {"messages": HI, "max_tokens": 1, "max_completion_tokens": 2}, 400, "max_tokens", None),
    ("chat/completions", {"messages": HI, "maxtokens": 5}, 400, "maxtokens", None),
    ("chat/completions", {"messages": HI, "top_logprobs": 5}, 400, "top_logprobs", None),
    ("chat/completions", {"messages": HI, "stream": "yes"}, 400, "stream", None),
    ("chat/completions", {"messages": HI, "stream_options": 1}, 400, "stream_options", None),
    ("chat/completions", {"messages": HI, "n": 0}, 400, "n", None),
    ("chat/completions", {"messages": HI, "model": "gpt-4"}, 404, "model", "model_not_found"),
    ("chat/completions", {"messages": LONG}, 400, "messages", "context_length_exceeded"),
    ("completions", {"prompt": []}, 400, "prompt", None),
    ("completions", {"prompt": ""}, 400, "prompt", None),
    ("completions", {"prompt": ["a", [1]]}, 400, "prompt", None),
    ("completions", {"prompt": [[1], []]}, 400, "prompt", None),
    ("completions", {"prompt": "x", "logit_bias": {"99999999": 1}}, 400, "logit_bias", None),
    ("completions", {"prompt": "x", "callback": {"url": "x"}}, 400, None, None),
    ("chat/completions", {"messages": [{"role": "user", "content": None}]}, 400, "messages[0].content", None),
    ("chat/completions", {"messages": [{"role": "user", "content": [None]}]}, 400, "messages[0].content[0]", None),
    ("chat/completions", {"messages": HI, "stop": [""]}, 400, "stop", None),
    ("chat/completions", {"messages": HI, "seed": 2**64}, 400, "seed", None),
    ("chat/completions", {"messages": HI, "max_tokens": -1}, 400, "max_tokens", None),
    ("chat/completions", {"messages": HI, "logprobs": 3}, 400, "logprobs", None),
    ("chat/completions", {"messages": HI, "metadata": {"a": 1}}, 400, None, None),
    ("completions", {"prompt": ["fine", ""]}, 400, "prompt", None),
    ("completions", {"prompt": "x", "best_of": 4}, 400, "best_of", None),
    ("completions", {"prompt": "x", "suffix": "y"}, 400, "suffix", None),
    ("completions", {"prompt": [1, 2], "echo": True}, 400, "echo", None),
    ("completions", {"prompt": [[10**9]]}, 400, "prompt", None),
    ("completions", {"prompt": [-1]}, 400, "prompt", None),
    ("completions", {"prompt": "x " * 900}, 400, "prompt", "context_length_exceeded"),
    ("chat/completions", {"messages": HI, "tools": [{"type": "custom", "custom": {}}]}, 400, "tools[0].type", None),
    ("completions", {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias", None),
    ("completions", {"prompt": "x", "tenant": "other"}, 400, "tenant", None),
]


def test_refusals_name_the_field_and_leave_nothing(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        for path, body, status, param, code in REFUSED:
            for stream in ({}, {"stream": True}):
                answer = await web.post(f"/v1/{path}", {**stream, **body})
                error = answer.error
                assert (answer.status, error["code"]) == (status, code or "invalid_request"), (body, answer.text)
                assert param is None or error["param"] == param, (body, error)
                assert answer.headers["x-should-retry"] == "false" and answer.headers["x-request-id"]

    tried(scenario)
