"""The bodies of requests and answers as JSON schemas, for the OpenAPI document.

Bounds are those that the checks use, so that what the schema allows is refused only for what no schema can say: another
model, a prompt that is too long, fields that exclude each other.
"""

from __future__ import annotations

from typing import Any

from pagemill.adapters.http.batches import ENDPOINTS
from pagemill.adapters.http.openai_fields import HINTS, MAX_PROMPTS, NEUTRAL
from pagemill.adapters.http.responses_body import HINTS as RESPONSE_HINTS
from pagemill.adapters.http.responses_body import NEUTRAL as RESPONSE_NEUTRAL
from pagemill.adapters.http.responses_body import PASSED as RESPONSE_PASSED
from pagemill.engine.chat import ROLES
from pagemill.engine.sampling_params import (
    MAX_BEAMS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from pagemill.ingest.schema import MAX_METADATA_KEY, MAX_METADATA_PAIRS, MAX_METADATA_VALUE, MAX_TOKEN_ID, MAX_TTL_MS

Schema = dict[str, Any]


def integer(low: int, high: int | None = None) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, **({} if high is None else {"maximum": high})}


def number(low: float, high: float, **more: float) -> Schema:
    return {"type": ["number", "null"], "minimum": low, "maximum": high, **more}


def text(longest: int | None = None, shortest: int = 0) -> Schema:
    return {"type": ["string", "null"], "minLength": shortest, **({} if longest is None else {"maxLength": longest})}


def closed(properties: Schema, *required: str) -> Schema:
    """An object without other fields."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def shown(properties: Schema) -> Schema:
    """An object of an answer: these fields are there, others may be."""
    return {"type": "object", "properties": properties, "required": list(properties)}


BOOLEAN: Schema = {"type": ["boolean", "null"]}
ANYTHING: Schema = {}
TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
METADATA: Schema = {
    "type": ["object", "null"],
    "maxProperties": MAX_METADATA_PAIRS,
    "propertyNames": {"minLength": 1, "maxLength": MAX_METADATA_KEY},
    "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
}
STOP: Schema = {
    "anyOf": [
        {"type": "null"},
        {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
        {
            "type": "array",
            "maxItems": MAX_STOP_STRINGS,
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
        },
    ]
}

# Parameters of decoding and of the queue, which every generating route takes.
COMMON: dict[str, Schema] = {
    "temperature": number(0, 100),
    "top_p": number(0, 1, exclusiveMinimum=0),
    "top_k": integer(-1, 2**31 - 1),
    "min_p": number(0, 1),
    "n": integer(1, MAX_CHOICES),
    "seed": integer(-(2**63), 2**64 - 1),
    "max_tokens": integer(1, 2**31 - 1),
    "min_tokens": integer(0, 2**31 - 1),
    "stop": STOP,
    "stop_token_ids": {"type": ["array", "null"], "maxItems": MAX_STOP_TOKEN_IDS, "items": TOKEN_ID},
    "ignore_eos": BOOLEAN,
    "skip_special_tokens": BOOLEAN,
    "include_stop_str_in_output": BOOLEAN,
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(0, 100, exclusiveMinimum=0),
    "logit_bias": {
        "type": ["object", "null"],
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "allowed_token_ids": {"type": ["array", "null"], "items": TOKEN_ID},
    "bad_words": {"type": ["array", "null"], "items": {"type": "string"}},
    "prompt_logprobs": integer(0, MAX_LOGPROBS),
    "structured_outputs": {"type": ["object", "null"]},
    "response_format": {
        "type": ["object", "null"],
        "required": ["type"],
        "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
    },
    "beam_width": integer(1, MAX_BEAMS),
    "length_penalty": number(-10, 10),
    "early_stopping": {"enum": [True, False, "never", None]},
    "flush_ms": integer(0, 60_000),
    "watch_ms": integer(1000, 3_600_000),
    "token_ids": BOOLEAN,
    "cache_salt": text(256),
    "priority": integer(0, 2),
    "ttl_ms": integer(1, MAX_TTL_MS),
    "max_attempts": integer(1, 100),
    "metadata": METADATA,
    "callback": {"type": ["object", "null"]},
}
MODEL = text(256, 1)
KEY = text(480, 1)
STREAMING: dict[str, Schema] = {
    "model": MODEL,
    "stream": BOOLEAN,
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": BOOLEAN, "include_obfuscation": BOOLEAN},
        "additionalProperties": False,
        "description": "needs stream: true",
    },
    "idempotency_key": KEY,
}
_TEXT_PART = closed({"type": {"const": "text"}, "text": {"type": "string"}}, "type", "text")
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {
            "anyOf": [
                {"type": ["string", "null"]},
                {
                    "type": "array",
                    "items": closed({"type": {"const": "text"}, "text": {"type": "string"}}, "type", "text"),
                },
            ]
        },
        "name": text(128, 1),
        "tool_calls": {"type": ["array", "null"]},
        "tool_call_id": text(128, 1),
    },
}
CHAT: dict[str, Schema] = {
    "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
    "tools": {"type": ["array", "null"], "items": {"type": "object"}},
    "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required", None]}, {"type": "object"}]},
    "parallel_tool_calls": BOOLEAN,
    "chat_template_kwargs": {"type": ["object", "null"]},
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
}


def _asking_nothing(hints: Any, neutral: Any) -> dict[str, Schema]:
    """Hints, and fields that are taken at the values that ask for nothing."""
    taken = {name: {"description": "has no effect"} for name in sorted(hints)}
    return {**taken, **{name: {"enum": [None, *values]} for name, values in neutral.items()}}


_OPENAI = {**COMMON, **STREAMING, **_asking_nothing(HINTS, NEUTRAL)}
COMPLETION = closed(
    {
        **_OPENAI,
        "prompt": {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"type": "string", "minLength": 1}},
                {"type": "array", "minItems": 1, "items": TOKEN_ID},
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": MAX_PROMPTS,
                    "items": {"type": "array", "minItems": 1, "items": TOKEN_ID},
                },
            ]
        },
        "max_tokens": integer(0, 2**31 - 1),
        "logprobs": integer(0, MAX_LOGPROBS),
        "echo": BOOLEAN,
        "best_of": integer(1, MAX_CHOICES),
    },
    "prompt",
)
CHAT_COMPLETION = closed(
    {
        **_OPENAI,
        **CHAT,
        "max_completion_tokens": integer(1, 2**31 - 1),
        "logprobs": BOOLEAN,
        "top_logprobs": integer(0, MAX_LOGPROBS),
        "echo": {"enum": [False, None]},
        "include_reasoning": BOOLEAN,
        "best_of": integer(1, MAX_CHOICES),
    },
    "messages",
)
RESPONSE = closed(
    {
        **{name: COMMON[name] for name in COMMON if name in RESPONSE_PASSED},
        **_asking_nothing(RESPONSE_HINTS, RESPONSE_NEUTRAL),
        "chat_template_kwargs": CHAT["chat_template_kwargs"],
        "model": MODEL,
        "input": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "object"}}]},
        "instructions": text(),
        "max_output_tokens": integer(1, 2**31 - 1),
        "stream": BOOLEAN,
        "background": BOOLEAN,
        "store": BOOLEAN,
        "tools": {"type": ["array", "null"], "items": {"type": "object"}},
        "tool_choice": CHAT["tool_choice"],
        "parallel_tool_calls": BOOLEAN,
        "previous_response_id": text(),
        "text": {"type": ["object", "null"]},
        "top_logprobs": {"enum": [0, None]},
        "idempotency_key": KEY,
    },
    "input",
)
REQUEST = closed(
    {
        **COMMON,
        **CHAT,
        "messages": {"type": ["array", "null"], "items": _MESSAGE},
        "prompt": text(None, 1),
        "prompt_token_ids": {"type": ["array", "null"], "minItems": 1, "items": TOKEN_ID},
        "model": MODEL,
        "stream": BOOLEAN,
        "logprobs": integer(0, MAX_LOGPROBS),
        "tenant": text(128, 1),
        "on_disconnect": {"enum": ["continue", "cancel", None]},
        "idempotency_key": KEY,
    }
)
BATCH = closed(
    {
        "input_file_id": {"type": "string"},
        "endpoint": {"enum": list(ENDPOINTS)},
        "completion_window": {"const": "24h"},
        "metadata": METADATA,
        "output_expires_after": ANYTHING,
    },
    "input_file_id",
    "endpoint",
    "completion_window",
)
FILE = closed({"purpose": {"enum": ["batch", "user_data"]}, "file": {"type": "string", "format": "binary"}}, "file")
ERROR = shown(
    {
        "error": shown(
            {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            }
        )
    }
)
