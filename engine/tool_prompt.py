"""Tools for models whose chat template knows nothing of them.

What the template would write is written into the messages instead, in the form that Hermes models made common: the
tools in the system message, calls between `<tool_call>` tags, results between `<tool_response>` tags in a user's turn.
A template that has a place for one of these gets it as it is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pagemill.engine.tool_choice import ToolChoice

_Message = Mapping[str, Any]

_TOOLS = re.compile(r"\btools\b")
_TOOL_ROLE = re.compile(r"""['"]tool['"]|ipython|\btool_responses?\b""")
_SHORT_IDS = "[TOOL_CALLS]"
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_INTRODUCTION = "You can call the following tools. Each is described by a JSON object on a line of its own."
_HOW = (
    "To call a tool, write its name and its arguments as a JSON object between these tags, and nothing else:\n"
    '<tool_call>\n{"name": "name of the tool", "arguments": {"argument": "value"}}\n</tool_call>\n'
    "If no tool is needed, answer in plain text."
)
_HOW_FORCED = (
    "Answer with calls of tools only, as a JSON list of their names and arguments:\n"
    '[{"name": "name of the tool", "arguments": {"argument": "value"}}]'
)


def knows_tools(template: str) -> bool:
    """Whether a template has a place for the tools themselves."""
    return _TOOLS.search(template) is not None


def with_tools(
    messages: Sequence[_Message], tools: Sequence[Mapping[str, Any]] | None, choice: ToolChoice | None, template: str
) -> list[_Message]:
    """The messages as `template` can show them. `tools`: those to describe here; None where the template does."""
    written = [_written(message, template) for message in messages]
    if _SHORT_IDS in template:
        written = [_with_short_ids(message) for message in written]
    if not _TOOL_ROLE.search(template):
        written = _joined(written)
    if not tools:
        return written
    text = _description(tools, is_forced=choice is not None and choice.is_forced)
    if _has_system_turn(template):
        if written[0]["role"] in ("system", "developer"):
            return [_extended(written[0], text), *written[1:]]
        return [{"role": "system", "content": text}, *written]
    for number, message in enumerate(written):
        if message["role"] == "user":
            return [
                *written[:number],
                {**message, "content": f"{text}\n\n{message['content']}"},
                *written[number + 1 :],
            ]
    return [{"role": "user", "content": text}, *written]


def _written(message: _Message, template: str) -> _Message:
    calls = message.get("tool_calls")
    if not calls or "tool_calls" in template:
        return message
    lines = [f"<tool_call>\n{_json(call['function'])}\n</tool_call>" for call in calls]
    rest = {name: item for name, item in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join([message["content"], *lines] if message["content"] else lines)}


def _with_short_ids(message: _Message) -> _Message:
    """Mistral's templates take ids of nine letters or digits only, and a history may come from another server."""
    if "tool_call_id" in message:
        return {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    if not message.get("tool_calls"):
        return message
    calls = [{**call, "id": _short_id(call.get("id", ""))} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _short_id(given: str) -> str:
    return given if _SHORT_ID.fullmatch(given) else hashlib.sha256(given.encode()).hexdigest()[:9]


def _joined(messages: Sequence[_Message]) -> list[_Message]:
    """Results of tools as a user's turn: all that follow one another are one, and a user's own words behind them too,
    since many templates want turns to alternate."""
    found: list[_Message] = []
    is_open = False
    for message in messages:
        if message["role"] == "tool":
            message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        elif not (is_open and message["role"] == "user"):
            is_open = False
            found.append(message)
            continue
        if is_open:
            found[-1] = _extended(found[-1], message["content"], "\n")
        else:
            found.append(message)
        is_open = True
    return found


def _extended(message: _Message, text: str, between: str = "\n\n") -> _Message:
    return {**message, "content": f"{message['content']}{between}{text}" if message["content"] else text}


def _has_system_turn(template: str) -> bool:
    return "ystem role not supported" not in template


def _description(tools: Sequence[Mapping[str, Any]], *, is_forced: bool) -> str:
    lines = "\n".join(_json(tool["function"]) for tool in tools)
    return f"{_INTRODUCTION}\n<tools>\n{lines}\n</tools>\n{_HOW_FORCED if is_forced else _HOW}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
