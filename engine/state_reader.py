"""What readers of an answer that go from state to state have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from pagemill.engine.tool_pieces import Piece, Pieces


class StateReader(ABC):
    """Reads one choice's text piece by piece.

    A state takes something off `_buffer`, which is not empty when it is asked, tells `pieces` what is certain, and may
    set the next state. It returns False where it needs more text.
    """

    def __init__(self, state: Callable[[], bool], pieces: Pieces) -> None:
        self._buffer = ""
        self._state = state
        self._pieces = pieces

    def feed(self, text: str) -> list[Piece]:
        """The next part of the text; what is certain now."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        return self._pieces.take()

    def finish(self) -> list[Piece]:
        """The text has ended: what was held back is what it seems to be."""
        rest, self._buffer = self._buffer, ""
        self._end(rest)
        return self._pieces.take()

    @abstractmethod
    def _end(self, rest: str) -> None:
        """Tell what the rest of the text is."""
