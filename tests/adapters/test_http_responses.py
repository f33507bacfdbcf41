"""OpenAI's Responses API by OpenAI's client, and its streams resumed anywhere."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import orjson
import pytest

from pagemill.adapters.http.responses_fold import ResponseFold
from pagemill.engine.async_engine import AsyncEngine
from pagemill.ingest.config import QueueConfig
from tests.adapters.http_gateway import Web, gateway

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


def test_cancelling_and_leaving(tried: Any, engine: AsyncEngine) -> None:
    async def scenario(web: Web) -> None:
        endless = {**ASK, "max_output_tokens": 400, "logit_bias": {"2": -100}}
        async with web.openai() as client:
            quiet = await client.responses.create(**ASK, background=True, extra_body={"seed": 1})
            assert quiet.status in ("queued", "in_progress")
            asked = await web.post("/v1/responses", {**endless, "background": True})
            cancelled = await client.responses.cancel(asked.json["id"])
            assert cancelled.status == "cancelled"
        replay = await web.get(f"/v1/responses/{asked.json['id']}?stream=true")
        last = orjson.loads(replay.text.rstrip().rpartition("data: ")[2])
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
        leaving = asyncio.create_task(web.post("/v1/responses", endless))
        async with asyncio.timeout(20):
            while not engine.num_live:
                await asyncio.sleep(0.005)
            leaving.cancel()
            while engine.num_live:
                await asyncio.sleep(0.005)

    tried(scenario)


REFUSED = [
    ({"input": []}, "input"), ({}, "input"), ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
    ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"), ({"input": "x", "n": 2}, "n"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": "x", "background": True, "store": False}, "store"), ({"input": "x", "temperature": 900}, "temperature"),
    ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format"), ({"input": "x " * 900}, "prompt"),
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
