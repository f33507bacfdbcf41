"""What each token id contributes to the text, as bytes.

Decoding a growing list of ids again and again costs more with every token, and a window over it goes wrong where
characters are split. The decoders of generative models are context-free but for what they do to the first piece and,
with a word-end suffix, after the last. So the pipeline in `tokenizer.json` is read once, each token is decoded on its
own, and the byte strings joined are the text's UTF-8.

The pieces come from the decoder itself, which is asked about one token behind a neutral one; only bytes, which it would
turn into U+FFFD, are worked out here. `clean_up_tokenization_spaces` of tokenizer_config.json, which rewrites text that
is there already, is left out, as transformers leaves it out for BPE: it takes spaces away that the model wrote.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pagemill.engine.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PROBE = "x"  # no decoder changes it, nor what stands behind it


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(0x100) if byte not in set(printable)]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


class TokenTexts(dict[int, str]):
    """Token id -> text, worked out on first use, of tokens whose text is the same wherever they stand behind whole
    characters; "" for all others. Most tokens of most texts are such, and the look-up is all that they cost."""

    def __init__(self, pieces: TokenBytes) -> None:
        self._pieces = pieces

    def __missing__(self, token_id: int) -> str:
        pieces, text = self._pieces, ""
        if not pieces.has_gaps and not pieces.is_special(token_id):
            try:
                text = pieces[token_id].decode()
            except UnicodeDecodeError:
                text = ""  # it begins or ends in mid-character
        self[token_id] = text
        return text


class TokenBytes:
    """Token id -> bytes, worked out on first use and kept. Safe to share between threads. `texts`: of whole characters.

    `backend` is a `tokenizers.Tokenizer`. Its decoder may be byte-level, SentencePiece's (with or without byte
    fallback), WordPiece, BPE with a word-end suffix, or none. Raises `ConfigError` where it is something else, or its
    steps stand in an order in which a token's text depends on its neighbours.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._decoder = backend.decoder
        self._kept: dict[int, bytes] = {}
        self._special = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._alphabet: dict[str, int] | None = None
        self._byte_fallback = False
        self.has_gaps = False
        self.texts = TokenTexts(self)
        if self._decoder is None:
            return
        decoder = json.loads(self._decoder.__getstate__())  # the whole tokenizer as text would take 50 ms
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = {step["type"] for step in steps}
        fused = False
        for step in steps:
            self._read_step(step, fused=fused, alone=kinds <= {step["type"], "Fuse"})
            fused = fused or step["type"] == "Fuse"

    def _read_step(self, step: dict[str, Any], *, fused: bool, alone: bool) -> None:
        match step:
            case {"type": "ByteLevel"} if alone:
                self._alphabet = _byte_alphabet()
            case {"type": "ByteFallback"} if not fused:
                self._byte_fallback = True
            case {"type": "BPEDecoder"} if alone:
                self.has_gaps = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace" | "Metaspace" | "WordPiece"} if not fused:
                pass
            case {"type": "Strip", "start": 0 | 1, "stop": 0}:
                pass
            case _:
                raise ConfigError(
                    f"the tokenizer's decoder step {step.get('type')!r} is not supported; set skip_tokenizer_init and "
                    "send prompt_token_ids to use this model without its tokenizer"
                )

    def is_special(self, token_id: int) -> bool:
        """True for tokens that `skip_special_tokens` leaves out."""
        return token_id in self._special

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of `token_id` behind other text; none for an id that the tokenizer does not know."""
        kept = self._kept.get(token_id)
        if kept is None:
            kept = self._kept[token_id] = self._make(token_id)
        return kept

    def first(self, token_id: int) -> bytes:
        """The bytes of `token_id` where a text begins: without the space that SentencePiece writes before a text."""
        token = self._token(token_id)
        if token is None or self._alphabet is not None:
            return self[token_id]
        if self._decoder is None:
            return token.encode()
        first = str(self._decoder.decode([token]))
        return self[token_id] if first and self._is_byte(token) else first.encode()

    def gap(self, token_id: int) -> bytes:
        """What a word-end suffix puts between `token_id` and whatever follows it."""
        token = self._token(token_id)
        if token is None or not self.has_gaps:
            return b""
        text = str(self._decoder.decode([token, _PROBE])).encode()
        return text[len(self[token_id]) : -len(_PROBE)]

    def _token(self, token_id: int) -> str | None:
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def _is_byte(self, token: str) -> bool:
        return self._byte_fallback and _BYTE_TOKEN.fullmatch(token) is not None

    def _make(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None:
            return b""
        if self._alphabet is not None:
            mapped = [self._alphabet.get(character) for character in token]
            known = [byte for byte in mapped if byte is not None]
            return bytes(known) if len(known) == len(mapped) else token.encode()
        if self._is_byte(token):
            return bytes([int(token[3:5], 16)])
        if self._decoder is None:
            return b" " + token.encode()
        return str(self._decoder.decode([_PROBE, token])).removeprefix(_PROBE).encode()
