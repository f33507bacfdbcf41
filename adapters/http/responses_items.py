"""Items of a response: reasoning, messages and calls of tools, on their way in and on their way out.

Out: `OutputItems` makes items of the text that a request generates, together with the events that tell of them. In: the
items of earlier answers, and results of tools, become the messages of a chat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pagemill.engine.answer_reader import AnswerReader
from pagemill.engine.chat import Chat
from pagemill.engine.errors import invalid
from pagemill.engine.reasoning import ReasoningParserName
from pagemill.engine.tool_calls import ToolParserName, call_id
from pagemill.engine.tool_choice import ToolChoice
from pagemill.engine.tool_pieces import Piece
from pagemill.engine.values import shown

_PARTS = ("input_text", "output_text", "text")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_THOUGHTS = ("reasoning_text", "text")
_ROLES = ("system", "developer", "user", "assistant")
_FIELDS = {
    "message": ("type", "role", "content", "id", "status", "phase"),
    "function_call": ("type", "call_id", "name", "arguments", "id", "status"),
    "function_call_output": ("type", "call_id", "output", "id", "status"),
    "reasoning": ("type", "summary", "content", "id", "status"),
}

ItemEvent = dict[str, Any]


def chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat's spelling of tools, which has the function one level deeper. Raises `invalid_request`."""
    return [_chat_tool(f"tools[{number}]", tool) for number, tool in enumerate(tools)]


def _chat_tool(where: str, tool: object) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise invalid(f"{where} must be an object", where)
    if tool.get("type") != "function":
        raise invalid(f"{where}.type must be function, got {shown(tool.get('type'))}", f"{where}.type")
    return {"type": "function", "function": {name: item for name, item in tool.items() if name != "type"}}


def tool_choice_of(note: Mapping[str, Any]) -> ToolChoice | None:
    """What a stored response may do with its tools."""
    if not note.get("tools"):
        return None
    chat = {"messages": [{"role": "user", "content": ""}], "tools": chat_tools(note["tools"])}
    more = {name: note[name] for name in ("tool_choice", "parallel_tool_calls")}
    return Chat.from_mapping({**chat, **more}).choice


def messages_of(value: Any) -> list[dict[str, Any]]:
    """The messages of a chat that `input` stands for. Raises `invalid_request`, naming the item."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise invalid("input is needed: a string, or a list of items", "input")
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(value):
        add_item(messages, f"input[{number}]", item)
    return messages


def add_item(messages: list[dict[str, Any]], where: str, item: Any) -> None:
    """Add an item to a chat. Calls belong to the assistant's message before them, reasoning to the one behind it."""
    if not isinstance(item, dict):
        raise invalid(f"{where} must be an object", where)
    kind = item.get("type") or "message"
    if kind not in _ITEMS:
        raise invalid(f"{where}.type must be one of {', '.join(_ITEMS)}; got {shown(kind)}", f"{where}.type")
    for name, given in item.items():
        if name not in _FIELDS[kind] and given is not None:
            raise invalid(f"unknown field {shown(name)} in {where}", f"{where}.{name[:64]}")
    if kind == "message":
        if item.get("role") not in _ROLES:
            raise invalid(f"{where}.role must be one of {', '.join(_ROLES)}", f"{where}.role")
        if not isinstance(item.get("content"), str | list):
            raise invalid(f"{where}.content must be a string or a list of text parts", f"{where}.content")
        content = _content(f"{where}.content", item.get("content"))
        if item.get("role") == "assistant" and _is_open(messages):
            messages[-1]["content"] = content
        else:
            messages.append({"role": item.get("role"), "content": content})
    elif kind == "reasoning":
        parts = item.get("content") or []
        if not isinstance(parts, list):
            raise invalid(f"{where}.content must be a list of parts", f"{where}.content")
        texts = [_text(f"{where}.content[{number}]", part, _THOUGHTS) for number, part in enumerate(parts)]
        messages.append({"role": "assistant", "content": None, "reasoning": "".join(texts)})
    elif kind == "function_call":
        call = {"id": item.get("call_id"), "type": "function"}
        call["function"] = {"name": item.get("name"), "arguments": item.get("arguments")}
        if not isinstance(call["id"], str) or not isinstance(item.get("name"), str):
            raise invalid(f"{where} needs call_id and name", where)
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        if not isinstance(item.get("call_id"), str):
            raise invalid(f"{where} needs the call_id of the call that it answers", where)
        output = _content(f"{where}.output", item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})


def _content(name: str, content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [_part(f"{name}[{number}]", part) for number, part in enumerate(content)]


def _part(where: str, part: Any) -> dict[str, Any]:
    return {"type": "text", "text": _text(where, part, _PARTS)}


def _text(where: str, part: Any, kinds: tuple[str, ...]) -> str:
    if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
        raise invalid(f"{where} must be a text part; other kinds are not supported", where)
    return str(part["text"])


def _is_open(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is reasoning whose answer is still to come."""
    return bool(messages) and messages[-1]["content"] is None and "tool_calls" not in messages[-1]


class OutputItems:
    """The items of one response, made of its text piece by piece.

    `reasoning`, `tools`: how these stand in the text; `choice`: which tools may be called. `items` are those that have
    begun, as they are now.
    """

    def __init__(
        self,
        request_id: str,
        reasoning: ReasoningParserName | None,
        tools: ToolParserName | None,
        choice: ToolChoice | None,
    ) -> None:
        self._request_id = request_id
        self._parser: str = tools or ""
        self._reader = AnswerReader(reasoning, tools, choice)
        self._is_text = reasoning is None and (tools is None or choice is None)  # nothing else may come
        self._is_open = False
        self._calls = 0
        self.items: list[dict[str, Any]] = []

    def add(self, text: str) -> Iterator[ItemEvent]:
        """The events of the next part of the text. Where it is text only the first one is there before any."""
        if self._is_text and not self.items:
            yield from self._open_message()
        yield from self._take(self._reader.feed(text))

    def end(self, finish_reason: str) -> Iterator[ItemEvent]:
        """The events of the end of the text."""
        yield from self._take(self._reader.finish())
        if not self.items:
            yield from self._open_message()
        yield from self._close("completed" if finish_reason == "stop" else "incomplete")

    def _take(self, pieces: Sequence[Piece]) -> Iterator[ItemEvent]:
        for piece in pieces:
            if piece.index is None:
                kind = "reasoning" if piece.is_reasoning else "message"
                if not self._is_open or self.items[-1]["type"] != kind:
                    yield from self._close("completed")
                    yield from self._open_reasoning() if piece.is_reasoning else self._open_message()
                yield from self._add_text(piece.text)
            elif piece.name is not None:
                yield from self._close("completed")
                yield from self._open_call(piece.name)
            else:
                self.items[-1]["arguments"] += piece.text
                yield self._event("response.function_call_arguments.delta", delta=piece.text)

    def _open_message(self) -> Iterator[ItemEvent]:
        number = sum(item["type"] == "message" for item in self.items)
        name = f"msg_{self._request_id}" + (f"_{number}" if number else "")
        item: dict[str, Any] = {"id": name, "type": "message", "role": "assistant", "status": "in_progress"}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"] = []
        yield self._open(item)
        item["content"] = [part]
        yield self._in_part("response.content_part.added", part=dict(part))

    def _open_reasoning(self) -> Iterator[ItemEvent]:
        item: dict[str, Any] = {"id": f"rs_{self._request_id}", "type": "reasoning", "status": "in_progress"}
        item |= {"summary": [], "content": []}
        yield self._open(item)
        part = {"type": "reasoning_text", "text": ""}
        item["content"] = [part]
        yield self._in_part("response.content_part.added", part=dict(part))

    def _add_text(self, text: str) -> Iterator[ItemEvent]:
        (part,) = self.items[-1]["content"]
        part["text"] += text
        yield self._in_part(f"response.{part['type']}.delta", delta=text, **_logprobs(part))

    def _open_call(self, name: str) -> Iterator[ItemEvent]:
        made = call_id(self._parser, self._request_id, 0, self._calls)
        item_id = f"fc_{self._request_id}" + (f"_{self._calls}" if self._calls else "")
        self._calls += 1
        item = {"id": item_id, "type": "function_call", "status": "in_progress"}
        yield self._open({**item, "call_id": made, "name": name, "arguments": ""})

    def _open(self, item: dict[str, Any]) -> ItemEvent:
        self.items.append(item)
        self._is_open = True
        return {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}

    def _close(self, status: str) -> Iterator[ItemEvent]:
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        if item["type"] in ("message", "reasoning"):
            (part,) = item["content"]
            yield self._in_part(f"response.{part['type']}.done", text=part["text"], **_logprobs(part))
            yield self._in_part("response.content_part.done", part=dict(part))
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **done)
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": dict(item)}

    def _event(self, kind: str, **fields: Any) -> ItemEvent:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _in_part(self, kind: str, **fields: Any) -> ItemEvent:
        return self._event(kind, content_index=0, **fields)


def _logprobs(part: Mapping[str, Any]) -> dict[str, Any]:
    """What OpenAI's events of text have, and those of reasoning have not."""
    return {"logprobs": []} if part["type"] == "output_text" else {}


def output_of(request_id: str, note: Mapping[str, Any], choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The items of a whole answer: `choice` has its text, how it ended, and how the text is read."""
    parsers = choice.get("reasoning_parser"), choice.get("tool_parser")
    items = OutputItems(request_id, *parsers, tool_choice_of(note))
    for _ in (*items.add(choice["text"]), *items.end(choice["finish_reason"] or "length")):
        pass
    return items.items
