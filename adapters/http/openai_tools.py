"""Tool calls in the shapes of chat completions: in a message, and as the deltas of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagemill.engine.tool_calls import ToolCallReader, ToolParserName, call_id, read_calls
from pagemill.engine.tool_choice import ToolChoice
from pagemill.engine.tool_pieces import Piece, ToolCall


def message_of(parser: ToolParserName, choice: ToolChoice, text: str, request_id: str, index: int) -> dict[str, Any]:
    """Content and calls of an assistant's message; without calls the content is the text."""
    content, calls = read_calls(parser, choice.parameters, text, parallel=choice.parallel)
    if not calls:
        return {"content": content}
    shown = [_call(parser, call, request_id, index, number) for number, call in enumerate(calls)]
    return {"content": content or None, "tool_calls": shown}


def _call(parser: ToolParserName, call: ToolCall, request_id: str, choice: int, number: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id(parser, request_id, choice, number), "type": "function", "function": function}


class ToolDeltas:
    """The deltas of one choice: text as content, then each call's id and name, then pieces of its arguments."""

    def __init__(self, parser: ToolParserName, choice: ToolChoice, request_id: str, index: int) -> None:
        self._parser, self._request_id, self._index = parser, request_id, index
        self._reader = ToolCallReader(parser, choice.parameters, parallel=choice.parallel)

    @property
    def has_calls(self) -> bool:
        return self._reader.has_calls

    def feed(self, text: str) -> list[dict[str, Any]]:
        return self._deltas(self._reader.feed(text))

    def finish(self) -> list[dict[str, Any]]:
        return self._deltas(self._reader.finish())

    def _deltas(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        return [
            {"content": piece.text} if piece.index is None else {"tool_calls": [self._part(piece, piece.index)]}
            for piece in pieces
        ]

    def _part(self, piece: Piece, number: int) -> dict[str, Any]:
        if piece.name is None:
            return {"index": number, "function": {"arguments": piece.text}}
        begun = ToolCall(piece.name)
        return {"index": number, **_call(self._parser, begun, self._request_id, self._index, number)}
