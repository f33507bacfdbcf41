"""Tool calls as a list of calls in Python, as Llama 3.2 and 4 and Gemma 3 are told to write them:
`[get_weather(city='Ulm'), now()]`, at the beginning of a line.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from pagemill.engine.python_literals import literal_at, skip_space
from pagemill.engine.tool_blocks import Block, Refused
from pagemill.engine.tool_pieces import ToolCall, overlap
from pagemill.engine.tool_values import as_json

MARKERS = ("<|python_start|>", "<|python_end|>", "<|python_tag|>")
_LONGEST_NAME = 128
_NAME = re.compile(rf"\s*([\w.:/-]{{1,{_LONGEST_NAME}}})\s*\(")
_BEGIN = r"(?:\n|<\|python_start\|>|<\|python_tag\|>)[ \t\r\n]*"
_LINE = re.compile(rf"{_BEGIN}(?:\[|\Z)")  # a list at the beginning of a line, or what may become one
_FIRST_LINE = re.compile(rf"(?:\A[ \t\r\n]*|{_BEGIN})(?:\[|\Z)")
_HEAD = re.compile(rf"\[\s*([\w.:/-]{{1,{_LONGEST_NAME}}})\s*\(\s*(?:\)|[A-Za-z_]\w*\s*=[^=])")
_HEAD_SO_FAR = re.compile(
    rf"\[\s*(?:[\w.:/-]{{1,{_LONGEST_NAME}}}\s*(?:\(\s*(?:[A-Za-z_]\w{{0,{_LONGEST_NAME}}}\s*=?)?)?)?"
)
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=")
_FOLLOWS = " \t\r\n<[,;"  # what may stand behind the list


class PythonicGrammar:
    """`names`: the tools that may be called."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._scan = _Brackets()
        self._is_list = False
        self._end: int | None = None

    def find(self, text: str, before: str) -> tuple[int, bool]:
        self._scan, self._is_list, self._end = _Brackets(), False, None
        match = (_FIRST_LINE if before in ("", "\n") else _LINE).search(text)
        if match is None:
            return len(text) - overlap(text, MARKERS), False
        return (match.end() - 1, True) if match[0].endswith("[") else (match.start(), False)

    def read(self, text: str, *, has_ended: bool) -> Block | Refused | None:
        if not self._is_list:
            head = _HEAD.match(text)
            if head is None:
                return None if not has_ended and _HEAD_SO_FAR.fullmatch(text) else Refused()
            self._is_list = True
        if self._end is None:
            self._end = self._scan.end_of(text)
        end = self._end
        if end is None:
            return Refused() if has_ended else None
        if end == len(text) and not has_ended:
            return None
        if end < len(text) and text[end] not in _FOLLOWS:
            return Refused()
        parts = [self._call(text[start:stop]) or text[start:stop] for start, stop in self._scan.items]
        return Block(end, parts) if any(isinstance(part, ToolCall) for part in parts) else Refused()

    def _call(self, source: str) -> ToolCall | None:
        """One call of the list; None where it is none that may be."""
        name = _NAME.match(source)
        if name is None or name[1] not in self._names:
            return None
        arguments: dict[str, Any] = {}
        at = skip_space(source, name.end())
        try:
            while not source.startswith(")", at):
                key = _KEY.match(source, at)
                if key is None or key[1] in arguments:
                    return None
                arguments[key[1]], at = literal_at(source, key.end())
                at = skip_space(source, at)
                if source.startswith(",", at):
                    at = skip_space(source, at + 1)
                elif not source.startswith(")", at):
                    return None
        except ValueError:
            return None
        written = as_json(arguments)
        return None if written is None or source[at + 1 :].strip() else ToolCall(name[1], written)


class _Brackets:
    """Finds the end of a list in text that grows, and its items."""

    def __init__(self) -> None:
        self.items: list[tuple[int, int]] = []
        self._at = 0
        self._depth = 0
        self._quote = ""
        self._start = 1

    def end_of(self, text: str) -> int | None:
        """The index behind the end, or None where it is not there yet."""
        while self._at < len(text):
            character = text[self._at]
            if self._quote:
                if character == "\\":
                    if self._at + 1 == len(text):
                        return None
                    self._at += 1
                elif (
                    len(self._quote) == 3
                    and len(text) - self._at < 3
                    and text[self._at :]
                    in (
                        self._quote[0],
                        self._quote[:2],
                    )
                ):
                    return None
                elif text.startswith(self._quote, self._at):
                    self._at += len(self._quote) - 1
                    self._quote = ""
            elif character in "'\"":
                if len(text) - self._at < 3 and set(text[self._at :]) == {character}:
                    return None  # two quotes are an empty string, or the first of three
                self._quote = character * 3 if text.startswith(character * 3, self._at) else character
                self._at += len(self._quote) - 1
            elif character in "[({":
                self._depth += 1
            elif character in "])}":
                self._depth -= 1
                if self._depth == 0:
                    if text[self._start : self._at].strip():
                        self.items.append((self._start, self._at))
                    self._at += 1
                    return self._at
            elif character == "," and self._depth == 1:
                self.items.append((self._start, self._at))
                self._start = self._at + 1
            self._at += 1
        return None
