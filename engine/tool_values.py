"""The value of a tool's argument that a model wrote as plain text, by the JSON schema of the tool."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pagemill.engine.python_literals import read_literal

_INTEGER = re.compile(r"[+-]?\d{1,400}(?:\.0+)?")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_DEPTH = 8  # of references and alternatives that are followed
_OF_PYTHON: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object"}
# Names for types that are not JSON schema's, and are sent all the same.
_ALIASES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}


def argument(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """`text` as the first of the types that the property `name` may have and the text can be; else the text. `schema`:
    the parameters of the tool."""
    kinds = set(_kinds(_property(name, schema), schema, _DEPTH))
    word = text.strip()
    if "null" in kinds and (word == "null" or (word in ("None", "") and "string" not in kinds)):
        return None
    if "boolean" in kinds and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if "integer" in kinds and _INTEGER.fullmatch(word):
        return int(word.partition(".")[0])
    if "number" in kinds and _NUMBER.fullmatch(word):
        number = int(word) if _INTEGER.fullmatch(word) and "." not in word else float(word)
        if math.isfinite(number):
            return number
    if {"object", "array"} & kinds:
        value = _parsed(word)
        if isinstance(value, dict if "object" in kinds else list) or (isinstance(value, list) and {"array"} & kinds):
            return value
    return text


def as_json(arguments: Mapping[str, Any]) -> str | None:
    """Arguments as JSON; None where JSON or UTF-8 have no name for something in them."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):
        return None
    return text


def _parsed(text: str) -> Any:
    """JSON, or a literal of Python, which models write where they mean JSON; None if neither."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        try:
            value = read_literal(text)
        except ValueError:
            return None
    return value if as_json({"": value}) is not None else None


def _property(name: str, schema: Mapping[str, Any]) -> Any:
    known = schema.get("properties")
    if isinstance(known, Mapping) and name in known:
        return known[name]
    return schema.get("additionalProperties")


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> Iterable[str]:
    """The JSON types that a schema allows, as far as it says."""
    if not isinstance(schema, Mapping) or not depth:
        return
    given = schema.get("type")
    named = given if isinstance(given, list) else [given]
    yield from (_ALIASES.get(kind, kind) for kind in named if isinstance(kind, str))
    for word in ("anyOf", "oneOf", "allOf"):
        options = schema.get(word)
        if isinstance(options, list):
            for option in options:
                yield from _kinds(option, root, depth - 1)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        yield from _kinds(_target(reference, root), root, depth - 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if given is None and isinstance(values, list):
        yield from ("null" if value is None else _OF_PYTHON.get(type(value), "array") for value in values)
    if given is None and "properties" in schema:
        yield "object"
    if given is None and "items" in schema:
        yield "array"


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within the schema points at."""
    found: Any = root
    for name in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
