"""Text to token ids with a `tokenizers.Tokenizer`: the beginning of a text, or a piece from its middle."""

from __future__ import annotations

from typing import Any

from pagemill.engine.errors import invalid


def encode(backend: Any, text: str, param: str, *, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a text. Raises `invalid_request` about `param` where it holds a lone surrogate."""
    try:
        ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
    except (TypeError, UnicodeEncodeError) as error:
        raise invalid(f"{param} is not valid Unicode text", param) from error
    return ids


def encode_inner(backend: Any, piece: str, param: str) -> list[int]:
    """Token ids of a piece from the middle of a text, without the space that SentencePiece puts in front of a text."""
    lead = encode(backend, "\n", param)
    ids = encode(backend, "\n" + piece, param)
    return ids[len(lead) :] if ids[: len(lead)] == lead else encode(backend, piece, param)
