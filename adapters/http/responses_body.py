"""Bodies of OpenAI's Responses API as requests of the queue: text and calls of the client's own tools.

What asks for more (hosted tools, stored conversations, other modalities) is refused by name, at whatever value would
change the answer. Items of an earlier answer may be sent back as input, or be named by `previous_response_id`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagemill.adapters.http.responses_items import chat_tools, messages_of
from pagemill.engine.chat import CHAT_FIELDS, Chat
from pagemill.engine.errors import invalid
from pagemill.engine.values import shown

HINTS = frozenset(
    (
        *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("service_tier", "stream_options", "max_tool_calls", "store", "reasoning"),
    )
)
# Accepted at these values only.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled",),
    "include": ([], ["reasoning.encrypted_content"]),  # there is none
}
PASSED = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "logit_bias", "priority", "ttl_ms", "cache_salt", "max_attempts", "flush_ms"),
        *("chat_template_kwargs", "metadata", "structured_outputs", "callback"),
    )
)
_OWN = frozenset(
    (
        *("model", "input", "instructions", "max_output_tokens", "stream", "background", "text", "top_logprobs"),
        *("tools", "tool_choice", "parallel_tool_calls", "previous_response_id"),
    )
)


@dataclass(frozen=True, slots=True)
class AskedResponse:
    """What a body asks for. `fields`: the request of the queue, but for its messages. `messages`: those of `input`.
    `instructions`: the system's, which later responses do not inherit. `previous`: the id of the response to go on
    from. `shown`: what of the body a response object repeats."""

    fields: dict[str, Any]
    messages: list[dict[str, Any]]
    instructions: str | None
    previous: str | None
    shown: dict[str, Any]
    model: str | None
    stream: bool
    background: bool
    store: bool

    def request(self, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The request of the queue. `history`: the conversation before `input`."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return {**self.fields, "messages": [*system, *history, *self.messages]}


def read_response(body: Mapping[str, Any]) -> AskedResponse:
    """Raises `RequestError` naming the field."""
    fields: dict[str, Any] = {}
    for name, value in body.items():
        if not any(name in known for known in (_OWN, HINTS, PASSED, NEUTRAL)):
            raise invalid(f"unknown field {shown(name)}", name[:64])
        if value is None:
            continue
        if name in PASSED:
            fields[name] = value
        elif name in NEUTRAL and not any(value == item for item in NEUTRAL[name]):
            raise invalid(f"{name} is not supported; leave it out", name)
    if not isinstance(body.get("reasoning"), dict | None):
        raise invalid("reasoning must be an object", "reasoning")
    flags = {name: _flag(name, body.get(name)) for name in ("stream", "background")}
    store = body.get("store")
    if store is not None and not isinstance(store, bool):
        raise invalid("store must be true or false", "store")
    if store is False and flags["background"]:
        raise invalid("background needs store: true, since it is asked for later", "store")
    if body.get("top_logprobs") not in (None, 0):
        raise invalid("top_logprobs is not supported here; chat completions have it", "top_logprobs")
    model = body.get("model")
    if model is not None and (not isinstance(model, str) or not 1 <= len(model) <= 256):
        raise invalid("model must be a string of 1 to 256 characters", "model")
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise invalid("instructions must be a string", "instructions")
    limit = body.get("max_output_tokens")
    if limit is not None:
        if type(limit) is not int or limit < 1:
            raise invalid(
                f"max_output_tokens must be an integer of at least 1, got {shown(limit)}", "max_output_tokens"
            )
        fields["max_tokens"] = limit
    text = _text(body.get("text"))
    if text["format"]["type"] != "text":
        fields["response_format"] = _response_format(text["format"])
    previous = body.get("previous_response_id")
    if previous is not None and not isinstance(previous, str):
        raise invalid("previous_response_id must be a string", "previous_response_id")
    messages = messages_of(body.get("input"))
    tools = _tools(body, fields)
    return AskedResponse(
        fields=fields,
        messages=messages,
        instructions=instructions,
        previous=previous,
        shown={
            "background": flags["background"],
            "instructions": instructions,
            "max_output_tokens": limit,
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": previous,
            "reasoning": {"effort": None, "summary": None, **(body.get("reasoning") or {})},
            "service_tier": "default",
            "store": store is not False,
            "temperature": 1.0 if body.get("temperature") is None else body["temperature"],
            "text": text,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": tools,
            "top_p": 1.0 if body.get("top_p") is None else body["top_p"],
            "truncation": "disabled",
            "user": body.get("user"),
        },
        model=model,
        store=store is not False,
        **flags,
    )


def _tools(body: Mapping[str, Any], fields: dict[str, Any]) -> list[Any]:
    """The tools as a response shows them; what the queue wants to know of them is added to `fields`."""
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise invalid("tools must be a list", "tools")
    if tools:
        fields["tools"] = chat_tools(tools)
    for name in ("tool_choice", "parallel_tool_calls"):
        if body.get(name) is not None:
            fields[name] = body[name]
    Chat.from_mapping(
        {"messages": [{"role": "user", "content": ""}], **{n: fields[n] for n in CHAT_FIELDS if n in fields}}
    )
    return tools or []


def _text(value: Any) -> dict[str, Any]:
    if value is None:
        return {"format": {"type": "text"}}
    if not isinstance(value, dict):
        raise invalid("text must be an object", "text")
    for name in value:
        if name not in ("format", "verbosity"):
            raise invalid(f"unknown field {shown(name)} in text", f"text.{name[:64]}")
    given = value.get("format") or {"type": "text"}
    if not isinstance(given, dict) or given.get("type") not in ("text", "json_object", "json_schema"):
        raise invalid("text.format.type must be text, json_object or json_schema", "text.format")
    return {"format": given}


def _response_format(given: dict[str, Any]) -> dict[str, Any]:
    """Chat's spelling of a format, which has the schema one level deeper."""
    if given["type"] != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: item for name, item in given.items() if name != "type"}}


def _flag(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise invalid(f"{name} must be true or false", name)
    return value is True
