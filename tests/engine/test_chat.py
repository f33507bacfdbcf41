"""Conversations: the template's text against transformers, for every field."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from transformers import AutoTokenizer

from pagemill.engine.chat import Chat
from pagemill.engine.errors import RequestError
from pagemill.engine.llm import LLM
from pagemill.engine.loader import resolve_model
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.tokenizer import Tokenizer
from pagemill.ingest.schema import RequestBody, encode_body, parse_body
from tests.engine.conversations import CALL, HISTORY, WEATHER, user, with_template


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("smollm2-135m").path


# -- what the template is given ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        user("Hi"),
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "客?"},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": " more \n"},
        ],
    ],
)
def test_chat_agrees_with_transformers(tokenizer: Tokenizer, folder: Path, messages: Any) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.apply_chat(Chat(messages)) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": False, "nobody_reads_this": 1}},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
        {"tools": []},
        {"tools": [WEATHER], "tool_choice": "none"},
    ],
    ids=str,
)
def test_every_field_reaches_the_template_as_in_transformers(tools: Tokenizer, theirs: Any, fields: Any) -> None:
    messages = copy.deepcopy(HISTORY)
    messages[1]["content"] = ""
    messages[1]["tool_calls"][0]["function"]["arguments"] = {"town": "Ulm", "day": 1}  # type: ignore[index]
    given = None if fields.get("tool_choice") == "none" else fields.get("tools") or None
    expected = theirs.apply_chat_template(
        messages,
        tools=given,
        add_generation_prompt=fields.get("add_generation_prompt", not fields.get("continue_final_message")),
        continue_final_message=fields.get("continue_final_message", False),
        return_dict=False,
        **fields.get("chat_template_kwargs", {}),
    )
    chat = Chat(HISTORY, **fields)
    assert tools.apply_chat(chat) == expected
    text = tools.decode(expected, skip_special_tokens=False)
    assert "<think>Look it up.</think><tool_call>get_weather {" in text
    assert text.endswith("It rains") == bool(fields.get("continue_final_message"))


def test_names_keep_their_order_on_the_way_to_the_model(tools: Tokenizer) -> None:
    """Through the queue too, where bodies are otherwise sorted."""
    body = {"messages": HISTORY, "tools": [WEATHER], "metadata": {"b": "1", "a": "2"}}
    offline = tools.apply_chat(Chat(HISTORY, [WEATHER]))
    sent = parse_body(encode_body(body, 1 << 20), 1 << 20)
    assert sent.chat is not None and tools.apply_chat(sent.chat) == offline
    text = tools.decode(offline, skip_special_tokens=False)
    assert '"name": "get_weather", "description"' in text and text.index('"town"') < text.index('"day"')
    assert encode_body(dict(reversed(body.items())), 1 << 20) == encode_body(body, 1 << 20)


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (" \n", {}),
        (None, {}),
        ("null", {}),
        ('{"contents": "cut off in mid', '{"contents": "cut off in mid'),
        ('"escaped string"', '"escaped string"'),
        ("[]", "[]"),
        ("42", "42"),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": 1e999}', '{"a": 1e999}'),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ("[" * 100_000, "[" * 100_000),
        ('{"a":' * 40 + "1" + "}" * 40, '{"a":' * 40 + "1" + "}" * 40),
    ],
    ids=lambda value: str(value)[:30],
)
def test_arguments_are_an_object_where_they_are_one(tools: Tokenizer, arguments: Any, seen: Any) -> None:
    """And else the text that the model wrote: a conversation that holds a broken call must be able to go on."""
    call = {"function": {"name": "f", "arguments": arguments}}
    chat = Chat([*user("x"), {"role": "assistant", "tool_calls": [call]}, *user("go on")])
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == seen
    tools.apply_chat(chat)


def test_an_answer_may_come_back_as_it_was_given(tools: Tokenizer) -> None:
    """With all that clients make of it: nulls, empty lists, the index of a stream's delta."""
    bare = {"role": "assistant", "content": "Yes"}
    more = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": [], "name": None}
    assert Chat([*user("x"), {**bare, **more}]) == Chat([*user("x"), bare])
    left = {"finish_reason": "stop", "reasoning_details": [{}], "thinking_blocks": [], "provider_specific_fields": {}}
    assert Chat([*user("x"), {**bare, **left}]) == Chat([*user("x"), bare])
    with pytest.raises(RequestError, match=r"unknown field 'finish_reason' in messages\[0\]"):
        Chat([{**user("x")[0], **left}])
    assert Chat([{"role": "assistant", "content": None}]) == Chat([{"role": "assistant", "content": ""}])
    nulls = {"function": {**CALL["function"], "description": None}, "type": "function", "id": "call_1", "x": None}  # type: ignore[dict-item]
    assert Chat([{"role": "assistant", "tool_calls": [nulls]}]) == Chat([{"role": "assistant", "tool_calls": [CALL]}])
    part = {"type": "text", "text": "Yes", "annotations": None}
    assert Chat([{"role": "assistant", "content": [part], "parsed": None}]) == Chat([bare])
    streamed = {"role": "assistant", "content": "", "tool_calls": [{**CALL, "index": 0}]}
    assert Chat([streamed]) == Chat([{"role": "assistant", "tool_calls": [CALL]}])


def test_a_developer_is_the_system_where_the_template_knows_none(tokenizer: Tokenizer) -> None:
    def asked(role: str) -> Chat:
        return Chat([{"role": role, "content": "Be brief."}, *user("hi")])

    assert tokenizer.apply_chat(asked("developer")) == tokenizer.apply_chat(asked("system"))
    knows = Tokenizer(with_template("{% if messages[0].role == 'developer' %}{{ messages[0].role }}{% endif %}"))
    assert knows.decode(knows.apply_chat(asked("developer"))) == "developer"


def test_a_chat_is_a_copy() -> None:
    messages, tools = copy.deepcopy(HISTORY), [copy.deepcopy(WEATHER)]
    chat = Chat(messages, tools)
    messages[0]["content"] = "other"
    tools[0]["function"]["parameters"]["properties"].clear()  # type: ignore[index]
    assert chat == Chat(HISTORY, [WEATHER])


def test_content_may_be_a_list_of_text_parts() -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "input_text", "text": "this?"}]
    assert Chat(user(parts)) == Chat(user("What is this?"))


def test_a_model_with_several_templates() -> None:
    named = Tokenizer(with_template({"default": "plain", "tool_use": "for tools"}))
    assert named.decode(named.apply_chat(Chat(user("hi")))) == "plain"
    assert named.decode(named.apply_chat(Chat(user("hi"), [WEATHER]))) == "for tools"
    other = Tokenizer(with_template({"rag": "documents"}))
    with pytest.raises(RequestError, match="no default"):
        other.apply_chat(Chat(user("hi")))


# -- through the engine --------------------------------------------------------------------------------------------


def test_the_offline_api_takes_every_field(folder: Path) -> None:
    llm = LLM("smollm2-135m", threads=1, max_model_len=256, num_blocks_override=64)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    begun = [*user("Say: one two three"), {"role": "assistant", "content": "One two"}]
    (answer,) = llm.chat(begun, greedy, continue_final_message=True)
    ids = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        begun, continue_final_message=True, return_dict=False
    )
    assert answer.prompt_token_ids == ids
    assert not answer.outputs[0].text.startswith("One two"), "what the prompt holds is not in the answer"
    (plain,) = llm.chat(
        user("hi"), greedy, add_generation_prompt=False, chat_template_kwargs={"enable_thinking": False}
    )
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(plain.prompt_token_ids or []).endswith("user\nhi<|im_end|>\n")
    for fields, param in (
        ({"tools": [{}]}, "tools[0].type"),
        ({"chat_template": "x"}, "chat_template"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ):
        with pytest.raises(RequestError) as caught:
            llm.chat(user("hi"), greedy, **fields)  # type: ignore[arg-type]
        assert caught.value.param == param


def test_json_of_a_whole_conversation_round_trips() -> None:
    body = {"messages": HISTORY, "tools": [WEATHER], "chat_template_kwargs": {"b": 1, "a": [None, 2.5, "x"]}}
    assert parse_body(orjson.dumps(body), 1 << 20) == RequestBody.from_mapping(json.loads(json.dumps(body)))
