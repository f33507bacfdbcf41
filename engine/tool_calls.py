"""Tool calls in the text of an answer, found while it grows.

Models write calls in forms of their own; these are read:

* hermes (Hermes, Qwen 2.5 and 3, SmolLM): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one after
  another, or a list between the tags. granite and phi4_mini_json: such a list behind `<|tool_call|>` or `functools`.
* llama3_json (Llama 3.1 and later): the answer is `{"name": ..., "parameters": {...}}`, several with `; ` between,
  behind `<|python_tag|>` or not.
* mistral: `[TOOL_CALLS]` and a list of such objects, or since version 11 `[TOOL_CALLS]name[ARGS]{...}`.
* deepseek_v3, deepseek_v31: a name and JSON between special tokens.
* json: a list of such objects and nothing else, as a call is written that is forced (`tool_choice`).
* qwen3_coder and pythonic: see `tool_xml` and `tool_pythonic`.

What only looks like a call is text: a marker without an object behind it, an object that names no tool of the request.
The same pieces come out however the text is cut, so an answer that is streamed and one that is not have the same calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pagemill.engine import tool_pythonic, tool_xml
from pagemill.engine.tool_blocks import BlockReader
from pagemill.engine.tool_json import JSON_FORMS, JsonReader
from pagemill.engine.tool_pieces import Piece, Telling

_Form = Literal[
    "hermes",
    "llama3_json",
    "mistral",
    "granite",
    "phi4_mini_json",
    "deepseek_v3",
    "deepseek_v31",
    "qwen3_coder",
    "pythonic",
]
ToolParserName = Literal[_Form, "json"]
ToolParserSetting = Literal["auto", "none", _Form]
PARSERS: tuple[str, ...] = get_args(_Form)
# What of a form may be a special token, which has to stay in the text for the form to be seen.
MARKERS: dict[str, tuple[str, ...]] = {
    **{name: form.markers for name, form in JSON_FORMS.items()},
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "deepseek_v3": (*JSON_FORMS["deepseek_v3"].markers, "<｜tool▁sep｜>"),
    "deepseek_v31": (*JSON_FORMS["deepseek_v31"].markers, "<｜tool▁sep｜>"),
    "qwen3_coder": tool_xml.MARKERS,
    "pythonic": tool_pythonic.MARKERS,
}
_HIDDEN = ("llama3_json", "mistral", "granite", "deepseek_v3", "deepseek_v31", "pythonic")


def parser_of(template: str) -> ToolParserName | None:
    """The form in which a model writes calls, by what its chat template mentions. None: another one, or none."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<｜tool▁call▁begin｜>" in template:
        return "deepseek_v3"
    if "[func_name1(" in template:
        return "pythonic"
    if "<tool_call>" in template and "<function=" in template and "<parameter=" in template:
        return "qwen3_coder"
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return "hermes"
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return "llama3_json"
    if "functools[" in template:
        return "phi4_mini_json"
    return "granite" if "<|tool_call|>" in template else None


def call_id(parser: str, request_id: str, choice: int, index: int) -> str:
    """The id of a call: the same whenever and wherever it is read. Mistral's templates want nine letters or digits."""
    digest = hashlib.sha256(f"{request_id}/{choice}/{index}".encode()).hexdigest()
    return digest[:9] if parser == "mistral" else f"call_{digest[:24]}"


class ToolCallReader:
    """Reads one choice's text piece by piece. `tools`: the schemas of the arguments, by the names of the tools that may
    be called. Without `parallel` only the first call is told. White space beside a call is left out."""

    def __init__(
        self,
        parser: ToolParserName,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        parallel: bool = True,
    ) -> None:
        self._telling = Telling(MARKERS[parser] if parser in _HIDDEN else (), parallel=parallel)
        self._reader: JsonReader | BlockReader
        if parser == "qwen3_coder":
            self._reader = BlockReader(tool_xml.XmlGrammar(tools), self._telling)
        elif parser == "pythonic":
            self._reader = BlockReader(tool_pythonic.PythonicGrammar(tools), self._telling)
        else:
            self._reader = JsonReader(JSON_FORMS[parser], tools, self._telling)

    @property
    def has_calls(self) -> bool:
        return self._telling.count > 0

    def feed(self, text: str) -> list[Piece]:
        """The next part of the text; what is certain now."""
        return self._reader.feed(text)

    def finish(self) -> list[Piece]:
        """The text has ended: what was held back is text after all. A forced call that has not begun is left out."""
        return self._reader.finish()
