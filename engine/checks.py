"""Checks of a parameter's value, each with an error that names the parameter, the limit and what was given.

All raise `RequestError("invalid_request")` and return the value in its one internal form.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from pagemill.engine.errors import invalid
from pagemill.engine.values import as_integer, as_number, shown

MAX_TOKEN_ID = 2**31 - 1


def number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> float:
    """A finite real number in [low, high], or (low, high]."""
    real = as_number(value)
    if real is None:
        raise invalid(f"{name} must be a number, got {type(value).__name__}", name)
    if not math.isfinite(real) or real < low or real > high or (low_open and real == low):
        raise invalid(f"{name} must be in {'(' if low_open else '['}{low:g}, {high:g}], got {shown(value)}", name)
    return real


def integer(name: str, value: object, low: int, high: int) -> int:
    """An integer in [low, high]."""
    whole = as_integer(value)
    if whole is None:
        # An integer of more than 64 bits comes out of JSON as a float: its type alone would puzzle whoever sent it.
        given = shown(value) if isinstance(value, float) else type(value).__name__
        raise invalid(f"{name} must be an integer in [{low}, {high}], got {given}", name)
    if not low <= whole <= high:
        raise invalid(f"{name} must be in [{low}, {high}], got {shown(value)}", name)
    return whole


def boolean(name: str, value: object) -> bool:
    """True or False and nothing that merely counts as it."""
    if not isinstance(value, bool):
        raise invalid(f"{name} must be true or false, got {type(value).__name__}", name)
    return value


def strings(name: str, value: object, *, most: int, longest: int) -> tuple[str, ...]:
    """One string or a list of at most `most`, none empty or of more than `longest` characters, each once."""
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else value
    if (
        not isinstance(items, Collection)
        or isinstance(items, Mapping | bytes)
        or not all(isinstance(item, str) for item in items)
    ):
        raise invalid(f"{name} must be a string or a list of strings", name)
    if len(items) > most:
        raise invalid(f"{name} may hold at most {most} strings, got {len(items)}", name)
    for item in items:
        if not item:
            raise invalid(f"{name} may not hold an empty string", name)
        if len(item) > longest:
            raise invalid(f"a string of {name} may have at most {longest} characters, got {len(item)}", name)
        if any("\ud800" <= character <= "\udfff" for character in item):
            raise invalid(f"{name} holds a string that is not valid Unicode text", name)
    return tuple(dict.fromkeys(items))


def token_ids(name: str, value: object, *, most: int) -> tuple[int, ...]:
    """A list of at most `most` token ids, each once. Whether the model has them is checked later."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection):
        raise invalid(f"{name} must be a list of token ids", name)
    if len(value) > most:
        raise invalid(f"{name} may hold at most {most} token ids, got {len(value)}", name)
    return tuple(dict.fromkeys(integer(name, item, 0, MAX_TOKEN_ID) for item in value))


def token_biases(name: str, value: object, low: float, high: float, *, most: int) -> tuple[tuple[int, float], ...]:
    """An object from token ids (numbers, or strings as JSON has them) to numbers in [low, high], by ascending id."""
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise invalid(f"{name} must be an object from token ids to numbers, got {type(value).__name__}", name)
    if len(value) > most:
        raise invalid(f"{name} may hold at most {most} token ids, got {len(value)}", name)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # JSON has strings for keys; "+5", " 5" or Arabic digits are somebody's mistake, and a long one is no token id.
        plain = isinstance(key, str) and len(key) <= 10 and key.isascii() and key.isdigit()
        token_id = int(key) if plain else as_integer(key)
        if token_id is None or not 0 <= token_id <= MAX_TOKEN_ID:
            raise invalid(f"{name} must be keyed by token ids, got {shown(key)}", name)
        if token_id in biases:
            raise invalid(f"{name} names token {token_id} twice", name)
        biases[token_id] = number(name, bias, low, high)
    return tuple(sorted(biases.items()))
