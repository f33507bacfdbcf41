"""Tool calls whose arguments the model writes as JSON, read while they grow.

A call is told as soon as it is certain: its name is known and its arguments have begun. From then on the arguments are
passed on as the model writes them, so they may end early, where the answer does. Two slips of models inside strings are
mended on the way, since nothing is lost by it: control characters as they are (a line break), and a backslash before
what needs none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass

from pagemill.engine.state_reader import StateReader
from pagemill.engine.tool_pieces import SPACE, Telling, ToolCall, first_of, overlap

_LONGEST_HEAD = 512  # characters before the arguments
_STRING = r'"((?:[^"\\]|\\.)*)"'
_HEAD = re.compile(
    rf'\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*{_STRING}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_KEYS = ("name", "type", "function", "arguments", "parameters", "id")
_NAME = r"[\w.:/-]{1,128}"


@dataclass(frozen=True, slots=True)
class JsonForm:
    """How calls are written around their JSON.

    openers, closers: markers before and behind calls. are_special: they are special tokens. between: characters that
    mean nothing beside a call. bare: without an opener a call is the whole answer; forced: the answer is calls only.
    named: a name that stands outside of the JSON, up to the arguments; named_so_far: what may still become one.
    """

    openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    are_special: bool = False
    between: str = f"{SPACE},[]"
    bare: bool = False
    forced: bool = False
    named: re.Pattern[str] | None = None
    named_so_far: re.Pattern[str] | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        return self.openers + self.closers


_DEEPSEEK = JsonForm(
    openers=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    closers=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    are_special=True,
    between=f"{SPACE}`",
    # V3 and R1 write function<sep>name and a code fence, V3.1 name<sep> and the arguments.
    named=re.compile(
        rf"(?:<｜tool▁call▁begin｜>\s*)?(?:function\s*<｜tool▁sep｜>\s*)?({_NAME})\s*(?:<｜tool▁sep｜>)?\s*"
        r"(?:```(?:json)?)?\s*(?=\{)"
    ),
    named_so_far=re.compile(rf"[^{{]{{0,{_LONGEST_HEAD}}}"),
)
JSON_FORMS: dict[str, JsonForm] = {
    "hermes": JsonForm(openers=("<tool_call>",), closers=("</tool_call>",)),
    "granite": JsonForm(openers=("<|tool_call|>",), are_special=True),
    "phi4_mini_json": JsonForm(openers=("functools",)),
    "llama3_json": JsonForm(
        openers=("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
        are_special=True,
        between=f"{SPACE};",
        bare=True,
    ),
    "mistral": JsonForm(
        openers=("[TOOL_CALLS]",),
        are_special=True,
        named=re.compile(rf"({_NAME})(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{{)"),
        named_so_far=re.compile(rf"{_NAME}(?:\[[A-Z_]*(?:\]\w*)?){{0,2}}\s*"),
    ),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "json": JsonForm(forced=True),
}


class JsonReader(StateReader):
    """Reads one choice's text piece by piece. `names`: the tools that may be called."""

    def __init__(self, form: JsonForm, names: Collection[str], telling: Telling) -> None:
        super().__init__(self._read_call if form.forced else self._read_text, telling)
        self._form = form
        self._names = frozenset(names)
        self._telling = telling
        self._may_be_bare = form.bare
        self._is_fresh = form.forced  # behind a marker there was no call yet
        self._lead = ""  # what was taken off the buffer for a call that is not certain yet
        self._scan = _Scan()
        self._enclosed = True  # the arguments stand in an object, whose end is still to come

    def _end(self, rest: str) -> None:
        """What was held back is text after all. A forced call that has not begun is left out."""
        if self._state == self._read_text:
            self._telling.text(rest)
        elif self._state == self._read_call and not self._form.forced:
            left = rest.lstrip(self._form.between)
            if self._is_fresh or not any(marker.startswith(left) for marker in self._form.markers):
                self._telling.text(self._lead + rest)
        self._telling.end()

    def _read_text(self) -> bool:
        if self._may_be_bare:
            bare = self._buffer.lstrip(SPACE)
            if not bare:
                return False
            self._may_be_bare = False
            if bare.startswith("{"):
                return self._enter(self._buffer[: len(self._buffer) - len(bare)], bare)
        found = first_of(self._form.openers, self._buffer)
        if found is not None:
            at, opener = found
            self._telling.text(self._buffer[:at])
            return self._enter(opener, self._buffer[at + len(opener) :])
        held = overlap(self._buffer, self._form.markers if self._form.are_special else self._form.openers)
        sure = len(self._buffer) - held
        self._telling.text(self._buffer[:sure])
        self._buffer = self._buffer[sure:]
        return False

    def _enter(self, lead: str, rest: str) -> bool:
        self._lead, self._buffer, self._is_fresh = lead, rest, True
        self._state = self._read_call
        return True

    def _read_call(self) -> bool:
        bare = self._buffer.lstrip(self._form.between)
        if bare.startswith("{"):
            self._lead += self._buffer[: len(self._buffer) - len(bare)]
            self._buffer = bare
            return self._read_object()
        if self._is_fresh:
            return bool(bare) and self._read_name(bare)
        closer = next((marker for marker in self._form.closers if bare.startswith(marker)), None)
        if closer is not None:
            self._buffer, self._state = bare[len(closer) :], self._read_text
            return True
        opener = next((marker for marker in self._form.openers if bare.startswith(marker)), None)
        if opener is not None:
            return self._enter(opener, bare[len(opener) :])
        if not bare or any(marker.startswith(bare) for marker in self._form.markers):
            return False
        return self._give_up()

    def _read_name(self, bare: str) -> bool:
        """A name that stands before the JSON."""
        form = self._form
        if form.named is not None and form.named_so_far is not None:
            named = form.named.match(bare)
            if named is not None and named[1] in self._names:
                return self._begin(named[1], bare[named.end() :], enclosed=False)
            if form.named_so_far.fullmatch(bare):
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
        self._telling.arguments(call.arguments)
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
            # Behind a marker, or in a forced call, arguments that are missing are none. A bare object may be anything.
            if given is None and (self._form.forced or self._lead.startswith(self._form.openers)):
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
        self._telling.call(name)
        return True

    def _read_arguments(self) -> bool:
        end = self._scan.end_of(self._buffer)
        self._telling.arguments(self._scan.mended(self._buffer[:end]))
        if end is None:
            self._buffer, self._scan.at = "", 0
            return False
        self._buffer, self._scan = self._buffer[end:], _Scan(depth=1 if self._enclosed else 0)
        self._state = self._read_rest if self._enclosed else self._read_call
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
        self._telling.text(self._lead)
        self._lead, self._scan, self._state = "", _Scan(), self._read_text
        return True


class _Scan:
    """Finds the end of a JSON object or list in text that grows. `depth`: how many are open where it begins; `at`: how
    far the text was looked at."""

    def __init__(self, depth: int = 0) -> None:
        self.at = 0
        self._depth = depth
        self._in_string = False
        self._is_escaped = False
        self._slips: list[tuple[int, str]] = []  # where JSON allows no such character, and how it is spelt

    def end_of(self, text: str) -> int | None:
        """The index behind the end, or None where it is not there yet."""
        for at in range(self.at, len(text)):
            character = text[at]
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                    if character < " ":
                        self._slips.append((at, json.dumps(character)[2:-1]))
                    elif character not in '"\\/bfnrtu':
                        self._slips.append((at, f"\\{character}"))
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
                elif character < " ":
                    self._slips.append((at, json.dumps(character)[1:-1]))
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

    def mended(self, text: str) -> str:
        """`text`, which was just looked at from its beginning, as JSON spells it."""
        slips, self._slips = self._slips, []
        for at, spelling in reversed(slips):
            text = text[:at] + spelling + text[at + 1 :]
        return text


def _unquoted(text: str) -> str:
    """The string that stands between quotes in JSON; empty where it is not one."""
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return ""
