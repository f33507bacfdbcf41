"""Errors in the words of the route: clients of OpenAI's routes know fields by names that the queue has not."""

from __future__ import annotations

import re

_Names = tuple[tuple[re.Pattern[str], str], ...]

_SCHEMA = re.compile(r"response_format(\.json_schema)?")
_NAMES: dict[str, _Names] = {
    "/v1/completions": ((re.compile("prompt_token_ids"), "prompt"),),
    "/v1/chat/completions": ((re.compile(r"prompt\b"), "messages"),),
    "/v1/responses": (
        (re.compile(r"(prompt|messages)\b.*"), "input"),
        (_SCHEMA, "text.format"),
        (re.compile(r"max_tokens\b"), "max_output_tokens"),
        (re.compile(r"(tools\[\d+\])\.function"), r"\1"),
    ),
}


def in_words_of(path: str, param: str, message: str) -> tuple[str, str]:
    """The name of a field and what is wrong with it, where the message begins with that name, as `path` spells them."""
    for pattern, name in _NAMES.get(path.rstrip("/"), ()):
        if pattern.match(param):
            own = pattern.sub(name, param, count=1)
            rest = message.removeprefix(param)
            if pattern is _SCHEMA and pattern.match(message):
                return own, pattern.sub(name, message, count=1)
            return own, message if rest == message else f"{own}{rest}"
    return param, message
