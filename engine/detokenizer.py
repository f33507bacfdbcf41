"""Token ids to text, one at a time, for text that is sent while it grows.

Bytes of tokens go through an incremental UTF-8 decoder, so half a character stays inside until its other half comes,
and the pieces joined are the text of all ids. Bytes that can become no character give U+FFFD as soon as that is
certain, and at most one more at the end, where generation stopped in mid-character: what `tokenizer.decode` gives too.

One difference is meant: SentencePiece's byte fallback turns a whole run of byte tokens into U+FFFD when its last
character is unfinished. Here the characters before it, whole and already sent, stay.

The prompt is never part of the text. A character belongs to whoever wrote its first byte, so the bytes that finish a
character begun in the prompt are left out; a leading space is dropped only where nothing stands before the output.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from pagemill.engine.tokenizer import Tokenizer

_UTF8_MAX_PENDING = 3
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one sequence. `kept`: special tokens that stay in it. Cost per token: O(length of its text).

    `texts`: of each token that is the same whole characters wherever these begin, empty for the others. `is_between`:
    whether the next token's characters begin with it: after such a token they still do.
    """

    __slots__ = (
        "_at_start",
        "_gap",
        "_in_prompt_character",
        "_kept",
        "_pieces",
        "_skip_special",
        "_utf8",
        "is_between",
        "texts",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        kept: Collection[int] = (),
    ) -> None:
        self._pieces = tokenizer.token_bytes
        self.texts = self._pieces.texts
        self._skip_special = skip_special_tokens
        self._kept = kept
        self._utf8 = _Utf8Decoder("replace")
        self._at_start = True
        self._in_prompt_character = False
        self._gap = b""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            piece = self._bytes(token_id)
            if piece and not tail and self._pieces.has_gaps:
                self._gap = self._pieces.gap(token_id)
            tail = piece + tail
            if len(tail) > _UTF8_MAX_PENDING:
                break
        if tail:
            self._at_start = False
            self._utf8.decode(tail)
            self._in_prompt_character = bool(self._utf8.getstate()[0])
        self.is_between = self._is_between()

    def append(self, token_id: int) -> str:
        """Add a token; return the characters that it makes whole."""
        if self.is_between:
            text = self.texts[token_id]
            if text:
                return text  # and the decoder is where it was
        text = self._append(token_id)
        self.is_between = self._is_between()
        return text

    def _is_between(self) -> bool:
        """Whether the next token stands behind whole characters, of the prompt or of the text."""
        return not self._at_start and not self._utf8.getstate()[0]

    def _append(self, token_id: int) -> str:
        piece = self._bytes(token_id)
        if self._at_start and piece:
            self._at_start = False
            piece = self._pieces.first(token_id)
        if self._pieces.has_gaps and (piece or self._pieces.gap(token_id)):
            piece, self._gap = self._gap + piece, self._pieces.gap(token_id)
        text = self._utf8.decode(piece)
        if self._in_prompt_character and text:
            self._in_prompt_character = False
            return text[1:]
        return text

    def flush(self) -> str:
        """End the text: U+FFFD if it stops in mid-character, else nothing."""
        text = self._utf8.decode(b"", final=True)
        if self._in_prompt_character:
            self._in_prompt_character = False
            return text[1:]
        return text

    def _bytes(self, token_id: int) -> bytes:
        if self._skip_special and self._pieces.is_special(token_id) and token_id not in self._kept:
            return b""
        return self._pieces[token_id]
