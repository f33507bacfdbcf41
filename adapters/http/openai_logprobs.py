"""Log-probabilities in OpenAI's two shapes, made of the entries that the queue's events hold.

JSON has no infinity, and OpenAI's types want a number, so a token that cannot come has -9999.0, as there.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

IMPOSSIBLE = -9999.0

Entry = Mapping[str, Any]


def chat_content(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Chat's `logprobs.content`."""
    return [{**_token(entry), "top_logprobs": [_token(item) for item in entry["top_logprobs"]]} for entry in entries]


def _token(entry: Entry) -> dict[str, Any]:
    return {"token": entry["token"], "logprob": _number(entry["logprob"]), "bytes": entry["bytes"]}


def _number(logprob: float | None) -> float:
    return IMPOSSIBLE if logprob is None else logprob


class CompletionLogprobs:
    """The shape of completions, four lists side by side, made part by part.

    `text_offset` counts characters from the start of the choice's text. A token that is no text by itself, being part
    of a character, is named by its bytes, as `bytes:\\xe2\\x82`.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def part(self, entries: Sequence[Entry | None], prompt: str = "") -> dict[str, Any]:
        """The next tokens. `prompt`: they are the whole prompt's, of which the first has no probability (None)."""
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for entry in entries:
            offsets.append(self._characters)
            if entry is None:
                # What the first token says is not told; it is what the others leave of the prompt.
                rest = b"".join(bytes(item["bytes"]) for item in entries if item is not None)
                piece = prompt.encode().removesuffix(rest) if rest else prompt.encode()
                tokens.append(_name(piece))
                logprobs.append(None)
                tops.append(None)
            else:
                piece = bytes(entry["bytes"])
                tokens.append(_name(piece))
                logprobs.append(_number(entry["logprob"]))
                top: dict[str, float] = {}
                for item in (*entry["top_logprobs"], entry):
                    top.setdefault(_name(bytes(item["bytes"])), _number(item["logprob"]))
                tops.append(top)
            self._characters += len(self._decoder.decode(piece))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several parts as one."""
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


def _name(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
