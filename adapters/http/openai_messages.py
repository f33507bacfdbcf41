"""What a model wrote in the shapes of chat completions: as a message, and as the deltas of a stream.

Reasoning stands in `reasoning`, vLLM's name since 0.11, and in `reasoning_content`, DeepSeek's, vLLM's before and what
most clients read; a server that sends one of them is empty to half of its clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pagemill.engine.answer_reader import AnswerReader
from pagemill.engine.reasoning import ReasoningParserName
from pagemill.engine.tool_calls import ToolParserName, call_id
from pagemill.engine.tool_choice import ToolChoice
from pagemill.engine.tool_pieces import Piece, ToolCall, gathered


class MessageReader:
    """Reads one choice of a request. `reasoning`, `tools`: the forms in which the text has them; `choice`: which tools
    may be called. `shows_reasoning`: it is told, else left out."""

    def __init__(
        self,
        reasoning: ReasoningParserName | None,
        tools: ToolParserName | None,
        choice: ToolChoice | None,
        *,
        shows_reasoning: bool,
        request_id: str,
        index: int,
    ) -> None:
        self._reader = AnswerReader(reasoning, tools, choice)
        self._shows_reasoning = shows_reasoning
        self._parser: str = tools or ""
        self._request_id, self._index = request_id, index

    @property
    def has_calls(self) -> bool:
        return self._reader.has_calls

    def message(self, text: str) -> dict[str, Any]:
        """Reasoning, content and calls of the message that a whole text is. Nothing beside reasoning or calls is null
        instead of empty."""
        pieces = self._reader.read(text)
        thought = _reasoning(piece.text for piece in pieces if piece.is_reasoning) if self._shows_reasoning else {}
        content, calls = gathered(piece for piece in pieces if not piece.is_reasoning)
        has_more = bool(calls) or any(piece.is_reasoning for piece in pieces)
        message: dict[str, Any] = {**thought, "content": None if has_more and not content else content}
        if calls:
            message["tool_calls"] = [self._call(call, number) for number, call in enumerate(calls)]
        return message

    def feed(self, text: str) -> list[dict[str, Any]]:
        """The deltas of the next part of the text: reasoning, content, then each call's id and name, then pieces of its
        arguments."""
        return self._deltas(self._reader.feed(text))

    def finish(self) -> list[dict[str, Any]]:
        return self._deltas(self._reader.finish())

    def _deltas(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        return [self._delta(piece) for piece in pieces if self._shows_reasoning or not piece.is_reasoning]

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if piece.is_reasoning:
            return _reasoning([piece.text])
        return {"content": piece.text} if piece.index is None else {"tool_calls": [self._part(piece, piece.index)]}

    def _part(self, piece: Piece, number: int) -> dict[str, Any]:
        if piece.name is None:
            return {"index": number, "function": {"arguments": piece.text}}
        return {"index": number, **self._call(ToolCall(piece.name), number)}

    def _call(self, call: ToolCall, number: int) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        made = call_id(self._parser, self._request_id, self._index, number)
        return {"id": made, "type": "function", "function": function}


def _reasoning(texts: Iterable[str]) -> dict[str, Any]:
    text = "".join(texts)
    return {"reasoning": text, "reasoning_content": text} if text else {}
