"""OpenAI's Responses API by OpenAI's client, and its streams resumed anywhere."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import orjson
import pytest
import redis.asyncio as aioredis

from pagemill.adapters.http.responses_fold import ResponseFold
from pagemill.engine.async_engine import AsyncEngine
from pagemill.ingest.config import QueueConfig
from tests.adapters.http_gateway import Web, gateway
from tests.contract.conftest import Outside, held

ASK: dict[str, Any] = {"model": "smollm2-135m", "input": "Say hello.", "temperature": 0, "max_output_tokens": 6}
KINDS = [
    *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
    *("response.output_text.delta",) * 6,
    *("response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete"),
]


def test_whole_and_streamed(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        async with web.openai() as client:
            whole = await client.responses.create(**ASK, instructions="Be brief.", metadata={"order": "7"})
            assert whole.output_text and whole.status == "incomplete" and whole.metadata == {"order": "7"}
            assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
            assert whole.usage is not None and whole.usage.output_tokens == 6
            assert (await client.responses.retrieve(whole.id)).output_text == whole.output_text
            stream = await client.responses.create(**ASK, instructions="Be brief.", stream=True)
            events = [event async for event in stream]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            kinds = [event.type for event in events]
            assert list(dict.fromkeys(kinds)) == list(dict.fromkeys(KINDS))
            text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert text == whole.output_text
            last: Any = events[-1]
            assert last.response.output_text == text and last.response.id == events[0].response.id  # type: ignore[union-attr]
            items = [{"role": "user", "content": "Say hello."}, *[item.model_dump() for item in whole.output]]
            history = [*items, {"role": "user", "content": [{"type": "input_text", "text": "Again."}]}]
            again = await client.responses.create(**{**ASK, "input": history})
            assert again.usage is not None and again.usage.input_tokens > whole.usage.input_tokens
            form = {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["yes", "no"]}, "strict": True}}
            held = await client.responses.create(**{**ASK, "max_output_tokens": 9}, text=form)  # type: ignore[call-overload]
            assert held.output_text in ('"yes"', '"no"') and held.status == "completed"
            await client.responses.delete(whole.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(whole.id)
            passing = await client.responses.create(**ASK, store=False)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(passing.id)

    tried(scenario)


def test_in_the_background_and_resumed_on_another_gateway(tried: Any, queue_config: QueueConfig) -> None:
    async def scenario(web: Web) -> None:
        long = {**ASK, "input": "Tell a story.", "max_output_tokens": 60}
        async with web.openai() as client:
            stream = await client.responses.create(**long, background=True, stream=True, extra_body={"flush_ms": 0})
            begun = []
            async for event in stream:
                begun.append(event)
                if event.type == "response.output_text.delta":
                    break
            await stream.close()
        name = begun[0].response.id  # type: ignore[union-attr]
        assert [event.type for event in begun[:2]] == ["response.created", "response.queued"]
        async with gateway(queue_config) as other, other.openai() as client:
            assert (await client.responses.retrieve(name)).status in ("in_progress", "incomplete", "completed")
            resumed = await client.responses.retrieve(name, stream=True, starting_after=begun[-1].sequence_number)
            rest = [event async for event in resumed]
            numbers = [event.sequence_number for event in (*begun, *rest)]
            assert numbers == list(range(len(numbers)))
            deltas = [event.delta for event in (*begun, *rest) if event.type == "response.output_text.delta"]
            final = await client.responses.retrieve(name)
            assert "".join(deltas) == final.output_text
            again = await client.responses.retrieve(name, stream=True)
            assert [event.model_dump() async for event in again] == [event.model_dump() for event in (*begun, *rest)]

    tried(scenario)


def test_cancelling_and_leaving(tried: Any, engine: AsyncEngine, queue_config: QueueConfig) -> None:
    async def scenario(web: Web) -> None:
        endless = {**ASK, "max_output_tokens": 400, "logit_bias": {"2": -100}}
        outside = Outside(queue_config.redis_url)
        async with web.openai() as client:
            with held(engine):  # nothing ends before it is looked at, or cancelled
                quiet = await client.responses.create(**ASK, background=True, extra_body={"seed": 1})
                assert quiet.status in ("queued", "in_progress")
                asked = await web.post("/v1/responses", {**endless, "background": True})
                cancelling = asyncio.create_task(client.responses.cancel(asked.json["id"]))
                record = f"{outside.tag}:req:{asked.json['id'].removeprefix('resp_')}"
                async with asyncio.timeout(60):
                    while await outside.redis.hget(record, "cancel") != b"1":
                        assert not cancelling.done()
                        await asyncio.sleep(0.005)
            assert (await cancelling).status == "cancelled"
        for name, last_type, status in (
            (asked.json["id"], "response.incomplete", "cancelled"),
            (quiet.id, "response.incomplete", "incomplete"),
        ):
            replay = await web.get(f"/v1/responses/{name}?stream=true")
            last = orjson.loads(replay.text.rstrip().rpartition("data: ")[2])
            assert (last["type"], last["response"]["status"]) == (last_type, status)
        await outside.aclose()
        async with asyncio.timeout(60):
            while engine.num_live:
                await asyncio.sleep(0.005)
            leaving = asyncio.create_task(web.post("/v1/responses", endless))
            while not engine.num_live:
                await asyncio.sleep(0.005)
            leaving.cancel()
            while engine.num_live:
                await asyncio.sleep(0.005)

    tried(scenario)


REFUSED = [
    ({"input": []}, "input"), ({}, "input"), ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"), ({"input": "x", "n": 2}, "n"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0]"),
    ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0]"), ({"input": "x", "tools": 1}, "tools"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"), ({"input": "x", "reasoning": "high"}, "reasoning"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice"),
    ({"input": "x", "previous_response_id": 1}, "previous_response_id"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": "x", "background": True, "store": False}, "store"), ({"input": "x", "temperature": 900}, "temperature"),
    ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format"), ({"input": "x " * 900}, "input"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
    ({"input": "x", "max_output_tokens": 10**12}, "max_output_tokens"),
    ({"input": "x", "tools": [{"type": "function", "name": "?"}]}, "tools[0].name"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "", "arguments": ""}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "msg_r0_none"}]}, "input[0].id"),
    ({"input": [{"id": "nothing"}]}, "input[0].id"),
]  # fmt: skip


def test_refusals(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        for body, param in REFUSED:
            for stream in (False, True):
                answer = await web.post("/v1/responses", {**body, "stream": stream})
                assert (answer.status, answer.error["param"]) == (400, param), (body, answer.text)
        for path in ("resp_nobody", "nobody", "resp_"):
            assert (await web.get(f"/v1/responses/{path}")).error["code"] == "not_found"

    tried(scenario)


def test_a_fold_is_the_same_wherever_it_is_cut() -> None:
    note = {"background": True, "model": "m", "created_at": 1}
    events: list[dict[str, Any]] = [
        {"type": "started"},
        {"type": "delta", "text": "He"},
        {"type": "started"},  # another engine takes over
        {"type": "delta", "text": ""},
        {"type": "delta", "text": "llo"},
        {"type": "choice", "finish_reason": "stop"},
        {"type": "done", "state": "completed", "usage": {"prompt_tokens": 1, "completion_tokens": 2}},
    ]

    def folded() -> list[dict[str, Any]]:
        fold = ResponseFold("a", note)
        return [*fold.accepted(), *(item for event in events for item in fold.add(event))]

    assert folded() == folded()
    assert [item["sequence_number"] for item in folded()] == list(range(11))
    assert folded()[-1]["response"]["output"][0]["content"][0]["text"] == "Hello"


ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "strict": False,
}


def test_calls_of_tools_and_their_results(tried: Any) -> None:
    """A call is an item of its own, whole and streamed; its result goes on from the response that has it."""

    async def scenario(web: Web) -> None:
        asked: dict[str, Any] = {**ASK, "input": "What is 3 + 4?", "tools": [ADD], "max_output_tokens": 60}
        forced: Any = {"type": "function", "name": "add"}
        async with web.openai() as client:
            whole = await client.responses.create(**asked, tool_choice=forced)
            (call,) = whole.output
            assert call.type == "function_call" and call.name == "add" and call.status == whole.status == "completed"
            assert set(orjson.loads(call.arguments)) <= {"a", "b"} and whole.tools[0].type == "function"
            again = await client.responses.retrieve(whole.id)
            assert again.output == whole.output, "read anew it is the same call with the same id"
            stream = await client.responses.create(
                **asked, tool_choice="required", parallel_tool_calls=False, stream=True
            )
            events: list[Any] = [event async for event in stream]
            kinds = list(dict.fromkeys(event.type for event in events))
            assert kinds[2:] == [
                *("response.output_item.added", "response.function_call_arguments.delta"),
                *("response.function_call_arguments.done", "response.output_item.done", "response.completed"),
            ]
            deltas = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
            assert events[-1].response.output[0].arguments == deltas
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
            told: Any = {**asked, "input": [result], "max_output_tokens": 8}
            answer = await client.responses.create(**told, previous_response_id=whole.id)
            assert answer.output_text and answer.previous_response_id == whole.id
            spelt = [{"role": "user", "content": asked["input"]}, call.model_dump(), result]
            named = [spelt[0], {"type": "item_reference", "id": call.id}, result]
            same = await client.responses.create(**{**told, "input": named})
            assert same.usage is not None and answer.usage is not None
            assert same.usage.input_tokens == answer.usage.input_tokens, "as if it had been sent back"
            same = await client.responses.create(**{**told, "input": spelt})
            assert same.output_text == answer.output_text and same.usage == same.usage
            assert same.usage is not None and answer.usage is not None
            assert same.usage.input_tokens == answer.usage.input_tokens

    tried(scenario)


def test_a_conversation_goes_on_from_what_is_stored(tried: Any, queue_config: QueueConfig) -> None:
    async def scenario(web: Web) -> None:
        async with web.openai() as client, gateway(queue_config) as other, other.openai() as second:
            first = await client.responses.create(**ASK, instructions="Be brief.")
            assert first.output_text
            then = await second.responses.create(**{**ASK, "input": "Again."}, previous_response_id=first.id)
            third = await client.responses.create(**{**ASK, "input": "More."}, previous_response_id=then.id)
            spoken = [
                {"role": "user", "content": "Say hello."},
                {"role": "assistant", "content": first.output_text},
                {"role": "user", "content": "Again."},
                {"role": "assistant", "content": then.output_text},
                {"role": "user", "content": "More."},
            ]
            spelt = await client.responses.create(**{**ASK, "input": spoken})
            assert spelt.usage is not None and third.usage is not None
            assert (spelt.usage.input_tokens, spelt.output_text) == (third.usage.input_tokens, third.output_text)
            raw = (await web.get(f"/v1/responses/{third.id}")).json
            assert "turns" not in raw, "what is kept for later is not part of the response"
            await client.responses.delete(first.id)
            passing = await client.responses.create(**ASK, store=False)
            long: dict[str, Any] = {"max_output_tokens": 300, "extra_body": {"logit_bias": {"2": -100}}}
            running = await client.responses.create(**{**ASK, **long}, background=True)
            for name, code in (
                (first.id, "previous_response_not_found"),
                (passing.id, "previous_response_not_found"),
                ("nonsense", "previous_response_not_found"),
                (running.id, "previous_response_not_completed"),
            ):
                with pytest.raises(openai.BadRequestError) as refused:
                    await client.responses.create(**ASK, previous_response_id=name)
                assert (refused.value.code, refused.value.param) == (code, "previous_response_id")
            await client.responses.cancel(running.id)
            assert (await client.responses.retrieve(then.id)).output_text == then.output_text

    tried(scenario)


def test_each_turn_is_kept_once_and_as_long_as_it_is_needed(tried: Any, queue_config: QueueConfig) -> None:
    async def scenario(web: Web) -> None:
        words = ("alpha", "bravo", "charly", "delta", "echo")
        async with web.openai() as client, aioredis.Redis.from_url(queue_config.redis_url, protocol=2) as server:
            ids: list[Any] = [None]
            for number, word in enumerate(words):
                ttl: Any = {"ttl_ms": 60_000 * (number + 1)}
                made = await client.responses.create(
                    input=f"Say {word}.",
                    model="smollm2-135m",
                    temperature=0,
                    max_output_tokens=4,
                    previous_response_id=ids[-1],
                    extra_body=ttl,
                )
                ids.append(made.id)
            notes = await server.keys("*:note:*")
            turns = await server.keys("*:doc:turn:*")
            assert len(notes) == len(turns) == len(words)
            kept = [await server.get(key) for key in notes] + [b"".join(await server.hvals(key)) for key in turns]
            assert [sum(text.count(f"Say {word}.".encode()) for text in kept) for word in words] == [1] * len(words)
            longest = max([await server.pttl(key) for key in notes])
            assert min([await server.pttl(key) for key in turns]) > longest, "a turn is there while a note names it"
            for name in ids[1:-1]:
                await client.responses.delete(name)
            spelt = await client.responses.create(
                **{**ASK, "input": "And?", "max_output_tokens": 4}, previous_response_id=ids[-1]
            )
            assert spelt.usage is not None and spelt.usage.input_tokens > 8 * len(words), "with all that was said"
            await server.delete(turns[0])
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(**ASK, previous_response_id=ids[-1])
            assert refused.value.code == "previous_response_not_found"

    tried(scenario)


def test_text_and_calls_are_items_in_their_order() -> None:
    note = {
        "background": False,
        "model": "m",
        "created_at": 1,
        "tools": [ADD],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
    }
    text = (
        'Well. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "add", "arguments": {}}'
    )
    events: list[dict[str, Any]] = [
        {"type": "started", "tool_parser": "hermes"},
        *({"type": "delta", "text": letter} for letter in f"{text} so"),
        {"type": "choice", "finish_reason": "length"},
        {"type": "done", "state": "completed", "usage": {"prompt_tokens": 1, "completion_tokens": 2}},
    ]
    fold = ResponseFold("a", note)
    folded = [*fold.accepted(), *(item for event in events for item in fold.add(event))]
    assert [item["sequence_number"] for item in folded] == list(range(len(folded)))
    output = folded[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call", "message"]
    assert [item["status"] for item in output] == ["completed", "completed", "completed", "incomplete"]
    assert len({item["id"] for item in output}) == 4
    done = [item for item in folded if item["type"] == "response.output_item.done"]
    assert [(item["output_index"], item["item"]) for item in done] == list(enumerate(output))
    added = [item for item in folded if item["type"] == "response.output_item.added"]
    assert [item["item"]["id"] for item in added] == [item["id"] for item in output]
