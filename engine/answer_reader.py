"""An answer as its parts: what the model thought first, what it says, which tools it calls.

Calls are looked for in the answer, never in the reasoning before it.
"""

from __future__ import annotations

from pagemill.engine.harmony import HarmonyReader
from pagemill.engine.reasoning import ReasoningParserName, ReasoningReader
from pagemill.engine.tool_calls import ToolCallReader, ToolParserName
from pagemill.engine.tool_choice import ToolChoice
from pagemill.engine.tool_pieces import Piece


class AnswerReader:
    """Reads one choice's text piece by piece. `reasoning_parser`, `tool_parser`: how each stands in the text, as the
    request's events say; None: it does not. `choice`: which tools may be called."""

    def __init__(
        self,
        reasoning_parser: ReasoningParserName | None,
        tool_parser: ToolParserName | None,
        choice: ToolChoice | None,
    ) -> None:
        self._harmony: HarmonyReader | None = None
        self._reasoning: ReasoningReader | HarmonyReader | None = None
        if reasoning_parser == "openai_gptoss":  # it has calls in a form of its own
            names, parallel = ((), True) if choice is None else (choice.names, choice.parallel)
            self._reasoning = self._harmony = HarmonyReader(names, parallel=parallel)
            tool_parser = tool_parser if tool_parser == "json" else None
        elif reasoning_parser is not None:
            self._reasoning = ReasoningReader(reasoning_parser)
        self._calls = None
        if tool_parser is not None and choice is not None:
            self._calls = ToolCallReader(tool_parser, choice.parameters, parallel=choice.parallel)

    @property
    def has_calls(self) -> bool:
        return any(reader is not None and reader.has_calls for reader in (self._harmony, self._calls))

    def feed(self, text: str) -> list[Piece]:
        """The next part of the text; what is certain now."""
        return self._read([Piece(text)] if self._reasoning is None else self._reasoning.feed(text))

    def finish(self) -> list[Piece]:
        """The text has ended: what was held back is what it seems to be."""
        pieces = [] if self._reasoning is None else self._read(self._reasoning.finish())
        return pieces if self._calls is None else pieces + self._calls.finish()

    def read(self, text: str) -> list[Piece]:
        """All pieces of a whole answer."""
        return self.feed(text) + self.finish()

    def _read(self, pieces: list[Piece]) -> list[Piece]:
        if self._calls is None:
            return [piece for piece in pieces if piece.text or piece.name is not None]
        found: list[Piece] = []
        for piece in pieces:
            found += [piece] if piece.is_reasoning or piece.index is not None else self._calls.feed(piece.text)
        return found
