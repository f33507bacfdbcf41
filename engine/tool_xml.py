"""Tool calls as Qwen3-Coder writes them, with every argument as plain text between tags.

    <tool_call>
    <function=name>
    <parameter=x>
    any text
    </parameter>
    </function>
    </tool_call>

Nothing in a value is escaped, so it may hold these very tags: a tag ends a value only where what follows could follow
it. Closing tags that models leave out are done without where the next tag says the same. The types of the values are
those of the tool's schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pagemill.engine.tool_blocks import Block, Refused
from pagemill.engine.tool_pieces import SPACE, ToolCall, first_of, overlap
from pagemill.engine.tool_values import argument, as_json

MARKERS = ("<tool_call>", "</tool_call>")
_CALL, _CALL_END = MARKERS
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_OPENERS = (_CALL, _FUNCTION)
_LONGEST_NAME = 256
_NAME = re.compile(rf"\s*([^<>\n]{{1,{_LONGEST_NAME}}}?)\s*>")
_NAME_SO_FAR = re.compile(rf"[^<>\n]{{0,{_LONGEST_NAME}}}")
# Whatever may end a value, if what follows agrees.
_END = re.compile(rf"{_PARAMETER_END}|{_FUNCTION_END}|{_CALL_END}|\n[ \t]*{_PARAMETER}")
_FOLLOWERS = {
    _PARAMETER_END: (_PARAMETER, _FUNCTION_END, _CALL_END),
    _FUNCTION_END: (_CALL_END, _FUNCTION),
    _CALL_END: (_CALL,),
}


class XmlGrammar:
    """`schemas`: the parameters of each tool that may be called, by name."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self._reset()

    def _reset(self) -> None:
        self._at = 0  # up to here the block was understood
        self._name: str | None = None
        self._values: dict[str, Any] = {}
        self._parameter: str | None = None
        self._start = 0  # of the value of that parameter

    def find(self, text: str, before: str) -> tuple[int, bool]:
        self._reset()
        found = first_of(_OPENERS, text)
        return (len(text) - overlap(text, _OPENERS), False) if found is None else (found[0], True)

    def read(self, text: str, *, has_ended: bool) -> Block | Refused | None:
        if self._name is None:
            refused = self._read_head(text)
            if refused is not None or self._name is None:
                return Refused() if refused or has_ended else None
        while True:
            if self._parameter is not None and not self._read_value(text, has_ended=has_ended):
                return Refused() if has_ended else None
            self._at += _space_at(text, self._at)
            rest = text[self._at : self._at + _LONGEST_NAME + len(_PARAMETER) + 1]
            if rest.startswith(_PARAMETER):
                name = _NAME.match(rest, len(_PARAMETER))
                if name is None:
                    is_cut = _NAME_SO_FAR.fullmatch(rest, len(_PARAMETER)) is not None and not has_ended
                    return None if is_cut else Refused()
                self._parameter = name[1]
                self._at = self._start = self._at + name.end()
            elif rest.startswith((_FUNCTION_END, _CALL_END)):
                return self._closed(text, has_ended=has_ended)
            elif not has_ended and any(tag.startswith(rest) for tag in (_PARAMETER, _FUNCTION_END, _CALL_END)):
                return None
            elif has_ended and not rest:
                return Refused()
            else:
                return Refused()

    def _read_head(self, text: str) -> bool | None:
        """Read up to the name of the function. True: this is none; None: go on, or wait while there is no name."""
        at = 0
        if text.startswith(_CALL):
            at = len(_CALL) + _space_at(text, len(_CALL))
        rest = text[at : at + _LONGEST_NAME + len(_FUNCTION) + 1]
        if not rest.startswith(_FUNCTION):
            return None if _FUNCTION.startswith(rest) else True
        name = _NAME.match(rest, len(_FUNCTION))
        if name is None:
            return None if _NAME_SO_FAR.fullmatch(rest, len(_FUNCTION)) else True
        if name[1] not in self._schemas:
            return True
        self._name = name[1]
        self._at = at + name.end()
        return None

    def _read_value(self, text: str, *, has_ended: bool) -> bool:
        """Read the rest of a value; False where its end is not certain yet."""
        assert self._name is not None and self._parameter is not None
        while True:
            match = _END.search(text, self._at)
            if match is None:
                # A tag that has begun, with the line break in front of it, is looked at again.
                self._at = max(self._at, len(text) - len(_PARAMETER_END) - 1)
                return False
            ends = self._ends_value(text, match, has_ended=has_ended)
            if ends is None:
                self._at = match.start()
                return False
            if ends:
                value = text[self._start : match.start()]
                value = value.removeprefix("\n").removesuffix("\n")
                self._values[self._parameter] = argument(value, self._parameter, self._schemas[self._name])
                self._parameter = None
                tag = match[0]
                self._at = match.end() if tag == _PARAMETER_END else match.start()
                return True
            self._at = match.end() if match[0] in _FOLLOWERS else match.start() + 1

    def _ends_value(self, text: str, match: re.Match[str], *, has_ended: bool) -> bool | None:
        """Whether a tag ends a value; None where what follows is not there yet."""
        followers = _FOLLOWERS.get(match[0])
        if followers is None:  # the next parameter begins, if there is one of that name
            name = _NAME.match(text, match.end())
            if name is None:
                is_cut = _NAME_SO_FAR.fullmatch(text, match.end()) is not None and not has_ended
                return None if is_cut else False
            known = self._schemas[self._name or ""].get("properties")
            is_known = isinstance(known, Mapping) and name[1] in known
            return is_known and name[1] != self._parameter and name[1] not in self._values
        at = match.end() + _space_at(text, match.end())
        if text.startswith(followers, at):
            return True
        rest = text[at : at + len(_PARAMETER_END)]
        if not rest:
            # At the end of an answer only what closes the call closes the value too.
            return match[0] != _PARAMETER_END if has_ended else None
        return None if not has_ended and any(tag.startswith(rest) for tag in followers) else False

    def _closed(self, text: str, *, has_ended: bool) -> Block | Refused | None:
        end = self._at
        if text.startswith(_FUNCTION_END, end):
            end += len(_FUNCTION_END)
            behind = end + _space_at(text, end)
            rest = text[behind : behind + len(_CALL_END)]
            if rest == _CALL_END:
                end = behind + len(rest)
            elif not has_ended and _CALL_END.startswith(rest):
                return None
            elif has_ended and rest and _CALL_END.startswith(rest):
                end = len(text)
        else:
            end += len(_CALL_END)
        arguments = as_json(self._values)
        if arguments is None or self._name is None:
            return Refused()
        return Block(end, [ToolCall(self._name, arguments)])


def _space_at(text: str, at: int) -> int:
    """How many characters of white space stand at `at`."""
    end = at
    while end < len(text) and text[end] in SPACE:
        end += 1
    return end - at
