"""From `StructuredOutputs` to the text that llguidance compiles: its dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import llguidance

from pagemill.engine.grammar_schema import prepare
from pagemill.engine.structured_outputs import StructuredOutputs

# The parser would allow only one tokenisation of text that is certain, and a model may prefer another. At the end, so
# that the lines of a message are those of the caller's grammar.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_WHITESPACE = r"( |\r?\n[ \t]{0,40})"
_ESCAPES = 'nrbtf\\"'
# Strings, comments and regular expressions. What is not closed ends with its line, so that a text is read once.
_LITERALS = re.compile(r'"(?:\\.|[^"\\\n])*+"?|//.*|/(?:\\.|[^/\\\n])*+/?|#.*')
_GBNF_RULE = re.compile(r"(?m)^[ \t]*[\w-]+[ \t]*::=")
_JSON = re.compile(r"%json\s*")


def source_of(spec: StructuredOutputs, convert: Callable[[str], str]) -> str:
    """Raises `ValueError` on what can be seen to be wrong before compiling. `convert` makes Lark of GBNF."""
    return _rules(spec, convert) + _OPTIONS


def _rules(spec: StructuredOutputs, convert: Callable[[str], str]) -> str:
    if spec.regex is not None:
        return f"start: /{llguidance.regex_to_lark(spec.regex)}/"
    if spec.choice is not None:
        # One regular expression: as alternatives of a rule, thousands would be looked at one by one.
        return f"start: /{llguidance.regex_to_lark('|'.join(map(_literal, spec.choice)))}/"
    if spec.grammar is not None:
        is_gbnf = _GBNF_RULE.search(spec.grammar) is not None
        return _checked(convert(spec.grammar) if is_gbnf else spec.grammar, closed=spec.disable_additional_properties)
    schema: Any = {"type": "object"} if spec.json is None else json.loads(str(spec.json))
    return f"start: %json {_schema(schema, spec)}"


def _schema(schema: Any, spec: StructuredOutputs) -> str:
    schema = prepare(schema, closed=spec.disable_additional_properties)
    if schema is False:
        raise ValueError("no text satisfies the schema false")
    options: dict[str, Any] = {"json_allowed_escapes": _ESCAPES}
    if spec.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        # A class within a class is their union.
        options["whitespace_pattern"] = (spec.whitespace_pattern or _WHITESPACE).replace(r"\s", r"[ \t\r\n]")
    return json.dumps({**({} if schema is True else schema), "x-guidance": options})


def _checked(lark: str, *, closed: bool) -> str:
    """A caller's grammar, with its schemas made safe. Raises `ValueError` where it asks for what is not text."""
    bare = _LITERALS.sub(lambda match: " " * len(match[0]), lark)
    for mark, what in (("<", "special tokens (<...>)"), ("%llguidance", "%llguidance"), ("%lark", "%lark")):
        if mark in bare:
            raise ValueError(f"{what} cannot be part of a grammar, which is about text")
    return _with_schemas(lark, bare, closed=closed)


def _with_schemas(lark: str, bare: str, *, closed: bool) -> str:
    """`lark` with its %json schemas made safe."""
    pieces: list[str] = []
    end = 0
    for match in _JSON.finditer(bare):
        if match.start() < end:
            continue
        try:
            schema, after = json.JSONDecoder().raw_decode(lark, match.end())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"%json is not followed by a schema: {error}") from error
        inline = StructuredOutputs(json=schema, disable_additional_properties=closed)
        pieces += [lark[end : match.start()], "%json ", _schema(json.loads(str(inline.json)), inline)]
        end = after
    return "".join([*pieces, lark[end:]])


def _literal(text: str) -> str:
    """A regular expression that matches `text` alone."""
    return "".join(character if character.isalnum() else f"\\x{{{ord(character):x}}}" for character in text)
