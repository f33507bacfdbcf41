"""What each token id contributes to the text, as bytes.

Decoding a growing list of ids again and again costs more with every token, and a window over it goes wrong where
characters are split. The decoders of generative models are context-free but for one rule about the first piece, so the
pipeline in `tokenizer.json` is read once and every token becomes a byte string; joined, they are the text's UTF-8.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from pagemill.engine.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(0x100) if byte not in set(printable)]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


class TokenBytes:
    """Token id -> bytes, worked out on first use and kept. Safe to share between threads.

    `backend` is a `tokenizers.Tokenizer`. Raises `ConfigError` where its decoder is none of byte-level, SentencePiece
    (with or without byte fallback) and plain.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._kept: dict[int, bytes] = {}
        self._special = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._alphabet: dict[str, int] | None = None
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self._lead = b""
        self._max_leads = 0
        decoder = json.loads(backend.to_str())["decoder"]
        if decoder is None:
            self._separator = " "
            self._lead, self._max_leads = b" ", 1
            return
        self._separator = ""
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        for step in steps:
            self._read_step(step)

    def _read_step(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._alphabet = _byte_alphabet()
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(mark), **rest}:
                self._replacements.append((mark, " "))
                if rest.get("prepend_scheme", "always") != "never":
                    self._lead, self._max_leads = b" ", sys.maxsize
            case {"type": "Strip", "content": str(content), "start": int(count), "stop": 0}:
                self._lead, self._max_leads = content.encode(), count
            case _:
                raise ConfigError(
                    f"the tokenizer's decoder step {step.get('type')!r} is not supported; set skip_tokenizer_init and "
                    "send prompt_token_ids to use this model without its tokenizer"
                )

    def is_special(self, token_id: int) -> bool:
        """True for tokens that `skip_special_tokens` leaves out."""
        return token_id in self._special

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of `token_id`; none for an id that the tokenizer does not know."""
        kept = self._kept.get(token_id)
        if kept is None:
            kept = self._kept[token_id] = self._make(token_id)
        return kept

    def without_lead(self, piece: bytes) -> bytes:
        """`piece` as the first one of a text: SentencePiece writes a space before the text that is not part of it."""
        for _ in range(min(self._max_leads, len(piece))):
            if not self._lead or not piece.startswith(self._lead):
                break
            piece = piece[len(self._lead) :]
        return piece

    def _make(self, token_id: int) -> bytes:
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._alphabet is not None:
            mapped = [self._alphabet.get(character) for character in token]
            known = [byte for byte in mapped if byte is not None]
            return bytes(known) if len(known) == len(mapped) else token.encode()
        if self._byte_fallback and (byte_token := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte_token[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return (self._separator + token).encode()
