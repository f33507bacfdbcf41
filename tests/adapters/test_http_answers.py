"""Events folded into OpenAI's chunks, without an engine: what real ones rarely send."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.adapters.http.openai_answers import ChatAnswer, CompletionAnswer
from pagemill.adapters.http.openai_fields import read_chat, read_completion
from pagemill.adapters.http.openai_logprobs import CompletionLogprobs, chat_content
from pagemill.engine.errors import RequestError
from tests.adapters.http_gateway import HI

STARTED = {"type": "started", "created": 5000, "model": "m"}


def delta(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "delta", "index": 0, "text": text, "token_ids": [1], "logprobs": None, **more}


def entry(piece: bytes, logprob: float | None = -0.5) -> dict[str, Any]:
    token = {"token": piece.decode("utf-8", "replace"), "token_id": 1, "logprob": logprob, "bytes": list(piece)}
    return {**token, "top_logprobs": [token]}


def test_a_second_engine_begins_nothing_anew() -> None:
    answer = ChatAnswer(read_chat({"messages": HI, "stream": True}), "a", 9000)
    end = {"type": "choice", "index": 0, "finish_reason": "stop", "stop_reason": None}
    events = [STARTED, delta("He"), {**STARTED, "created": 7000}, delta(""), delta("y"), end, end]
    chunks = [chunk for event in events for chunk in answer.chunks(0, event)]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""}, {"content": "He"}, {"content": "y"}, {},
    ]  # fmt: skip
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert {chunk["created"] for chunk in chunks} == {5}


@pytest.mark.parametrize(
    "event",
    [
        {"type": "rewind", "index": 0, "to_offset": 1},
        {"type": "done", "state": "expired", "error": {"code": "deadline_exceeded", "message": "late"}},
        {"type": "done", "state": "failed"},
    ],
)
def test_what_did_not_complete_is_an_error(event: dict[str, Any]) -> None:
    answer = CompletionAnswer(read_completion({"prompt": "x", "stream": True}), "a", 0)
    answer.chunks(0, STARTED)
    assert answer.chunks(0, {"type": "choice", "index": 0, "finish_reason": "cancelled", "stop_reason": None}) == []
    assert answer.chunks(0, {"type": "of a later version"}) == []
    with pytest.raises(RequestError):
        answer.chunks(0, event)


def test_parts_of_characters_and_impossible_tokens() -> None:
    euro = "€".encode()
    shape = CompletionLogprobs()
    entries = [entry(b"a"), entry(euro[:1]), entry(euro[1:]), entry(b"b", None)]
    whole = [shape.part(entries[:2]), shape.part(entries[2:])]
    assert [name for part in whole for name in part["tokens"]] == ["a", "bytes:\\xe2", "bytes:\\x82\\xac", "b"]
    assert [offset for part in whole for offset in part["text_offset"]] == [0, 1, 1, 2]
    assert whole[1]["token_logprobs"] == [-0.5, -9999.0] and chat_content(entries)[3]["logprob"] == -9999.0
    assert "token_id" not in chat_content(entries)[0]


def test_an_echo_waits_for_the_log_probabilities_of_its_prompt() -> None:
    """Choice 1 may speak first, and the prompt's own come with choice 0."""
    asked = read_completion({"prompt": "ab", "echo": True, "logprobs": 1, "n": 2, "stream": True})
    answer = CompletionAnswer(asked, "a", 0)
    assert answer.chunks(0, STARTED) == []
    assert answer.chunks(0, delta("x", index=1, logprobs=[entry(b"x")])) == []
    first = delta("y", logprobs=[entry(b"y")], prompt_logprobs=[None, entry(b"b")])
    choices = [chunk["choices"][0] for chunk in answer.chunks(0, first)]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "ab"), (1, "ab"), (1, "x"), (0, "y")]
    assert choices[0]["logprobs"]["tokens"] == ["a", "b"] and choices[3]["logprobs"]["text_offset"] == [2]
