"""Other people's words in lines for a terminal: URLs, errors, ids and times that came with requests."""

from __future__ import annotations

from datetime import UTC, datetime

CUT = 72  # characters of an error in a list
LONGEST_ERROR = 1000  # characters of one that ends a command


def harmless(line: str) -> str:
    """Without what a terminal would take for a command: a request holds whatever somebody sent."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


def error_line(message: str) -> str:
    """What a command says of an error, in one line however long or odd what somebody typed is."""
    line = harmless(message[: LONGEST_ERROR + 1])
    return line if len(message) <= LONGEST_ERROR else line[:LONGEST_ERROR] + "..."


def cut(text: str) -> str:
    """As much of an error as a list shows."""
    return text if len(text) <= CUT else text[: CUT - 3] + "..."


def utc(ms: int) -> str:
    """Server ms as date and time."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
