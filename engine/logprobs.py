"""Log-probabilities of tokens, as the runner measures them and as callers see them.

They are of the model's own distribution, before temperature, penalties, masks and filters, so they say what the model
thought and not what the request's parameters made of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class TokenLogprob:
    """One token's log-probability (natural logarithm) and its rank, 1 being the likeliest.

    `piece`: the bytes that it adds to the text, empty without a tokenizer.
    """

    token_id: int
    logprob: float
    rank: int
    piece: bytes = b""

    @property
    def text(self) -> str:
        """The token as text; half a character shows as U+FFFD, and `piece` has its bytes."""
        return self.piece.decode("utf-8", "replace")

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's shape with the token id beside it. What is no finite number is null, which JSON can say."""
        return {
            "token": self.text,
            "token_id": self.token_id,
            "logprob": self.logprob if math.isfinite(self.logprob) else None,
            "bytes": list(self.piece),
        }


@dataclass(slots=True)
class PositionLogprobs:
    """The token that stands at a position and the likeliest ones there, best first (none asked for: empty)."""

    chosen: TokenLogprob
    top: list[TokenLogprob]

    def tokens(self) -> list[TokenLogprob]:
        return [self.chosen, *self.top]

    def to_dict(self) -> dict[str, Any]:
        """An entry of OpenAI's `logprobs.content`."""
        return {**self.chosen.to_dict(), "top_logprobs": [token.to_dict() for token in self.top]}


@dataclass(slots=True)
class Logprob:
    """vLLM's entry: what a dictionary of one position holds for a token id."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def to_vllm(position: PositionLogprobs) -> dict[int, Logprob]:
    """vLLM's shape: the likeliest tokens by id, with the chosen one always among them."""
    return {token.token_id: Logprob(token.logprob, token.rank, token.text) for token in position.tokens()}
