"""Reasoning over HTTP: in messages, deltas, items of responses and bills, with a model that was asked to write some."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pagemill.adapters.http.openai_answers import ChatAnswer
from pagemill.adapters.http.openai_fields import read_chat
from pagemill.adapters.http.responses_fold import ResponseFold
from pagemill.adapters.http.responses_items import messages_of
from pagemill.ingest.results import Choice, Result
from tests.adapters.http_gateway import Web

# SmolLM2 repeats it: " like it.</think>yes"
ASKED: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Repeat this exactly: <think>I like it.</think>yes"},
        {"role": "assistant", "content": "<think>I"},
    ],
    "continue_final_message": True,
    "temperature": 0,
    "max_tokens": 30,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "now"}}]


@pytest.fixture
def thinking(tried: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A scenario's engine reads reasoning, which its template does not tell it to."""
    limits = dataclasses.replace(engine._parts.limits, reasoning_parser="qwen3")
    monkeypatch.setattr(engine, "_parts", dataclasses.replace(engine._parts, limits=limits))
    return tried


def put_together(frames: list[Any]) -> dict[str, str]:
    """What a client has of each field of a stream's deltas."""
    found: dict[str, str] = {}
    for frame in frames[:-1]:
        for choice in frame["choices"]:
            for name, text in choice["delta"].items():
                if name != "role" and isinstance(text, str):
                    found[name] = found.get(name, "") + text
    return found


def test_reasoning_stands_beside_the_content(thinking: Any) -> None:
    async def scenario(web: Web) -> None:
        whole = (await web.post("/v1/chat/completions", ASKED)).json
        message, usage = whole["choices"][0]["message"], whole["usage"]
        assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("like it.",) * 2 + ("yes",)
        details = usage["completion_tokens_details"]
        assert 0 < details["reasoning_tokens"] < usage["completion_tokens"]
        streamed = await web.post(
            "/v1/chat/completions", {**ASKED, "stream": True, "stream_options": {"include_usage": True}}
        )
        told = put_together(streamed.frames)
        assert told == {"reasoning": "like it.", "reasoning_content": "like it.", "content": "yes"}
        assert streamed.frames[-2]["usage"]["completion_tokens_details"] == details
        for stream in (False, True):
            hidden = await web.post("/v1/chat/completions", {**ASKED, "include_reasoning": False, "stream": stream})
            assert "like" not in hidden.text and "yes" in hidden.text
        cut = (await web.post("/v1/chat/completions", {**ASKED, "max_tokens": 3})).json["choices"][0]
        assert cut["message"]["content"] is None and cut["message"]["reasoning"].startswith("like")
        wrong = await web.post("/v1/chat/completions", {**ASKED, "include_reasoning": "no"})
        assert wrong.status == 400 and wrong.error["param"] == "include_reasoning"

    thinking(scenario)


def test_structure_is_about_the_answer(thinking: Any) -> None:
    async def scenario(web: Web) -> None:
        body = {**ASKED, "structured_outputs": {"regex": "[0-9]{3}"}, "n": 2}
        answer = (await web.post("/v1/chat/completions", body)).json
        for choice in answer["choices"]:
            message = choice["message"]
            assert message["reasoning"] == "like it." and len(message["content"]) == 3 and message["content"].isdigit()
        said = "Say: <think>Hm.</think> Say: <think>Hm.</think> Say: <think>Hm.</think>"
        asked = {"messages": [{"role": "user", "content": said}], "temperature": 0, "max_tokens": 80}
        asked["structured_outputs"] = {"regex": "yes|no"}
        (choice,) = (await web.post("/v1/chat/completions", asked)).json["choices"]
        assert choice["message"]["reasoning"] and choice["message"]["content"] in ("yes", "no")

    thinking(scenario)


def test_events_and_records_have_the_text_as_it_was_written(thinking: Any) -> None:
    async def scenario(web: Web) -> None:
        native = await web.post("/v1/requests", ASKED)
        async with web.session.get(f"{web.url}/v1/requests/{native.json['id']}/events") as events:
            text = (await events.read()).decode()
        assert '"reasoning_parser":"deepseek_r1"' in text and '"reasoning_tokens":' in text
        record = (await web.get(f"/v1/requests/{native.json['id']}")).json
        assert record["choices"][0]["reasoning_parser"] == "deepseek_r1"
        assert record["choices"][0]["text"] == " like it.</think>yes", "as the model wrote it"

    thinking(scenario)


def written(text: str, end: str = "stop", **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """The answer, whole and as chunks, to a request whose model wrote `text`."""
    asked = read_chat({"messages": [{"role": "user", "content": "?"}], **fields})
    parsers: dict[str, Any] = {"reasoning_parser": "qwen3", **({"tool_parser": "hermes"} if "tools" in fields else {})}
    choice = Choice(0, text, [1], end, None, **parsers)
    whole = ChatAnswer(asked, "r1", 0).whole([Result("r1", "completed", [choice], {}, {})], "m")["choices"][0]
    stream = ChatAnswer(asked, "r1", 0)
    events: list[Any] = [{"type": "started", "model": "m", "created": 1000, **parsers}]
    events += [{"type": "delta", "index": 0, "text": letter, "token_ids": [1]} for letter in text]
    events.append({"type": "choice", "index": 0, "finish_reason": end, "stop_reason": None})
    return whole, [chunk for event in events for chunk in stream.chunks(0, event)] + ["[DONE]"]


def test_reasoning_and_calls_of_one_answer() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    whole, frames = written(f"<think>Perhaps {call}?</think>\n\n{call}", tools=TOOLS)
    message = whole["message"]
    assert message["reasoning"] == f"Perhaps {call}?" == put_together(frames)["reasoning"]
    assert message["content"] is None and whole["finish_reason"] == "tool_calls"
    assert [each["function"]["name"] for each in message["tool_calls"]] == ["now"]
    named = [part for frame in frames[:-1] for part in frame["choices"][0]["delta"].get("tool_calls", ())]
    assert named[0]["id"] == message["tool_calls"][0]["id"]
    whole, frames = written("No thought.")
    assert whole["message"] == {"role": "assistant", "refusal": None, "content": "No thought."}
    assert put_together(frames) == {"content": "No thought."}


def test_responses_tell_of_it_and_take_it_back() -> None:
    note = {"background": False, "model": "m", "created_at": 1, "tools": []}
    usage = {"prompt_tokens": 1, "completion_tokens": 9, "reasoning_tokens": 4}
    events: list[dict[str, Any]] = [
        {"type": "started", "reasoning_parser": "qwen3"},
        *({"type": "delta", "text": letter} for letter in "<think>\nHm.\n</think>\n\nYes."),
        {"type": "choice", "finish_reason": "stop"},
        {"type": "done", "state": "completed", "usage": usage},
    ]
    fold = ResponseFold("a", note)
    folded = [*fold.accepted(), *(item for event in events for item in fold.add(event))]
    thought, message = folded[-1]["response"]["output"]
    assert thought["type"] == "reasoning" and thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["type"] == "message" and message["content"][0]["text"] == "Yes."
    assert thought["status"] == message["status"] == "completed"
    assert folded[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    deltas = [item for item in folded if item["type"] == "response.reasoning_text.delta"]
    assert "".join(item["delta"] for item in deltas) == "Hm." and {item["item_id"] for item in deltas} == {"rs_a"}
    (done,) = [item for item in folded if item["type"] == "response.reasoning_text.done"]
    assert (done["text"], done["output_index"], done["content_index"]) == ("Hm.", 0, 0)
    (answer,) = messages_of([thought, message])
    assert answer == {
        "role": "assistant",
        "content": [{"type": "text", "text": "Yes."}],
        "reasoning": "Hm.",
    }
