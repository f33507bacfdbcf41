"""Answers in the harmony form of gpt-oss: messages on channels, which hold reasoning, text and calls of tools alike.

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.
    <|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>

What is said on the channel analysis is reasoning. A message to a tool of the request is a call, whose arguments are
passed on as they are written; all else is text. Several messages of one kind have a line break between them. Nothing of
a head that is not whole is told. A text without a head is text.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from pagemill.engine.state_reader import StateReader
from pagemill.engine.tool_pieces import SPACE, Piece, Pieces, first_of, overlap

_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
MARKERS = (_CHANNEL, _MESSAGE, *_ENDS, "<|constrain|>")
_HEADS = (_CHANNEL, _START, "to=functions.")
_TO = re.compile(r"to=functions\.([\w.:/-]{1,128})")
_ON = re.compile(rf"{re.escape(_CHANNEL)}\s*(\w+)")


class HarmonyReader(StateReader):
    """Reads one choice's text piece by piece. `names`: the tools that may be called. Without `parallel` only the first
    call is told."""

    def __init__(self, names: Collection[str] = (), *, parallel: bool = True) -> None:
        super().__init__(self._begin, Pieces())
        self._names = frozenset(names)
        self._parallel = parallel
        self._kind = ""  # of the message that is read: reasoning, text or call
        self._told: set[str] = set()  # the kinds that something was told of
        self._is_fresh = False  # of the message nothing was told yet
        self._calls = 0

    @property
    def has_calls(self) -> bool:
        return self._calls > 0

    @property
    def is_inside(self) -> bool:
        """Whether no more than reasoning, and heads of messages, has come so far."""
        return self._state != self._begin and not self.is_over

    @property
    def is_over(self) -> bool:
        """Whether an answer, or a call, has begun."""
        return self._calls > 0 or "text" in self._told or (self._state == self._read and self._kind != "reasoning")

    def _end(self, rest: str) -> None:
        if self._state == self._begin:
            self._kind, self._is_fresh = "text", False
            self._tell(rest)
        elif self._state == self._read:
            self._tell(rest.rstrip(SPACE) if self._kind != "text" else rest)
            self._close()

    def _begin(self) -> bool:
        bare = self._buffer.lstrip(SPACE)
        if any(head.startswith(bare) for head in _HEADS):
            return False
        if bare.startswith(_HEADS):
            self._state = self._read_head
        else:
            self._kind, self._state = "text", self._read
        return True

    def _read_head(self) -> bool:
        at = self._buffer.find(_MESSAGE)
        if at < 0:
            return False
        head, self._buffer = self._buffer[:at], self._buffer[at + len(_MESSAGE) :]
        to, on = _TO.search(head), _ON.search(head)
        self._state, self._is_fresh = self._read, True
        if to is not None and to[1] in self._names:
            self._kind = "call"
            self._calls += 1
            self._add(Piece(index=self._calls - 1, name=to[1]))
        else:
            self._kind = "reasoning" if on is not None and on[1] == "analysis" else "text"
        return True

    def _read(self) -> bool:
        found = first_of(_ENDS, self._buffer)
        if found is not None:
            at, end = found
            self._tell(self._buffer[:at].rstrip(SPACE))
            self._close()
            self._buffer, self._state = self._buffer[at + len(end) :], self._read_head
            return True
        sure = len(self._buffer) - overlap(self._buffer, _ENDS)
        sure = len(self._buffer[:sure].rstrip(SPACE))  # white space at the end of a message is none of it
        self._tell(self._buffer[:sure])
        self._buffer = self._buffer[sure:]
        return False

    def _tell(self, text: str) -> None:
        if self._is_fresh:
            text = text.lstrip(SPACE)
        if not text:
            return
        if self._is_fresh and self._kind in self._told and self._kind != "call":
            text = f"\n{text}"
        self._is_fresh = False
        self._told.add(self._kind)
        if self._kind == "call":
            self._add(Piece(text, self._calls - 1))
        else:
            self._pieces.add(Piece(text, is_reasoning=self._kind == "reasoning"))

    def _close(self) -> None:
        """The message has ended; a call without arguments has none."""
        if self._kind == "call" and self._is_fresh:
            self._add(Piece("{}", self._calls - 1))
        self._is_fresh = False

    def _add(self, piece: Piece) -> None:
        if self._parallel or self._calls == 1:
            self._pieces.add(piece)
