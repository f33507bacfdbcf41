"""Values from callers: NumPy's numbers pass as numbers, booleans do not; text is what can be written down."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

_SHOWN = 80  # characters of a bad value that a message repeats


def as_integer(value: object) -> int | None:
    """`value` as an int if it is an integer of any numeric library; None if it is not, or a boolean."""
    if type(value) is int:
        return value
    return None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def as_number(value: object) -> float | None:
    """`value` as a float if it is a real number, infinite where it is too large for one; None if it is not."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def as_text(value: object) -> str | None:
    """`value` if it is text that can be written down, in a file's name and in JSON; None if it is not."""
    if not isinstance(value, str) or "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        return None
    return value


def shown(value: Any) -> str:
    """`value` for a message: short, and never an error itself (Python refuses to print integers of 4301 digits)."""
    try:
        text = repr(value) if isinstance(value, str | bytes) else str(value)
    except ValueError:
        return f"one of too many digits ({type(value).__name__})"
    except RecursionError:
        return f"one that is nested too deep ({type(value).__name__})"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
