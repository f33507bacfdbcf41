"""A conversation as a prompt: what of OpenAI's chat fields is understood, and the checks on it.

Names are OpenAI's and vLLM's. A client sends its own earlier answers back as history, so what an answer may hold is
accepted in a message: null content, empty `tool_calls`, `refusal: null`. Nothing here knows a model; what the model's
template makes of a conversation is `chat_template`'s business.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

from pagemill.engine.errors import RequestError, invalid
from pagemill.engine.tool_choice import ToolChoice
from pagemill.engine.values import as_integer, as_number, shown

MAX_TOOLS = 128
MAX_TOOL_CALLS = 128  # in one message
MAX_TOOLS_LENGTH = 262_144  # characters of all tools, as JSON
MAX_KWARGS = 64
MAX_KWARGS_LENGTH = 65_536  # characters, as JSON
MAX_NAME = 128  # characters of the name of a tool, an author or a call
MAX_DEPTH = 32

ROLES = ("system", "developer", "user", "assistant", "tool")
CHAT_FIELDS = (
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)

_TOOL_NAME = re.compile(r"[\w.:/-]{1,128}")
_KWARG_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_PART_FIELDS = ("type", "text", "cache_control")  # the last is a hint to other servers, which keep prefixes by it
_TEXT_PARTS = ("text", "input_text")
# What other servers and their clients leave in an answer that comes back as history, and no template reads.
_LEFT_OVER = ("finish_reason", "reasoning_details", "thinking_blocks", "provider_specific_fields")
# Parts of an answer that say nothing to a model, at the values that clients send back unasked.
_EMPTY_PARTS: dict[str, tuple[Any, ...]] = {"refusal": (), "annotations": ([],), "audio": (), "function_call": ()}
# What `apply_chat_template` takes for itself: a variable of that name would change more than the text.
RESERVED_KWARGS = frozenset(
    (
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length", "sanitize_control_tokens"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    )
)


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages to answer. Raises `RequestError("invalid_request")`, naming the field, on whatever is wrong.

    messages: objects with role and content (text or a list of text parts). An assistant's may have `tool_calls`, whose
        arguments reach the template as an object where they are one, and `reasoning_content`; a tool's `tool_call_id`.
        A developer is the system to templates that know none.
    tools: OpenAI's tool objects, for the template to describe. None where there are none, or `tool_choice` is "none".
    tool_choice, parallel_tool_calls: become `choice`, what the answer may do with the tools; None without tools.
    chat_template_kwargs: variables for the template, such as enable_thinking. One that it does not read has no effect.
    add_generation_prompt: whether the template begins an answer; by default, unless continue_final_message.
    continue_final_message: go on in the last message instead of answering it.
    chat_template: refused. A template is a program, and the model's own is the one that it was trained with.

    After the checks all of it is plain JSON, copied: nothing that a caller changes later changes a request.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: InitVar[Any] = None
    parallel_tool_calls: InitVar[Any] = None
    chat_template: InitVar[Any] = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    choice: ToolChoice | None = dataclasses.field(default=None, init=False)

    def __post_init__(self, tool_choice: Any, parallel_tool_calls: Any, chat_template: Any) -> None:
        if chat_template is not None:
            raise invalid("chat_template cannot be sent with a request: the model's own is used", "chat_template")
        messages = _messages(self.messages)
        tools = _tools(self.tools)
        parallel = _flag("parallel_tool_calls", parallel_tool_calls, default=True)
        choice = ToolChoice.read(tools, tool_choice, parallel)
        continues = _flag("continue_final_message", self.continue_final_message, default=False)
        fixed: dict[str, Any] = {
            "messages": messages,
            "tools": None if choice is None else tools,
            "choice": choice,
            "chat_template_kwargs": _kwargs(self.chat_template_kwargs),
            "add_generation_prompt": _flag("add_generation_prompt", self.add_generation_prompt, default=not continues),
            "continue_final_message": continues,
        }
        if continues:
            if choice is not None and choice.is_forced:
                raise invalid(
                    "continue_final_message cannot be combined with a tool_choice that forces a call",
                    "continue_final_message",
                )
            if fixed["add_generation_prompt"]:
                raise invalid(
                    "continue_final_message cannot be combined with add_generation_prompt", "continue_final_message"
                )
            if "tool_calls" in messages[-1]:
                raise invalid(
                    "continue_final_message cannot go on in a message with tool_calls", "continue_final_message"
                )
        for name, value in fixed.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_mapping(cls, fields: Mapping[str, Any]) -> Chat:
        """Make a chat from the flat fields of a request body, which must have `messages`."""
        return cls(**{name: fields[name] for name in CHAT_FIELDS if name in fields})

    @property
    def text(self) -> str:
        """All that was written in it, to estimate its length before it is rendered."""
        return "\n".join(strings([self.messages, self.tools]))


def strings(value: object) -> Iterator[str]:
    """Every string in plain JSON, keys of objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Plain JSON with every string changed, keys of objects too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


def _kind(value: object) -> str:
    """The JSON name of a value's type, for messages that a producer in any language understands."""
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", dict: "an object"}
    if value is None:
        return "null"
    return names.get(type(value), "a list" if isinstance(value, list) else type(value).__name__)


def _flag(name: str, value: object, *, default: bool) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid(f"{name} must be true or false, got {_kind(value)}", name)
    return value


def _object(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise invalid(f"{name} must be an object, got {_kind(value)}", name)
    return value


def _list(name: str, value: object) -> Sequence[Any]:
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise invalid(f"{name} must be a list, got {_kind(value)}", name)
    return value


def _check_fields(name: str, value: Mapping[str, Any], fields: tuple[str, ...]) -> None:
    """Raise for a field that is not known. One that is null says nothing, and clients send it back."""
    for field, item in value.items():
        if field not in fields and item is not None:
            raise invalid(f"unknown field {shown(field)} in {name}", f"{name}.{str(field)[:64]}")


def _string(name: str, value: object, longest: int | None = None) -> str:
    if not isinstance(value, str):
        raise invalid(f"{name} must be a string, got {_kind(value)}", name)
    if longest is not None and not 1 <= len(value) <= longest:
        raise invalid(f"{name} must have 1 to {longest} characters, got {len(value)}", name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(f"{name} is not valid Unicode text", name) from error
    return str(value)


def _plain(name: str, value: Any, depth: int = 0) -> Any:
    """A copy of JSON made in Python. `name` is the field that holds it."""
    if depth > MAX_DEPTH:
        raise invalid(f"{name} is nested deeper than {MAX_DEPTH} levels", name)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _string(name, value)
    if isinstance(value, Mapping):
        return {_key(name, key): _plain(name, item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, item, depth + 1) for item in value]
    integer = as_integer(value)
    if integer is not None:
        if abs(integer) >= 1 << 64:
            raise invalid(f"{name} holds an integer beyond 64 bits", name)
        return integer
    number = as_number(value)
    if number is None or number - number != 0:  # neither infinite nor NaN, which JSON has no name for
        raise invalid(f"{name} must be JSON, which {shown(value)} is not", name)
    return number


def _key(name: str, key: object) -> str:
    if not isinstance(key, str):
        raise invalid(f"{name} must have strings as keys, got {_kind(key)}", name)
    return _string(name, key)


def _messages(value: object) -> list[dict[str, Any]]:
    given = _list("messages", value)
    if not given:
        raise invalid("messages must not be empty", "messages")
    return [_message(f"messages[{number}]", message) for number, message in enumerate(given)]


def _message(where: str, value: object) -> dict[str, Any]:
    message = _object(where, value)
    role = message.get("role")
    if role not in ROLES:
        raise invalid(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    fields: tuple[str, ...] = ("role", "content", "name")
    if role == "assistant":
        fields += ("tool_calls", "reasoning_content", "reasoning", *_LEFT_OVER, *_EMPTY_PARTS)
    elif role == "tool":
        fields += ("tool_call_id",)
    _check_fields(where, message, fields)
    given = {name: item for name, item in message.items() if item is not None}
    for name in given.keys() & _EMPTY_PARTS.keys():
        if given[name] not in _EMPTY_PARTS[name]:
            raise invalid(f"{where}.{name} is not supported; leave it out", f"{where}.{name}")
    known: dict[str, Any] = {"role": role}
    content = given.get("content")
    # An answer may have been a tool call only, or nothing. Templates add its content to other text.
    known["content"] = "" if content is None and role == "assistant" else _content(f"{where}.content", content)
    if "name" in given:
        known["name"] = _string(f"{where}.name", given["name"], MAX_NAME)
    if "tool_call_id" in given:
        known["tool_call_id"] = _string(f"{where}.tool_call_id", given["tool_call_id"], MAX_NAME)
    for name in ("reasoning_content", "reasoning"):
        if name in given:
            known[name] = _string(f"{where}.{name}", given[name])
    if given.get("tool_calls", []) != []:
        known["tool_calls"] = _tool_calls(f"{where}.tool_calls", given["tool_calls"])
    return known


def _content(name: str, value: object) -> str:
    if isinstance(value, str):
        return _string(name, value)
    if not isinstance(value, list | tuple):
        raise invalid(f"{name} must be a string or a list of text parts, got {_kind(value)}", name)
    texts = []
    for number, part in enumerate(value):
        where = f"{name}[{number}]"
        if not isinstance(part, Mapping) or part.get("type") not in _TEXT_PARTS:
            raise invalid(f"{where} must be a text part; other kinds are not supported", where)
        if any(field not in _PART_FIELDS and item is not None for field, item in part.items()):
            raise invalid(f"{where} must hold type and text and nothing else", where)
        texts.append(_string(f"{where}.text", part.get("text")))
    return "".join(texts)


def _tool_calls(name: str, value: object) -> list[dict[str, Any]]:
    given = _list(name, value)
    if len(given) > MAX_TOOL_CALLS:
        raise invalid(f"{name} may hold at most {MAX_TOOL_CALLS} calls, got {len(given)}", name)
    return [_tool_call(f"{name}[{number}]", call) for number, call in enumerate(given)]


def _tool_call(where: str, value: object) -> dict[str, Any]:
    call = _object(where, value)
    _check_fields(where, call, ("id", "type", "function", "index"))  # `index` is left from the deltas of a stream
    if (call.get("type") or "function") != "function":
        raise invalid(f'{where}.type must be "function"', f"{where}.type")
    function = _object(f"{where}.function", call.get("function"))
    _check_fields(f"{where}.function", function, ("name", "arguments"))
    known: dict[str, Any] = {} if call.get("id") is None else {"id": _string(f"{where}.id", call["id"], MAX_NAME)}
    arguments = _arguments(f"{where}.function.arguments", function.get("arguments"))
    name = _string(f"{where}.function.name", function.get("name"), MAX_NAME)  # as the model wrote it
    return {**known, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(name: str, value: object) -> Any:
    """Arguments as the object that templates expect. OpenAI sends them as JSON text, as the model wrote it: text that
    is no object stays what it is, since a conversation that holds it must be able to go on."""
    if not isinstance(value, str):
        return {} if value is None else _plain(name, _object(name, value))
    text = _string(name, value)
    if not text.strip():
        return {}
    try:
        parsed = json.loads(text, parse_constant=_refuse_constant)
        return _plain(name, parsed) if isinstance(parsed, dict) else {} if parsed is None else text
    except (ValueError, RecursionError, RequestError):
        return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _tools(value: object) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    given = _list("tools", value)
    if len(given) > MAX_TOOLS:
        raise invalid(f"tools may hold at most {MAX_TOOLS} tools, got {len(given)}", "tools")
    tools = [_tool(f"tools[{number}]", tool) for number, tool in enumerate(given)]
    length = len(json.dumps(tools, ensure_ascii=False))
    if length > MAX_TOOLS_LENGTH:
        raise invalid(f"tools may have at most {MAX_TOOLS_LENGTH} characters as JSON, got {length}", "tools")
    return tools or None  # an empty list would make many templates write a heading without tools


def _tool(where: str, value: object) -> dict[str, Any]:
    tool = _object(where, value)
    other = invalid(f'{where}.type must be "function"', f"{where}.type")
    if tool.get("type", "function") != "function":
        raise other
    _check_fields(where, tool, ("type", "function"))
    if "type" not in tool:
        raise other
    name = f"{where}.function"
    function = {key: item for key, item in _object(name, tool.get("function")).items() if item is not None}
    _check_fields(name, function, ("name", "description", "parameters", "strict"))
    own = function.get("name")
    if not isinstance(own, str) or not _TOOL_NAME.fullmatch(own):
        raise invalid(
            f"{name}.name must have 1 to {MAX_NAME} letters, digits and _ . : / -, got {shown(own)}", f"{name}.name"
        )
    if "description" in function:
        _string(f"{name}.description", function["description"])
    if "parameters" in function:
        _object(f"{name}.parameters", function["parameters"])
    if not isinstance(function.get("strict", False), bool):
        raise invalid(f"{name}.strict must be true or false, got {_kind(function['strict'])}", f"{name}.strict")
    # In the order that they came in: templates write it out, and models know the usual one.
    return {"type": "function", "function": {key: _plain(f"{name}.{key}", item) for key, item in function.items()}}


def _kwargs(value: object) -> dict[str, Any]:
    field = "chat_template_kwargs"
    if value is None:
        return {}
    given = _object(field, value)
    if len(given) > MAX_KWARGS:
        raise invalid(f"{field} may hold at most {MAX_KWARGS} variables, got {len(given)}", field)
    for name in given:
        if not isinstance(name, str) or not _KWARG_NAME.fullmatch(name):
            raise invalid(f"{field} must have names of variables as keys, got {shown(name)}", field)
        if name in RESERVED_KWARGS:
            raise invalid(f"{field}.{name} is not a variable that a request may set", f"{field}.{name}")
    known = {name: _plain(f"{field}.{name}", item) for name, item in given.items()}
    length = len(json.dumps(known, ensure_ascii=False))
    if length > MAX_KWARGS_LENGTH:
        raise invalid(f"{field} may have at most {MAX_KWARGS_LENGTH} characters as JSON, got {length}", field)
    return known
