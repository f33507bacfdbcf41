"""What an answer is made of: reasoning, text, and calls of tools with their arguments, piece by piece."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Piece:
    """What an answer goes on with. `index` is None for text; else the number of the call that begins, if `name` is
    set, or whose arguments go on. `is_reasoning`: the text is the model's reasoning and not its answer."""

    text: str = ""
    index: int | None = None
    name: str | None = None
    is_reasoning: bool = False


@dataclass(slots=True)
class ToolCall:
    """A call; `arguments` is JSON."""

    name: str
    arguments: str = ""


def gathered(pieces: Iterable[Piece]) -> tuple[str, list[ToolCall]]:
    """Pieces of an answer, put together."""
    texts: list[str] = []
    calls: list[ToolCall] = []
    for piece in pieces:
        if piece.index is None:
            texts.append(piece.text)
        elif piece.name is not None:
            calls.append(ToolCall(piece.name))
        else:
            calls[-1].arguments += piece.text
    return "".join(texts), calls


class Pieces:
    """What was told of an answer and not taken yet."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []

    def add(self, piece: Piece) -> None:
        self._pieces.append(piece)

    def take(self) -> list[Piece]:
        """What has been told since the last time."""
        pieces, self._pieces = self._pieces, []
        return pieces


class Telling(Pieces):
    """What is told of an answer, in order.

    White space beside a call is left out. `hidden`: markers that are special tokens, which are not shown where they
    turn out to mark no call. Without `parallel` only the first call is told.
    """

    def __init__(self, hidden: Collection[str], *, parallel: bool) -> None:
        super().__init__()
        self._hidden = tuple(hidden)
        self._parallel = parallel
        self._space = ""  # white space that is text if text follows, and nothing if a call does
        self._has_text = False
        self.count = 0  # calls so far, those that are not told among them

    def text(self, text: str) -> None:
        for marker in self._hidden:
            text = text.replace(marker, "")
        text = self._space + text
        if self.count and not self._has_text:
            text = text.lstrip(SPACE)
        shown = text.rstrip(SPACE)
        self._space = text[len(shown) :]
        if shown:
            self._has_text = True
            self.add(Piece(shown))

    def call(self, name: str) -> None:
        self._space = self._space if self._has_text else ""
        self.count += 1
        self._add(Piece(index=self.count - 1, name=name))

    def arguments(self, text: str) -> None:
        """What the arguments of the last call go on with."""
        if text:
            self._add(Piece(text, self.count - 1))

    def end(self) -> None:
        """No more comes: white space at the end of an answer without calls is text."""
        if self._space and not self.count:
            self.add(Piece(self._space))
            self._space = ""

    def _add(self, piece: Piece) -> None:
        if self._parallel or self.count == 1:
            self.add(piece)


def first_of(markers: Collection[str], text: str) -> tuple[int, str] | None:
    """Where the first of `markers` stands in `text`, and which one it is."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, key=lambda item: (item[0], -len(item[1])), default=None)


def overlap(text: str, markers: Collection[str]) -> int:
    """How many last characters of `text` may be the first ones of one of `markers`."""
    longest = max(map(len, markers), default=0)
    for length in range(min(len(text), longest - 1), 0, -1):
        tail = text[-length:]
        if any(len(marker) > length and marker.startswith(tail) for marker in markers):
            return length
    return 0
