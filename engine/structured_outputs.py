"""What a request's text must look like: a JSON schema, any JSON object, a regular expression, a choice or a grammar.

Two spellings are read, vLLM's `structured_outputs` and OpenAI's `response_format`. Everything that needs no tokenizer
is checked here, so that a producer learns of a mistake where it is made; whether the grammar can be built is found out
by `GrammarCompiler`. Imports nothing heavy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagemill.engine.errors import RequestError, invalid
from pagemill.engine.values import shown

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_GRAMMAR_LENGTH = 64 * 1024  # characters
MAX_REGEX_LENGTH = 8 * 1024  # characters
MAX_WHITESPACE_PATTERN_LENGTH = 256  # characters
MAX_CHOICES = 4096
MAX_CHOICE_LENGTH = 4096  # characters
MAX_CHOICES_LENGTH = 64 * 1024  # characters of all choices together

_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_FLAGS = ("disable_any_whitespace", "disable_additional_properties")
_REFUSED = ("disable_fallback", "structural_tag")  # vLLM's; null and false ask for nothing
# Of the white space of JSON, and nothing that could match another character.
_WHITESPACE = re.compile(r"(?:[ \t\n\r|*+?\[\]()]|\(\?:|\\[nrts]|\\x(?:20|09|0[aAdD])|\{[0-9]*,?[0-9]*\})*")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The form of one request's text; exactly one of the first five. Raises `RequestError("invalid_request")`.

    json: a JSON schema, as text, as an object or as a boolean; kept as text.
    json_object: true for any JSON object.
    regex: a regular expression that the whole text matches (the syntax of Rust's `regex`, no look-around).
    choice: the text is one of these strings.
    grammar: a context-free grammar, in Lark's syntax or in llama.cpp's GBNF.
    whitespace_pattern: with json or json_object, a regular expression for the white space between two JSON tokens; by
        default one space, or a line break with at most 40 spaces or tabs, so that white space cannot go on for ever.
    disable_any_whitespace: with json or json_object, no white space between JSON tokens.
    disable_additional_properties: with json, or the schemas in a grammar, an object that lists its properties has no
        others.
    param: the request's field that messages and errors name.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    param: str = "structured_outputs"

    def __post_init__(self) -> None:
        for name in ("json_object", *_FLAGS):
            if not isinstance(getattr(self, name), bool):
                raise self.error(f".{name} must be true or false, got {shown(getattr(self, name))}")
        given = [name for name in _KINDS if getattr(self, name) not in (None, False) or self._is_schema(name)]
        if len(given) != 1:
            count = f"{' and '.join(given)} together" if given else "none of them"
            raise self.error(f" must have exactly one of {', '.join(_KINDS)}; got {count}")
        kind = given[0]
        if kind == "json":
            object.__setattr__(self, "json", self._schema(self.json))
        elif kind == "choice":
            object.__setattr__(self, "choice", self._choices(self.choice))
        elif kind == "regex":
            self._text(self.regex, ".regex", MAX_REGEX_LENGTH)
        elif kind == "grammar":
            self._text(self.grammar, ".grammar", MAX_GRAMMAR_LENGTH)
        self._check_options(kind)

    @classmethod
    def from_vllm(cls, fields: object) -> StructuredOutputs:
        """Read vLLM's `structured_outputs`; a null means that the field is not given."""
        param = "structured_outputs"
        if isinstance(fields, StructuredOutputs):
            return fields
        if not isinstance(fields, Mapping):
            raise invalid(f"{param} must be an object, got {type(fields).__name__}", param)
        given: dict[str, Any] = {}
        for name, value in fields.items():
            if name not in (*_KINDS, *_FLAGS, *_REFUSED, "whitespace_pattern"):
                raise invalid(f"{param} has an unknown field {shown(name)}", param)
            if name in _REFUSED and value not in (None, False):
                raise invalid(f"{param}.{name} is not supported by this engine; leave it out", param)
            if name not in _REFUSED and value is not None:
                given[name] = value
        return cls(**given, param=param)

    @classmethod
    def from_response_format(cls, fields: object) -> StructuredOutputs | None:
        """Read OpenAI's `response_format`; None for plain text."""
        param = "response_format"
        if not isinstance(fields, Mapping):
            raise invalid(f"{param} must be an object, got {type(fields).__name__}", param)
        kind = fields.get("type")
        known = {"text": ("type",), "json_object": ("type",), "json_schema": ("type", "json_schema")}
        if not isinstance(kind, str) or kind not in known:
            raise invalid(f"{param}.type must be one of {', '.join(known)}; got {shown(kind)}", param)
        for name in fields:
            if name not in known[kind]:
                raise invalid(f"{param} has an unknown field {shown(name)} for type {kind}", param)
        if kind == "text":
            return None
        if kind == "json_object":
            return cls(json_object=True, param=param)
        return cls(json=_schema_of(fields.get("json_schema"), param), param=param)

    @property
    def kind(self) -> str:
        """Which of json, json_object, regex, choice and grammar is given."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))

    @property
    def place(self) -> str:
        """Where in the request the form stands, as a path for messages."""
        if self.param == "response_format":
            return f"{self.param}.json_schema.schema" if self.json is not None else f"{self.param}.type"
        if self.param == "tools":
            return "tools, whose parameters a forced call has to follow,"
        return f"{self.param}.{self.kind}"

    def error(self, message: str) -> RequestError:
        """An `invalid_request` about this form. `message` goes on from the field's name."""
        return invalid(f"{self.param}{message}", self.param)

    def _is_schema(self, name: str) -> bool:
        return name == "json" and self.json is False

    def _schema(self, schema: object) -> str:
        place = ".json_schema.schema" if self.param == "response_format" else ".json"
        if isinstance(schema, str):
            if len(schema.encode("utf-8", "surrogatepass")) > MAX_SCHEMA_BYTES:
                raise self.error(f"{place} may have at most {MAX_SCHEMA_BYTES} bytes, got {len(schema)} characters")
            try:
                schema = json.loads(schema, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                raise self.error(f"{place} is not valid JSON: {error}") from error
        if not isinstance(schema, Mapping | bool):
            raise self.error(f"{place} must be a JSON schema, an object or a boolean, got {shown(schema)}")
        if _depth(schema) > MAX_SCHEMA_DEPTH:
            raise self.error(f"{place} is nested deeper than {MAX_SCHEMA_DEPTH} levels")
        try:
            text = json.dumps(schema, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise self.error(f"{place} is not JSON: {error}") from error
        if len(text) > MAX_SCHEMA_BYTES:
            raise self.error(f"{place} may have at most {MAX_SCHEMA_BYTES} bytes, got {len(text)}")
        return text

    def _choices(self, choices: object) -> tuple[str, ...]:
        if isinstance(choices, str | bytes | Mapping) or not isinstance(choices, Sequence) or not choices:
            raise self.error(".choice must be a list with at least one string")
        if len(choices) > MAX_CHOICES:
            raise self.error(f".choice may hold at most {MAX_CHOICES} strings, got {len(choices)}")
        for position, text in enumerate(choices):
            self._text(text, f".choice[{position}]", MAX_CHOICE_LENGTH)
        total = sum(map(len, choices))
        if total > MAX_CHOICES_LENGTH:
            raise self.error(f".choice may have at most {MAX_CHOICES_LENGTH} characters in all, got {total}")
        return tuple(dict.fromkeys(choices))

    def _text(self, text: object, place: str, limit: int) -> None:
        if not isinstance(text, str):
            raise self.error(f"{place} must be a string, got {type(text).__name__}")
        if not text:
            raise self.error(f"{place} may not be empty")
        if len(text) > limit:
            raise self.error(f"{place} may have at most {limit} characters, got {len(text)}")
        if "\0" in text or not _is_unicode(text):
            raise self.error(f"{place} is not valid Unicode text, or has a NUL character")

    def _check_options(self, kind: str) -> None:
        """Refuse an option where it would be without effect."""
        is_json = kind in ("json", "json_object")
        if self.whitespace_pattern is not None:
            self._text(self.whitespace_pattern, ".whitespace_pattern", MAX_WHITESPACE_PATTERN_LENGTH)
            if not _WHITESPACE.fullmatch(self.whitespace_pattern):
                raise self.error(
                    ".whitespace_pattern may match space, tab, line feed and carriage return only (\\s is all four), "
                    f"got {shown(self.whitespace_pattern)}"
                )
            if self.disable_any_whitespace:
                raise self.error(".whitespace_pattern cannot be combined with disable_any_whitespace")
        for name, fits in (
            ("whitespace_pattern", is_json),
            ("disable_any_whitespace", is_json),
            ("disable_additional_properties", kind in ("json", "grammar")),
        ):
            if getattr(self, name) and not fits:
                raise self.error(f".{name} means nothing with {kind}; leave it out")


def _schema_of(fields: object, param: str) -> Any:
    """The schema in OpenAI's `json_schema` object. `strict` changes nothing: a schema is always kept to."""
    if not isinstance(fields, Mapping):
        raise invalid(f"{param}.json_schema must be an object with name and schema", param)
    for name in fields:
        if name not in ("name", "description", "strict", "schema"):
            raise invalid(f"{param}.json_schema has an unknown field {shown(name)}", param)
    if not isinstance(fields.get("name", ""), str):
        raise invalid(f"{param}.json_schema.name must be a string, got {shown(fields['name'])}", param)
    if not isinstance(fields.get("strict"), bool | None):
        raise invalid(f"{param}.json_schema.strict must be true or false, got {shown(fields['strict'])}", param)
    schema = fields.get("schema")
    if not isinstance(schema, Mapping | bool):
        raise invalid(f"{param}.json_schema.schema must be an object, got {shown(schema)}", param)
    return schema


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _depth(value: object) -> int:
    """How deep `value` is nested, level by level, so that no depth can overflow the stack."""
    depth, level = 0, [value]
    while level and depth <= MAX_SCHEMA_DEPTH:
        following: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                following += item.values()
            elif isinstance(item, list | tuple):
                following += item
        level, depth = following, depth + 1
    return depth if level else depth - 1


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
