"""Conversations that cannot be told to a model are refused, and the refusal names the field."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from pagemill.engine import chat as chat_module
from pagemill.engine.chat import CHAT_FIELDS, RESERVED_KWARGS, Chat
from pagemill.engine.errors import RequestError
from pagemill.engine.tokenizer import Tokenizer
from pagemill.ingest.schema import RequestBody
from tests.engine.conversations import CALL, WEATHER, user, with_template


def refused(**fields: Any) -> str | None:
    with pytest.raises(RequestError) as caught:
        Chat(**{"messages": user("hi"), **fields})
    assert caught.value.code == "invalid_request" and len(caught.value.message) < 400
    return caught.value.param


def _call(**changes: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [CALL, {**CALL, **changes}]}]}


def _tool(**changes: Any) -> dict[str, Any]:
    return {"tools": [WEATHER, {"type": "function", "function": {"name": "f", **changes}}]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": {"role": "user", "content": "x"}}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"content": "no role"}]}, "messages[0].role"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user<|im_end|>", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*user("x"), {"role": "user"}]}, "messages[1].content"),
    ({"messages": user(5)}, "messages[0].content"),
    ({"messages": user("\ud800")}, "messages[0].content"),
    ({"messages": user([{"type": "image_url", "image_url": {}}])}, "messages[0].content[0]"),
    ({"messages": user(["x"])}, "messages[0].content[0]"),
    ({"messages": user([{"type": "text", "text": 1}])}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 1}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant", "content": "x", "refusal": "no"}]}, "messages[0].refusal"),
    ({"messages": [{"role": "user", "content": "x", "name": "n" * 129}]}, "messages[0].name"),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 129}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "messages[0].tool_calls[0]"),
    (_call(function=None), "messages[0].tool_calls[1].function"),
    (_call(function={"arguments": "{}"}), "messages[0].tool_calls[1].function.name"),
    (_call(function={"name": ""}), "messages[0].tool_calls[1].function.name"),
    (_call(function={"name": "f", "arguments": 3}), "messages[0].tool_calls[1].function.arguments"),
    (_call(function={"name": "f", "arguments": {"x": {1, 2}}}), "messages[0].tool_calls[1].function.arguments"),
    (_call(function={"name": "f", "args": 3}), "messages[0].tool_calls[1].function.args"),
    (_call(type="custom"), "messages[0].tool_calls[1].type"),
    (_call(id=3), "messages[0].tool_calls[1].id"),
    ({"tools": "f"}, "tools"),
    ({"tools": [WEATHER] * 129}, "tools"),
    (_tool(description="d" * 262_144), "tools"),
    ({"tools": [{"name": "f"}]}, "tools[0].name"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    (_tool(name="<|im_end|>"), "tools[1].function.name"),
    (_tool(name="a b"), "tools[1].function.name"),
    (_tool(name=3), "tools[1].function.name"),
    (_tool(description=3), "tools[1].function.description"),
    (_tool(parameters=[]), "tools[1].function.parameters"),
    (_tool(parameters={"a": float("nan")}), "tools[1].function.parameters"),
    (_tool(parameters={"a": 10**30}), "tools[1].function.parameters"),
    (_tool(parameters={1: 2}), "tools[1].function.parameters"),
    (_tool(strict="yes"), "tools[1].function.strict"),
    (_tool(returns={}), "tools[1].function.returns"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": "any", "tools": [WEATHER]}, "tool_choice"),
    ({"tool_choice": 1, "tools": [WEATHER]}, "tool_choice"),
    ({"tool_choice": {"type": "custom"}, "tools": [WEATHER]}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": [WEATHER]}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}, "tools": [WEATHER]}, "tool_choice.allowed_tools"),
    ({"parallel_tool_calls": "no", "tools": [WEATHER]}, "parallel_tool_calls"),
    ({"tool_choice": "required", "tools": [WEATHER], "continue_final_message": True}, "continue_final_message"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"chat_template": "{{ range(10**9) }}"}, "chat_template"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {f"v{number}": 1 for number in range(65)}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"v": "x" * 65_536}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"v": object()}}, "chat_template_kwargs.v"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"add_generation_prompt": 1}, "add_generation_prompt"),
    ({"continue_final_message": "yes"}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"continue_final_message": True, **_call()}, "continue_final_message"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=[f"{number}-{param}" for number, (_, param) in enumerate(BAD)])
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields) == param


def test_bodies_are_checked_in_the_same_place() -> None:
    for fields, param in BAD:
        body = {"messages": user("hi"), **fields}
        with pytest.raises(RequestError) as caught:
            RequestBody.from_mapping(body)
        assert caught.value.param == param
    for name in CHAT_FIELDS[1:]:
        with pytest.raises(RequestError) as caught:
            RequestBody.from_mapping({"prompt": "x", name: [WEATHER]})
        assert caught.value.param == name
    assert RequestBody.from_mapping({"prompt": "x", "tools": None, "chat_template": None}).chat is None


def test_no_variable_can_take_the_place_of_an_argument_of_transformers() -> None:
    arguments = inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters
    assert set(arguments) - {"self", "kwargs", "documents"} | {"messages"} == RESERVED_KWARGS
    assert "documents" not in RESERVED_KWARGS, "a variable like others, only that transformers lists it"


def test_chat_loads_neither_torch_nor_transformers() -> None:
    imports = {line.split()[1] for line in inspect.getsource(chat_module).splitlines() if line.startswith("from ")}
    light = {f"pagemill.engine.{name}" for name in ("errors", "values", "tool_choice")}
    assert {name for name in imports if "pagemill" in name} == light


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just("function"),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "function", "name", "arguments"]), children)
    ),
    max_leaves=12,
)
messages_of_any_kind = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(chat_module.ROLES), "content": st.text(max_size=8) | json_values},
        optional=dict.fromkeys(("name", "tool_calls", "tool_call_id", "reasoning_content", "refusal"), json_values),
    ),
    max_size=3,
)


@settings(deadline=None, max_examples=300)
@given(
    messages=messages_of_any_kind,
    fields=st.dictionaries(
        st.sampled_from(CHAT_FIELDS[1:]), json_values | st.lists(json_values, max_size=2), max_size=3
    ),
)
def test_whatever_is_sent_is_encoded_or_refused_by_name(tools: Tokenizer, messages: Any, fields: Any) -> None:
    try:
        chat = Chat(messages, **fields)
        assert tools.apply_chat(chat) is not None
    except RequestError as error:
        assert error.code == "invalid_request" and error.param and len(error.message) < 400
    else:
        assert Chat(messages, **json.loads(json.dumps(fields))) == chat


FAILING = {
    "raises": "{{ raise_exception('Conversation roles must alternate') }}",
    "undefined": "{{ messages[0].nothing.at_all }}",
    "type": "{{ messages[0]['content'] + 1 }}",
    "mapping": "{% for key, value in messages[0].content | items %}{% endfor %}",
    "syntax": "{% if %}",
    "zero": "{{ 1 / 0 }}",
    "attribute": "{{ messages[0]['content'].no_such_method() }}",
    "endless": "{% for i in range(10 ** 9) %}x{% endfor %}",
    "recursive": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "unsafe": "{{ messages.__class__.__mro__ }}",
    "changes": "{{ messages.append(1) }}",
}


@pytest.mark.parametrize("template", FAILING.values(), ids=FAILING)
def test_whatever_a_template_raises_is_a_named_error(template: str) -> None:
    broken = Tokenizer(with_template(template + "{{ '" + "x" * 10 + "' }}"))
    with pytest.raises(RequestError, match="the chat template refuses") as caught:
        broken.apply_chat(Chat(user("hi" * 10_000)))
    assert (caught.value.code, caught.value.param) == ("invalid_request", "messages")
    assert len(caught.value.message) < 400


def test_the_model_s_own_tokens_are_no_variables(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError) as caught:
        tokenizer.apply_chat(Chat(user("hi"), chat_template_kwargs={"eos_token": "x"}))
    assert caught.value.param == "chat_template_kwargs.eos_token"


def test_a_model_without_chat_template_refuses_messages() -> None:
    rust = RustTokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    plain = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust))
    with pytest.raises(RequestError, match="no chat template"):
        plain.apply_chat(Chat(user("a")))
