"""Bodies of OpenAI's Responses API as requests of the queue: text in, text out.

What asks for more (tools, stored conversations, reasoning, other modalities) is refused by name, at whatever value
would change the answer. Items of an earlier answer may be sent back as input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagemill.engine.errors import invalid
from pagemill.engine.values import shown

_PARTS = ("input_text", "output_text", "text")
HINTS = frozenset(
    (
        *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("service_tier", "parallel_tool_calls", "stream_options", "max_tool_calls", "store"),
    )
)
# Accepted at these values only.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "tools": ([],),
    "tool_choice": ("auto", "none"),
    "truncation": ("disabled",),
    "include": ([],),
    "reasoning": ({},),
}
PASSED = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "logit_bias", "priority", "ttl_ms", "cache_salt", "max_attempts", "flush_ms"),
        *("chat_template_kwargs", "metadata", "structured_outputs"),
    )
)
_OWN = frozenset(
    ("model", "input", "instructions", "max_output_tokens", "stream", "background", "text", "top_logprobs")
)


@dataclass(frozen=True, slots=True)
class AskedResponse:
    """What a body asks for. `fields`: the request of the queue. `shown`: what of it a response object repeats."""

    fields: dict[str, Any]
    shown: dict[str, Any]
    model: str | None
    stream: bool
    background: bool
    store: bool


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
    system = [{"role": "system", "content": instructions}] if instructions is not None else []
    fields["messages"] = [*system, *_messages(body.get("input"))]
    return AskedResponse(
        fields=fields,
        shown={
            "background": flags["background"],
            "instructions": instructions,
            "max_output_tokens": limit,
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": store is not False,
            "temperature": 1.0 if body.get("temperature") is None else body["temperature"],
            "text": text,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0 if body.get("top_p") is None else body["top_p"],
            "truncation": "disabled",
            "user": body.get("user"),
        },
        model=model,
        store=store is not False,
        **flags,
    )


def _messages(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise invalid("input is needed: a string, or a list of messages", "input")
    return [_message(f"input[{number}]", item) for number, item in enumerate(value)]


def _message(where: str, item: Any) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise invalid(f"{where} must be a message", where)
    if item.get("type", "message") != "message":
        raise invalid(f"{where}.type {shown(item['type'])} is not supported; only messages are", f"{where}.type")
    for name in item:
        if name not in ("type", "role", "content", "id", "status", "phase"):
            raise invalid(f"unknown field {shown(name)} in {where}", f"{where}.{name[:64]}")
    content = item.get("content")
    if isinstance(content, list):
        content = [_part(f"{where}.content[{number}]", part) for number, part in enumerate(content)]
    return {"role": item.get("role"), "content": content}


def _part(where: str, part: Any) -> dict[str, Any]:
    if not isinstance(part, dict) or part.get("type") not in _PARTS or not isinstance(part.get("text"), str):
        raise invalid(f"{where} must be a text part; other kinds are not supported", where)
    return {"type": "text", "text": part["text"]}


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
