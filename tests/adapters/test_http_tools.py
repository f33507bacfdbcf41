"""Tool calls through OpenAI's own client and plain HTTP, with a model whose template knows no tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from pagemill.adapters.http.openai_answers import ChatAnswer
from pagemill.adapters.http.openai_fields import read_chat
from pagemill.ingest.results import Choice, Result
from tests.adapters.http_gateway import HI, Web

MODEL = "smollm2-135m"
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {**NUMBERS, "additionalProperties": False}},
    },
    {"type": "function", "function": {"name": "now"}},
]
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is 3 + 4?"}],
    "tools": TOOLS,
    "temperature": 0,
    "max_tokens": 60,
}
ADD = {"type": "function", "function": {"name": "add"}}


def streamed(frames: list[Any]) -> tuple[list[dict[str, Any]], str, str | None]:
    """Calls, content and the end of a stream of one choice, put together as clients do."""
    calls: list[dict[str, Any]] = []
    content, end = "", None
    for frame in frames[:-1]:
        (choice,) = frame["choices"]
        content += choice["delta"].get("content") or ""
        end = choice["finish_reason"] or end
        for part in choice["delta"].get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(calls) and part["function"]["arguments"] == ""
                calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
            else:
                assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return calls, content, end


def test_a_call_can_be_forced(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        for choice, parallel in (("required", False), (ADD, True)):
            body = {**ASKED, "tool_choice": choice, "parallel_tool_calls": parallel}
            answer = (await web.post("/v1/chat/completions", body)).json["choices"][0]
            assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
            (call,) = answer["message"]["tool_calls"]
            assert call["id"].startswith("call_") and call["type"] == "function"
            assert call["function"]["name"] == "add"
            assert set(json.loads(call["function"]["arguments"])) == {"a", "b"}
            frames = (await web.post("/v1/chat/completions", {**body, "stream": True})).frames
            (same,), content, end = streamed(frames)
            assert (same["function"], content, end) == (call["function"], "", "tool_calls")
            assert frames[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
            history = [*ASKED["messages"], answer["message"]]
            history.append({"role": "tool", "tool_call_id": call["id"], "content": "7"})
            told = await web.post("/v1/chat/completions", {**ASKED, "messages": history, "max_tokens": 8})
            assert told.status == 200 and told.json["choices"][0]["message"]["content"]

    tried(scenario)


def test_several_choices_and_a_limit(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        body = {**ASKED, "tool_choice": ADD, "n": 2, "temperature": 1.5, "seed": 1}
        answer = (await web.post("/v1/chat/completions", body)).json
        ids = [choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]]
        assert len(set(ids)) == 2 and [choice["finish_reason"] for choice in answer["choices"]] == ["tool_calls"] * 2
        short = (await web.post("/v1/chat/completions", {**ASKED, "tool_choice": ADD, "max_tokens": 3})).json
        assert short["choices"][0]["finish_reason"] == "length"
        assert short["choices"][0]["message"]["content"] in (None, ""), "half of a form is shown to nobody"
        cut = (await web.post("/v1/chat/completions", {**ASKED, "tool_choice": ADD, "max_tokens": 14})).json
        (choice,) = cut["choices"]
        assert choice["finish_reason"] == "length" and choice["message"]["tool_calls"][0]["function"]["name"] == "add"
        own = {**ASKED, "tool_choice": ADD, "logprobs": True, "stream": True}
        frames = (await web.post("/v1/chat/completions", own)).frames
        entries = [
            e for f in frames[:-1] if f["choices"][0]["logprobs"] for e in f["choices"][0]["logprobs"]["content"]
        ]
        assert "".join(entry["token"] for entry in entries).startswith('[{"name": "add"'), "of every token"

    tried(scenario)


def test_the_official_client_s_helpers(tried: Any) -> None:
    class Add(BaseModel):
        a: int
        b: int

    async def scenario(web: Web) -> None:
        import openai

        tool: Any = openai.pydantic_function_tool(Add)
        asked: dict[str, Any] = {"model": MODEL, "messages": ASKED["messages"], "tools": [tool], "temperature": 0}
        forced: Any = {"type": "function", "function": {"name": "Add"}}
        async with web.openai() as client:
            parsed = await client.chat.completions.parse(**asked, tool_choice=forced)
            calls = parsed.choices[0].message.tool_calls
            assert calls and isinstance(calls[0].function.parsed_arguments, Add)
            async with client.chat.completions.stream(**asked, tool_choice="required", max_tokens=60) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_completion()
        assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
        message = final.choices[0].message
        assert final.choices[0].finish_reason == "tool_calls" and message.tool_calls
        assert isinstance(message.tool_calls[0].function.parsed_arguments, Add)

    tried(scenario)


def test_what_cannot_be_forced_is_refused_by_name(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
        for fields, param in (
            ({"tool_choice": "any"}, "tool_choice"),
            ({"tool_choice": "required", "tools": None}, "tool_choice"),
            ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
            (
                {
                    "tool_choice": "required",
                    "tools": [{"type": "function", "function": {"name": "f", "parameters": odd}}],
                },
                "tools",
            ),
            ({"tool_choice": ADD, "ignore_eos": True}, "ignore_eos"),
            ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ):
            answer = await web.post("/v1/chat/completions", {**ASKED, **fields})
            assert (answer.status, answer.error["param"]) == (400, param), answer.text

    tried(scenario)


def written(text: str, parser: Any, end: str = "stop", **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """The answer, whole and as chunks, to a request whose model wrote `text`."""
    asked = read_chat({"messages": HI, "tools": TOOLS, **fields})
    choice = Choice(0, text, [1], end, None, tool_parser=parser)
    whole = ChatAnswer(asked, "r1", 0).whole([Result("r1", "completed", [choice], {}, {})], "m")["choices"][0]
    stream = ChatAnswer(asked, "r1", 0)
    events: list[Any] = [{"type": "started", "model": "m", "created": 1000, "tool_parser": parser}]
    events += [{"type": "delta", "index": 0, "text": letter, "token_ids": [1]} for letter in text]
    events.append({"type": "choice", "index": 0, "finish_reason": end, "stop_reason": None})
    return whole, [chunk for event in events for chunk in stream.chunks(0, event)] + ["[DONE]"]


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", 'Yes.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'),
        ("mistral", 'Yes.[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]'),
    ],
)
def test_a_call_that_the_model_makes_by_itself(parser: Any, text: str) -> None:
    """Whole and streamed answers tell the same, ids included, and no part of a marker is ever content."""
    whole, frames = written(text, parser)
    calls, content, end = streamed(frames)
    assert whole["message"]["tool_calls"] == calls and whole["message"]["content"] == content == "Yes."
    assert calls[0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    assert whole["finish_reason"] == end == "tool_calls"
    assert (len(calls[0]["id"]) == 9) is (parser == "mistral")


def test_text_that_is_no_call() -> None:
    for parser, text in (("hermes", "Write <tool_call> so"), (None, '{"name": "add"}'), ("hermes", "plain <")):
        whole, frames = written(text, parser)
        assert streamed(frames) == ([], text, "stop") and whole["finish_reason"] == "stop"
        assert whole["message"] == {"role": "assistant", "refusal": None, "content": text}
    whole, frames = written('<tool_call>{"name": "add", "arguments": {}}</tool_call>', "hermes", tool_choice="none")
    assert "tool_calls" not in whole["message"] and not streamed(frames)[0], "it may not call"
    whole, frames = written('<tool_call>{"name": "add", "arguments": {"a"', "hermes", end="length")
    assert whole["finish_reason"] == "length" == streamed(frames)[2]
