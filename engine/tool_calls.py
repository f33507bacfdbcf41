"""Tool calls in the text of an answer, found while it grows.

Models write calls in forms of their own; these are read:

* hermes (Hermes, Qwen 2.5 and 3, SmolLM): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one after
  another, or a list between the tags.
* llama3_json (Llama 3.1 and later): the answer is `{"name": ..., "parameters": {...}}`, several with `; ` between,
  behind `<|python_tag|>` or not.
* mistral: `[TOOL_CALLS]` and a list of such objects, or since version 11 `[TOOL_CALLS]name[ARGS]{...}`.
* json: a list of such objects and nothing else, as a call is written that is forced (`tool_choice`).

What only looks like a call is text: a marker without an object behind it, an object that names no tool of the request.
A call is told as soon as it is certain: its name is known and its arguments have begun. From then on the arguments
are passed on as the model writes them, so they may end early, where the answer does.

The same pieces come out however the text is cut, so an answer that is streamed and one that is not have the same calls.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

ToolParserName = Literal["hermes", "llama3_json", "mistral", "json"]
ToolParserSetting = Literal["auto", "none", "hermes", "llama3_json", "mistral"]
PARSERS: tuple[str, ...] = tuple(name for name in get_args(ToolParserName) if name != "json")
# What of a form may be a special token, which has to stay in the text for the form to be seen.
MARKERS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "json": (),
}
_OPENERS = {"hermes": "<tool_call>", "llama3_json": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
_BETWEEN = {"hermes": " \t\r\n,[]", "llama3_json": " \t\r\n;", "mistral": " \t\r\n,[]", "json": " \t\r\n,[]"}
_CLOSER = "</tool_call>"
_LONGEST_HEAD = 512  # characters before the arguments
_STRING = r'"((?:[^"\\]|\\.)*)"'
_HEAD = re.compile(
    rf'\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*{_STRING}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_KEYS = ("name", "type", "function", "arguments", "parameters", "id")
_NAMED = re.compile(r"([\w.:/-]{1,128})(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_NAMED_SO_FAR = re.compile(r"[\w.:/-]{1,128}(?:\[[A-Z_]*(?:\]\w*)?){0,2}\s*")
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Piece:
    """What an answer goes on with. `index` is None for text; else the number of the call that begins, if `name` is
    set, or whose arguments go on."""

    text: str = ""
    index: int | None = None
    name: str | None = None


@dataclass(slots=True)
class ToolCall:
    """A call; `arguments` is JSON as the model wrote it."""

    name: str
    arguments: str = ""


def parser_of(template: str) -> ToolParserName | None:
    """The form in which a model writes calls, by what its chat template mentions. None: another one, or none."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return "hermes"
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return "llama3_json"
    return None


def call_id(parser: str, request_id: str, choice: int, index: int) -> str:
    """The id of a call: the same whenever and wherever it is read. Mistral's templates want nine letters or digits."""
    digest = hashlib.sha256(f"{request_id}/{choice}/{index}".encode()).hexdigest()
    return digest[:9] if parser == "mistral" else f"call_{digest[:24]}"


def read_calls(
    parser: ToolParserName, names: Collection[str], text: str, *, parallel: bool
) -> tuple[str, list[ToolCall]]:
    """The text and the calls of a whole answer."""
    reader = ToolCallReader(parser, names, parallel=parallel)
    return gathered([*reader.feed(text), *reader.finish()])


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


class ToolCallReader:
    """Reads one choice's text piece by piece. `names`: the tools that may be called. Without `parallel` only the first
    call is told. White space beside a call is left out."""

    def __init__(self, parser: ToolParserName, names: Collection[str], *, parallel: bool = True) -> None:
        self._parser = parser
        self._names = frozenset(names)
        self._parallel = parallel
        self._opener, self._between = _OPENERS.get(parser), _BETWEEN[parser]
        self._state = self._read_text if self._opener else self._read_call
        self._may_be_bare = parser == "llama3_json"  # without a marker a call is the whole answer
        self._is_fresh = parser == "json"  # behind a marker there was no call yet
        self._buffer = ""
        self._lead = ""  # what was taken off the buffer for a call that is not certain yet
        self._scan = _Scan()
        self._enclosed = True  # the arguments stand in an object, whose end is still to come
        self._space = ""  # white space that is text if text follows, and nothing if a call does
        self._has_text = False
        self._count = 0
        self._pieces: list[Piece] = []

    @property
    def has_calls(self) -> bool:
        return self._count > 0

    def feed(self, text: str) -> list[Piece]:
        """The next part of the text; what is certain now."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        return self._take()

    def finish(self) -> list[Piece]:
        """The text has ended: what was held back is text after all. A forced call that has not begun is left out."""
        rest, self._buffer = self._buffer, ""
        if self._state == self._read_text:
            self._tell_text(rest)
        elif self._state == self._read_call and self._parser != "json":
            left = rest.lstrip(self._between)
            if self._is_fresh or not (_CLOSER.startswith(left) or (self._opener or "").startswith(left)):
                self._tell_text(self._lead + rest)
        if self._space and not self._count:
            self._pieces.append(Piece(self._space))
        return self._take()

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    # Each state takes something off the buffer, which is not empty; False where it needs more.

    def _read_text(self) -> bool:
        if self._may_be_bare:
            bare = self._buffer.lstrip(_SPACE)
            if not bare:
                return False
            self._may_be_bare = False
            if bare.startswith("{"):
                return self._enter(self._buffer[: len(self._buffer) - len(bare)], bare)
        at = -1 if self._opener is None else self._buffer.find(self._opener)
        if at >= 0 and self._opener is not None:
            self._tell_text(self._buffer[:at])
            return self._enter(self._opener, self._buffer[at + len(self._opener) :])
        sure = len(self._buffer) - _overlap(self._buffer, self._opener or "")
        self._tell_text(self._buffer[:sure])
        self._buffer = self._buffer[sure:]
        return False

    def _enter(self, lead: str, rest: str) -> bool:
        self._lead, self._buffer, self._is_fresh = lead, rest, True
        self._state = self._read_call
        return True

    def _read_call(self) -> bool:
        bare = self._buffer.lstrip(self._between)
        if bare.startswith("{"):
            self._lead += self._buffer[: len(self._buffer) - len(bare)]
            self._buffer = bare
            return self._read_object()
        if self._is_fresh:
            if not bare:
                return False
            if self._parser == "mistral":
                named = _NAMED.match(bare)
                if named is not None and named[1] in self._names:
                    return self._begin(named[1], bare[named.end() :], enclosed=False)
                if _NAMED_SO_FAR.fullmatch(bare):
                    return False
            return self._give_up()
        if self._parser == "hermes" and bare.startswith(_CLOSER):
            self._buffer, self._state = bare[len(_CLOSER) :], self._read_text
            return True
        if self._opener is not None and bare.startswith(self._opener):
            return self._enter(self._opener, bare[len(self._opener) :])
        if (self._parser == "hermes" and _CLOSER.startswith(bare)) or (self._opener or "").startswith(bare):
            return False
        return self._give_up()

    def _read_object(self) -> bool:
        head = _HEAD.match(self._buffer, 0, _LONGEST_HEAD)
        if head is not None:
            name = _unquoted(head[1])
            if name in self._names:
                return self._begin(name, self._buffer[head.end() :], enclosed=True)
            return self._give_up()
        key = _FIRST_KEY.match(self._buffer)
        if key is not None and key[1] not in _KEYS:
            return self._give_up()
        end = self._scan.end_of(self._buffer)
        if end is None:
            return False
        call = self._parsed(self._buffer[:end])
        if call is None:
            return self._give_up()
        self._begin(call.name, self._buffer[end:], enclosed=True)
        self._tell_arguments(call.arguments)
        self._state = self._read_call
        return True

    def _parsed(self, source: str) -> ToolCall | None:
        """A call whose parts come in an order in which they cannot be passed on as they are written."""
        try:
            value = json.loads(source, strict=False)
            if isinstance(value.get("function"), dict):
                value = value["function"]
            name, given = value.get("name"), value.get("arguments", value.get("parameters"))
            if isinstance(given, str):
                given = json.loads(given) if given.strip() else {}
            if given is None and self._lead.startswith(self._opener or "["):
                given = {}
            if not isinstance(name, str) or name not in self._names or not isinstance(given, dict):
                return None
            arguments = json.dumps(given, ensure_ascii=False, allow_nan=False)
            arguments.encode()  # half of a surrogate pair, which JSON can spell and UTF-8 cannot
            return ToolCall(name, arguments)
        except (ValueError, RecursionError):
            return None

    def _begin(self, name: str, rest: str, *, enclosed: bool) -> bool:
        self._lead, self._buffer, self._scan = "", rest, _Scan()
        self._state, self._enclosed, self._is_fresh = self._read_arguments, enclosed, False
        self._space = self._space if self._has_text else ""
        self._count += 1
        self._tell_call(Piece(index=self._count - 1, name=name))
        return True

    def _read_arguments(self) -> bool:
        end = self._scan.end_of(self._buffer)
        self._tell_arguments(self._buffer[:end])
        if end is None:
            self._buffer, self._scan.at = "", 0
            return False
        self._buffer, self._scan = self._buffer[end:], _Scan(depth=1)
        self._state = self._read_rest if self._enclosed else self._read_call
        if not self._enclosed:
            self._scan = _Scan()
        return True

    def _read_rest(self) -> bool:
        """Behind the arguments: an id, say, and the end of the object."""
        end = self._scan.end_of(self._buffer)
        if end is None:
            self._buffer, self._scan.at = "", 0
            return False
        self._buffer, self._scan, self._state = self._buffer[end:], _Scan(), self._read_call
        return True

    def _give_up(self) -> bool:
        """What looked like a call is none: its beginning is text, and what follows is looked at again."""
        self._tell_text(self._lead)
        self._lead, self._scan, self._state = "", _Scan(), self._read_text
        return True

    def _tell_text(self, text: str) -> None:
        if self._parser in ("llama3_json", "mistral"):
            for marker in MARKERS[self._parser]:  # special tokens, which are not shown where nobody looks for calls
                text = text.replace(marker, "")
        text = self._space + text
        if self._count and not self._has_text:
            text = text.lstrip(_SPACE)
        shown = text.rstrip(_SPACE)
        self._space = text[len(shown) :]
        if shown:
            self._has_text = True
            self._pieces.append(Piece(shown))

    def _tell_arguments(self, text: str) -> None:
        if text:
            self._tell_call(Piece(text, self._count - 1))

    def _tell_call(self, piece: Piece) -> None:
        if self._parallel or self._count == 1:
            self._pieces.append(piece)


class _Scan:
    """Finds the end of a JSON object or list in text that grows. `depth`: how many are open where it begins; `at`: how
    far the text was looked at."""

    def __init__(self, depth: int = 0) -> None:
        self.at = 0
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def end_of(self, text: str) -> int | None:
        """The index behind the end, or None where it is not there yet."""
        for at in range(self.at, len(text)):
            character = text[at]
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.at = at + 1
                    return at + 1
        self.at = len(text)
        return None


def _overlap(text: str, marker: str) -> int:
    """How many last characters of `text` may be the first ones of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


def _unquoted(text: str) -> str:
    """The string that stands between quotes in JSON; empty where it is not one."""
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return ""
