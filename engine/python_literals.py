"""Literals of Python as models write them: what JSON has, in Python's spelling or in JSON's.

`ast.literal_eval` is not used: it refuses a line break within quotes and JSON's `true`, warns about a backslash that
needs no escape, and its depth is bounded by the machine's stack only.
"""

from __future__ import annotations

import re
from typing import Any

MAX_DEPTH = 64
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_MAX_DIGITS = 400  # int() of very long ones is refused by Python, and JSON readers have none
_WORD = re.compile(r"[A-Za-z_]\w*")
_WORDS: dict[str, Any] = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_QUOTE = re.compile(r"[rR]?('''|\"\"\"|'|\")")
_SPACE = re.compile(r"\s*")
_SHORT = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"} | {
    character: character for character in "\\'\"/"
}
_CODES = {"x": 2, "u": 4, "U": 8}


def read_literal(text: str) -> Any:
    """The value of a whole text. Raises `ValueError`."""
    value, at = literal_at(text, 0)
    if skip_space(text, at) != len(text):
        raise ValueError("something stands behind the literal")
    return value


def skip_space(text: str, at: int) -> int:
    """The index of the next character that is no white space."""
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def literal_at(text: str, at: int, depth: int = MAX_DEPTH) -> tuple[Any, int]:
    """The value that begins at `at`, perhaps after white space, and the index behind it. Raises `ValueError`."""
    at = skip_space(text, at)
    if not depth:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if text.startswith(("[", "("), at):
        return _list_at(text, at, depth)
    if text.startswith("{", at):
        return _object_at(text, at, depth)
    if _QUOTE.match(text, at):
        return _string_at(text, at)
    number = _NUMBER.match(text, at)
    if number is not None and len(number[0]) <= _MAX_DIGITS:
        digits = number[0]
        return (int(digits) if digits.strip("+-").replace("_", "").isdigit() else float(digits)), number.end()
    word = _WORD.match(text, at)
    if word is not None and word[0] in _WORDS:
        return _WORDS[word[0]], word.end()
    raise ValueError("no literal")


def _list_at(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    closer = "]" if text[at] == "[" else ")"
    items: list[Any] = []
    at = skip_space(text, at + 1)
    while not text.startswith(closer, at):
        item, at = literal_at(text, at, depth - 1)
        items.append(item)
        at = _behind_comma(text, at, closer)
    return items, at + 1


def _object_at(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    items: dict[str, Any] = {}
    at = skip_space(text, at + 1)
    while not text.startswith("}", at):
        key, at = literal_at(text, at, 1)
        at = skip_space(text, at)
        if not text.startswith(":", at) or isinstance(key, list | dict):
            raise ValueError("no key of an object")
        items[key if isinstance(key, str) else str(key)], at = literal_at(text, at + 1, depth - 1)
        at = _behind_comma(text, at, "}")
    return items, at + 1


def _behind_comma(text: str, at: int, closer: str) -> int:
    at = skip_space(text, at)
    if text.startswith(",", at):
        return skip_space(text, at + 1)
    if not text.startswith(closer, at):
        raise ValueError(f"neither a comma nor {closer}")
    return at


def _string_at(text: str, at: int) -> tuple[str, int]:
    """A string, or several that stand side by side."""
    parts: list[str] = []
    while (match := _QUOTE.match(text, at)) is not None:
        part, at = _quoted(text, match.end(), match[1], is_raw=match[0][0] in "rR")
        parts.append(part)
        behind = skip_space(text, at)
        if not _QUOTE.match(text, behind):
            break
        at = behind
    return "".join(parts), at


def _quoted(text: str, at: int, quote: str, *, is_raw: bool) -> tuple[str, int]:
    parts: list[str] = []
    start = at
    while at < len(text):
        if text.startswith(quote, at):
            return "".join((*parts, text[start:at])), at + len(quote)
        if text[at] != "\\":
            at += 1
        elif is_raw:
            at += 2
        else:
            character, behind = _escaped(text, at + 1)
            parts += (text[start:at], character)
            start = at = behind
    raise ValueError("a string has no end")


def _escaped(text: str, at: int) -> tuple[str, int]:
    """What stands behind a backslash. One that needs none is a backslash."""
    character = text[at : at + 1]
    if character == "\n":
        return "", at + 1
    if character in _CODES:
        digits = text[at + 1 : at + 1 + _CODES[character]]
        if re.fullmatch(rf"[0-9a-fA-F]{{{_CODES[character]}}}", digits):
            code = int(digits, 16)
            if code > 0x10FFFF:
                raise ValueError("no character")
            return chr(code), at + 1 + len(digits)
    return _SHORT.get(character, f"\\{character}"), at + 1
