"""The request body: strict parsing of what producers send, with a named error for everything that is wrong.

`parse_body` reads bytes from the wire, `RequestBody.from_mapping` a mapping made in Python; both end in the same
checks, so a client refuses exactly what an engine would. What depends on the model (vocabulary, length) is the
engine's to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import orjson

from pagemill.engine.chat import CHAT_FIELDS, Chat
from pagemill.engine.errors import RequestError, invalid
from pagemill.engine.sampling_params import SAMPLING_FIELDS, SamplingParams
from pagemill.engine.values import as_integer, as_number, shown
from pagemill.ingest.callback import Callback

DEFAULT_TENANT = "default"
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY = 64  # characters
MAX_METADATA_VALUE = 512  # characters
MAX_DEPTH = 32
MAX_TTL_MS = 604_800_000
BYTES_A_TOKEN = 4  # of English text, with the usual vocabularies
MAX_TOKEN_ID = 2**31 - 1

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PROMPTS = ("prompt", "messages", "prompt_token_ids")


class UnreadableBody(RequestError):
    """The bytes are no JSON text at all: the request is refused and its entry kept among the dead letters."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid_request", message, param="body")


def _text(name: str, value: Any, low: int, high: int) -> str:
    if not isinstance(value, str):
        raise invalid(f"{name} must be a string, got {_kind(value)}", name)
    if not low <= len(value) <= high:
        raise invalid(f"{name} must have {low} to {high} characters, got {len(value)}", name)
    return value


def _whole(name: str, value: Any, low: int, high: int) -> int:
    integer = as_integer(value)
    if integer is None:
        raise invalid(f"{name} must be an integer, got {_kind(value)}", name)
    if not low <= integer <= high:
        raise invalid(f"{name} must be in [{low}, {high}], got {shown(value)}", name)
    return integer


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise invalid(f"{name} must be true or false, got {_kind(value)}", name)
    return value


def _kind(value: Any) -> str:
    """The JSON name of a value's type, for messages that a producer in any language understands."""
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", dict: "an object"}
    return (
        "null" if value is None else names.get(type(value), "a list" if isinstance(value, list) else "something else")
    )


def check_tenant(value: Any) -> str:
    if not isinstance(value, str) or not _TENANT.fullmatch(value):
        raise invalid("tenant may hold letters, digits and . _ - and at most 128 characters", "tenant")
    return value


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise invalid(f"metadata must be an object, got {_kind(value)}", "metadata")
    if len(value) > MAX_METADATA_PAIRS:
        raise invalid(f"metadata may hold at most {MAX_METADATA_PAIRS} pairs, got {len(value)}", "metadata")
    for key, item in value.items():
        if not isinstance(key, str) or not 0 < len(key) <= MAX_METADATA_KEY:
            raise invalid(f"metadata keys must be strings of 1 to {MAX_METADATA_KEY} characters", "metadata")
        _text(f"metadata.{key}", item, 0, MAX_METADATA_VALUE)
    return dict(value)


def _prompt_token_ids(value: Any) -> list[int]:
    name = "prompt_token_ids"
    if not isinstance(value, list):
        raise invalid(f"{name} must be a list of integers, got {_kind(value)}", name)
    if not value:
        raise invalid(f"{name} must not be empty", name)
    for number, token_id in enumerate(value):
        if type(token_id) is not int:
            raise invalid(f"{name}[{number}] must be an integer, got {_kind(token_id)}", name)
        if not 0 <= token_id <= MAX_TOKEN_ID:
            raise invalid(f"{name}[{number}] must be a token id, got {shown(token_id)}", name)
    return value


def _prompt(value: Any) -> str:
    if not isinstance(value, str):
        raise invalid(f"prompt must be a string, got {_kind(value)}", "prompt")
    if not value:
        raise invalid("prompt must not be empty", "prompt")
    return value


def _on_disconnect(name: str, value: Any) -> str:
    if value not in ("continue", "cancel"):
        raise invalid('on_disconnect must be "continue" or "cancel"', name)
    return str(value)


_OPTIONS: dict[str, Callable[[str, Any], Any]] = {
    "model": lambda name, value: _text(name, value, 1, 256),
    "stream": _flag,
    "flush_ms": lambda name, value: _whole(name, value, 0, 60_000),
    "token_ids": _flag,
    "tenant": lambda _, value: check_tenant(value),
    "cache_salt": lambda name, value: _text(name, value, 0, 256),
    "priority": lambda name, value: _whole(name, value, 0, 2),
    "ttl_ms": lambda name, value: _whole(name, value, 1, MAX_TTL_MS),
    "max_attempts": lambda name, value: _whole(name, value, 1, 100),
    "idempotency_key": lambda name, value: _text(name, value, 1, 512),
    "on_disconnect": _on_disconnect,
    "watch_ms": lambda name, value: _whole(name, value, 1000, 3_600_000),
    "callback": lambda _, value: Callback.from_value(value),
    "metadata": lambda _, value: _metadata(value),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBody:
    """A request that has passed every check that needs no model. Exactly one of the three prompts is set.

    `flush_ms` and `ttl_ms` are milliseconds; `ttl_ms` and `max_attempts` are None where the queue's setting decides.
    """

    prompt: str | None = None
    chat: Chat | None = None
    prompt_token_ids: list[int] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    model: str | None = None
    stream: bool = True
    flush_ms: int = 25
    token_ids: bool = False
    tenant: str = DEFAULT_TENANT
    cache_salt: str = ""
    priority: int = 1
    ttl_ms: int | None = None
    max_attempts: int | None = None
    idempotency_key: str | None = None
    on_disconnect: str = "continue"
    watch_ms: int = 30_000
    callback: Callback | None = None
    metadata: dict[str, str] | None = None

    @property
    def watch_lease_ms(self) -> int | None:
        """For how long it may go on with nobody watching it. None: for ever."""
        return self.watch_ms if self.on_disconnect == "cancel" else None

    @property
    def stored_callback(self) -> bytes:
        """The callback as a request's record keeps it; empty where there is none."""
        return b"" if self.callback is None else self.callback.stored(self.metadata)

    @property
    def estimated_tokens(self) -> int:
        """About how many tokens the prompt has: for the queue's books, where no tokenizer is at hand."""
        if self.prompt_token_ids is not None:
            return len(self.prompt_token_ids)
        text = self.chat.text if self.chat is not None else self.prompt or ""
        return 1 + len(text.encode(errors="replace")) // BYTES_A_TOKEN

    @classmethod
    def from_mapping(cls, body: Mapping[str, Any]) -> RequestBody:
        """Check a body. A null means the default. Raises `RequestError("invalid_request")`, naming the field."""
        fields: dict[str, Any] = {}
        sampling: dict[str, Any] = {}
        for name, value in body.items():
            if name in SAMPLING_FIELDS:
                sampling[name] = value
            elif name not in _OPTIONS and name not in _PROMPTS and name not in CHAT_FIELDS:
                shown = name if isinstance(name, str) and len(name) <= 64 else f"{str(name)[:64]}..."
                raise invalid(f"unknown field {shown!r}", shown)
            elif value is None:
                continue
            elif name in _OPTIONS:
                fields[name] = _OPTIONS[name](name, value)
        given = [name for name in _PROMPTS if body.get(name) is not None]
        if len(given) != 1:
            found = "none of them" if not given else " and ".join(given)
            raise invalid(
                f"exactly one of prompt, messages and prompt_token_ids is needed, got {found}",
                (given or ["prompt"])[-1],
            )
        if given == ["messages"]:
            fields["chat"] = Chat.from_mapping(body)
        else:
            for name in CHAT_FIELDS:
                if body.get(name) is not None:
                    raise invalid(f"{name} needs messages, got {given[0]}", name)
            fields[given[0]] = (_prompt if given == ["prompt"] else _prompt_token_ids)(body[given[0]])
        return cls(params=SamplingParams.from_mapping(sampling), **fields)


def parse_body(data: bytes, max_bytes: int) -> RequestBody:
    """Read a body from the wire. Raises `RequestError`: `too_large`, or `invalid_request` (what, and where)."""
    check_size(len(data), max_bytes)
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise UnreadableBody(f"the body is not UTF-8: byte {error.start} cannot be read") from None
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise UnreadableBody(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise invalid(f"the body must be a JSON object, got {_kind(body)}", "body")
    _check_depth(body)
    return RequestBody.from_mapping(body)


def encode_body(body: Mapping[str, Any], max_bytes: int) -> bytes:
    """Check a body made in Python and write it as JSON. Raises `RequestError` as an engine would, before sending."""
    return check_and_encode(body, max_bytes)[1]


def check_and_encode(body: Mapping[str, Any], max_bytes: int) -> tuple[RequestBody, bytes]:
    """`encode_body`, and what the body says."""
    _check_depth(body)
    checked = RequestBody.from_mapping(body)
    given = {name: value for name, value in body.items() if value is not None}
    try:
        # Sorted, so that the same request has the same bytes: idempotency keys compare bodies. Not so where the order
        # of names is seen by the model.
        ordered = {name: orjson.Fragment(orjson.dumps(given[name], _plain)) for name in CHAT_FIELDS if name in given}
        data = orjson.dumps({**given, **ordered}, _plain, orjson.OPT_SORT_KEYS)
    except TypeError:
        for name, value in given.items():
            try:
                orjson.dumps(value, _plain)
            except TypeError as error:
                raise invalid(f"{name} cannot be written as JSON: {error}", name) from None
        raise
    check_size(len(data), max_bytes)
    return checked, data


def _plain(value: Any) -> Any:
    """What is no JSON but has passed the checks: NumPy's numbers, sets and arrays. Raises `TypeError`."""
    if isinstance(value, Set):
        return sorted(value)
    if isinstance(value, Collection) and not isinstance(value, Mapping | bytes):
        return list(value)
    integer = as_integer(value)
    number = as_number(value) if integer is None else integer
    if number is None:
        raise TypeError(f"a {type(value).__name__} is none of its types")
    return number


def check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise RequestError("too_large", f"the body has {size} bytes, at most {max_bytes} are allowed", param="body")


def _check_depth(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        nested = (item.values() if isinstance(item, Mapping) else item for item in level)
        level = [child for items in nested for child in items if isinstance(child, Mapping | list | tuple) and child]
        if not level:
            return
    raise invalid(f"the body is nested deeper than {MAX_DEPTH} levels", "body")
