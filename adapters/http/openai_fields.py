"""OpenAI's request bodies as requests of the queue.

Names mean what they mean there. An unknown name is refused, as OpenAI does and as the queue does: a misspelt limit that
is ignored would be paid for. Names that ask for nothing (who the user is, how the answer is to be cached) are accepted
and change nothing; names that ask for something that is not here are accepted at the value that does not ask for it.
A null is the same as leaving a name out. Names of vLLM and of the queue's protocol are accepted beside OpenAI's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagemill.engine.chat import CHAT_FIELDS, Chat
from pagemill.engine.errors import invalid
from pagemill.engine.sampling_params import SAMPLING_FIELDS
from pagemill.engine.tool_choice import ToolChoice
from pagemill.engine.values import shown

MAX_PROMPTS = 128
_KINDS: dict[type, str] = {bool: "a boolean", int: "a number", float: "a number", str: "a string", dict: "an object"}

_READ = frozenset(("model", "stream", "stream_options"))
# Taken over as they are.
_QUEUE_FIELDS = frozenset(
    (
        *("watch_ms", "flush_ms", "token_ids", "cache_salt", "priority", "ttl_ms", "max_attempts", "metadata"),
        "callback",
    )
)
PASSED = (frozenset(SAMPLING_FIELDS) | _QUEUE_FIELDS) - {"best_of"}
# Hints: what they ask for is left to the server in OpenAI's words too.
HINTS = frozenset(
    (
        *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "store", "service_tier"),
        *("reasoning_effort", "verbosity", "prediction"),
    )
)
# Accepted at these values only.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    "lora_request": (),
}
_STREAM_OPTIONS = {"include_usage": False, "include_obfuscation": False, "continuous_usage_stats": False}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body asks for. `bodies`: one request of the queue for each prompt, without model and tenant.

    `n`: choices of each prompt. `echoed`: the prompts' texts, in front of each answer. `no_tokens`: only the echo is
    wanted. `logprobs`, `token_ids`, `prompt_logprobs`: these are shown; `include_reasoning`: so is the model's
    reasoning. `model`: as asked for. `tool_choice`: what the answer may do with the tools that it has.
    """

    bodies: list[dict[str, Any]]
    n: int
    model: str | None
    stream: bool
    include_usage: bool
    logprobs: bool = False
    token_ids: bool = False
    prompt_logprobs: bool = False
    echoed: list[str] | None = None
    no_tokens: bool = False
    tool_choice: ToolChoice | None = None
    include_reasoning: bool = True


def read_completion(body: Mapping[str, Any]) -> Asked:
    """A body of `/v1/completions`. Raises `RequestError` naming the field."""
    common, fields = _split(body, own=("prompt", "echo", "max_tokens", "best_of"))
    prompts = _prompts(body.get("prompt"))
    n = fields.get("n", 1)
    if body.get("best_of") not in (None, n):
        raise invalid(f"best_of must equal n, got {shown(body['best_of'])}", "best_of")
    echoed, no_tokens, prompt_logprobs = None, False, fields.get("prompt_logprobs") is not None
    max_tokens = body.get("max_tokens")
    if _flag("echo", body.get("echo")):
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise invalid("echo needs prompts given as text", "echo")
        echoed = [str(prompt) for prompt in prompts]
        no_tokens = type(max_tokens) is int and max_tokens == 0
        if _is_wanted(fields.get("logprobs")):
            fields.setdefault("prompt_logprobs", fields["logprobs"])
    if max_tokens is not None:
        fields["max_tokens"] = 1 if no_tokens else max_tokens
    shared = {**fields, "stream": common.stream}
    bodies = [{"prompt" if isinstance(item, str) else "prompt_token_ids": item, **shared} for item in prompts]
    return Asked(
        bodies=bodies,
        n=n if type(n) is int else 1,
        model=common.model,
        stream=common.stream,
        include_usage=common.include_usage,
        logprobs=_is_wanted(fields.get("logprobs")),
        token_ids=fields.get("token_ids") is True,
        prompt_logprobs=prompt_logprobs,
        echoed=echoed,
        no_tokens=no_tokens,
    )


def read_chat(body: Mapping[str, Any]) -> Asked:
    """A body of `/v1/chat/completions`. Raises `RequestError` naming the field."""
    own = (*CHAT_FIELDS, "logprobs", "top_logprobs", "max_tokens", "max_completion_tokens", "echo", "best_of")
    common, fields = _split(body, own=(*own, "include_reasoning"))
    if body.get("messages") is None:
        raise invalid("messages is needed", "messages")
    if _flag("echo", body.get("echo")):
        raise invalid("echo is for completions: the template's text is not shown", "echo")
    n = fields.get("n", 1)
    if body.get("best_of") not in (None, n):
        raise invalid(f"best_of must equal n, got {shown(body['best_of'])}", "best_of")
    fields |= {name: body[name] for name in CHAT_FIELDS if body.get(name) is not None}
    tool_choice = Chat.from_mapping(fields).choice if "tools" in fields else None
    limits = {name: body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None}
    if len(limits) == 2 and limits["max_tokens"] != limits["max_completion_tokens"]:
        raise invalid("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
    for name, limit in limits.items():
        if type(limit) is not int or limit < 1:
            raise invalid(f"{name} must be an integer of at least 1, got {shown(limit)}", name)
        fields["max_tokens"] = limit
    logprobs = _flag("logprobs", body.get("logprobs"))
    top = body.get("top_logprobs")
    if top is not None and not logprobs and (type(top) is not int or top != 0):
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    if logprobs:
        if top is not None and (type(top) is not int or not 0 <= top <= 20):
            raise invalid(f"top_logprobs must be an integer in [0, 20], got {shown(top)}", "top_logprobs")
        fields["logprobs"] = top or 0
    return Asked(
        bodies=[{**fields, "stream": common.stream}],
        n=n if type(n) is int else 1,
        model=common.model,
        stream=common.stream,
        include_usage=common.include_usage,
        logprobs=logprobs,
        token_ids=fields.get("token_ids") is True,
        prompt_logprobs=fields.get("prompt_logprobs") is not None,
        tool_choice=tool_choice,
        include_reasoning=body.get("include_reasoning") is None
        or _flag("include_reasoning", body["include_reasoning"]),
    )


@dataclass(frozen=True, slots=True)
class _Common:
    model: str | None
    stream: bool
    include_usage: bool


def _split(body: Mapping[str, Any], own: tuple[str, ...]) -> tuple[_Common, dict[str, Any]]:
    """What every route reads, and the fields that are taken over. `own`: names that the route reads itself."""
    fields: dict[str, Any] = {}
    for name, value in body.items():
        if name not in own and not any(name in known for known in (_READ, HINTS, PASSED, NEUTRAL)):
            raise invalid(f"unknown field {shown(name)}", name[:64])
        if value is None or name in own:
            continue
        if name in PASSED:
            fields[name] = value
        elif name in NEUTRAL and not any(type(value) is type(item) and value == item for item in NEUTRAL[name]):
            raise invalid(f"{name} is not supported; leave it out", name)
    model = body.get("model")
    if model is not None and (not isinstance(model, str) or not 1 <= len(model) <= 256):
        raise invalid("model must be a string of 1 to 256 characters", "model")
    stream = _flag("stream", body.get("stream"))
    return _Common(model, stream, _include_usage(body.get("stream_options"), stream)), fields


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise invalid(f"stream_options must be an object, got {_kind(options)}", "stream_options")
    if not stream:
        raise invalid("stream_options needs stream: true", "stream_options")
    for name, value in options.items():
        if name not in _STREAM_OPTIONS:
            raise invalid(f"unknown field {shown(name)} in stream_options", f"stream_options.{name[:64]}")
        _flag(f"stream_options.{name}", value)
    if options.get("continuous_usage_stats"):
        raise invalid("continuous_usage_stats is not supported; leave it out", "stream_options.continuous_usage_stats")
    return options.get("include_usage") is True


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One prompt or several: text, a list of texts, token ids, or a list of lists of them."""
    if prompt is None:
        raise invalid("prompt is needed: a string, a list of strings, token ids, or a list of lists of them", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise invalid(f"prompt must be a string or a list, got {_kind(prompt)}", "prompt")
    if not prompt:
        raise invalid("prompt must not be empty", "prompt")
    if all(type(item) is int for item in prompt):
        return [prompt]
    if not (all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt)):
        raise invalid("prompt must hold strings only, token ids only, or lists of token ids only", "prompt")
    if not all(prompt):
        raise invalid("prompt must not hold an empty prompt", "prompt")
    if len(prompt) > MAX_PROMPTS:
        raise invalid(f"prompt may hold at most {MAX_PROMPTS} prompts, got {len(prompt)}", "prompt")
    return prompt


def _is_wanted(logprobs: Any) -> bool:
    """Whether log-probabilities are asked for: 0 means those of the tokens alone."""
    return logprobs is not None and logprobs is not False


def _flag(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise invalid(f"{name} must be true or false, got {_kind(value)}", name)
    return value is True


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else _KINDS.get(type(value), "null")
