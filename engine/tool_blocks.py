"""Tool calls that are not JSON: each is held back until it is whole, and then told as JSON.

Nothing of such a call is told before its end, so its arguments are valid always, and a call that the answer's end cuts
off is text as it was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pagemill.engine.tool_pieces import Piece, Telling, ToolCall


@dataclass(frozen=True, slots=True)
class Block:
    """What stood up to `end` of the text: calls, and text where something among them was none."""

    end: int
    parts: Sequence[ToolCall | str]


@dataclass(frozen=True, slots=True)
class Refused:
    """No call after all. `length`: how many first characters are text for sure."""

    length: int = 1


class Grammar(Protocol):
    """A form of calls. It is asked about one block at a time, whose text only grows until it is whole or refused."""

    def find(self, text: str, before: str) -> tuple[int, bool]:
        """Where a block begins in `text`, and True; or how many characters of it are text for sure, and False.
        `before`: the character in front, empty at the beginning of the answer."""

    def read(self, text: str, *, has_ended: bool) -> Block | Refused | None:
        """The block that `text` begins with. None: it is not whole yet, and text does go on (`has_ended` is false)."""


class BlockReader:
    """Reads one choice's text piece by piece."""

    def __init__(self, grammar: Grammar, telling: Telling) -> None:
        self._grammar = grammar
        self._telling = telling
        self._buffer = ""
        self._before = ""
        self._is_inside = False

    def feed(self, text: str) -> list[Piece]:
        """The next part of the text; what is certain now."""
        self._buffer += text
        while self._buffer and self._step(has_ended=False):
            pass
        return self._telling.take()

    def finish(self) -> list[Piece]:
        """The text has ended: what was held back is text, or a call whose last marker is missing."""
        while self._buffer and self._step(has_ended=True):
            pass
        self._telling.text(self._buffer)
        self._buffer = ""
        self._telling.end()
        return self._telling.take()

    def _step(self, *, has_ended: bool) -> bool:
        """Take something off the buffer; False where it needs more."""
        if not self._is_inside:
            at, self._is_inside = self._grammar.find(self._buffer, self._before)
            self._take(at)
            return self._is_inside
        found = self._grammar.read(self._buffer, has_ended=has_ended)
        if found is None:
            return False
        self._is_inside = False
        if isinstance(found, Refused):
            self._take(found.length)
            return True
        for part in found.parts:
            if isinstance(part, str):
                self._telling.text(part)
            else:
                self._telling.call(part.name)
                self._telling.arguments(part.arguments)
        self._drop(found.end)
        return True

    def _take(self, length: int) -> None:
        """The first characters are text."""
        self._telling.text(self._buffer[:length])
        self._drop(length)

    def _drop(self, length: int) -> None:
        self._before = self._buffer[length - 1 : length] or self._before
        self._buffer = self._buffer[length:]
