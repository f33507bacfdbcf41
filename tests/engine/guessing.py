"""Guessers that know the truth and may tell something else, and a gain that takes whatever they say."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pagemill.engine.request import Request
from pagemill.engine.speculation import Speculation
from pagemill.engine.speculation_gain import DraftGain
from tests.engine.invented import EOS, VOCABULARY, invent


class Adversary:
    """Guesses the truth up to a random place, and nonsense from there on. `right`: the share of truth, if fixed."""

    def __init__(self, request: Request, window: int, rng: random.Random) -> None:
        self._request, self._window, self._rng = request, window, rng
        self.right: float | None = None

    def read(self, token_ids: Sequence[int]) -> None:
        pass

    def propose(self, count: int) -> list[int]:
        request, rng = self._request, self._rng
        tokens = request.tokens(0, request.num_tokens)
        right = rng.randrange(count + 1) if self.right is None else round(count * self.right)
        guess: list[int] = []
        for place in range(count):
            token = invent(tokens[-self._window :], request.seed, len(request.output_token_ids) + place, request.index)
            guess.append(token if place < right else rng.randrange(VOCABULARY))
            tokens.append(guess[-1])
        return guess


class Reckless(DraftGain):
    """Drafts whatever it likes, paying or not."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def may_pay(self, decodes: int, most: int) -> bool:
        return True

    def choose(self, decodes: int, guesses: Sequence[tuple[int, float]], limit: int) -> list[int]:
        counts = []
        for length, _ in guesses:
            counts.append(self._rng.randint(0, min(length, limit)))
            limit -= counts[-1]
        return counts


def reckless(seed: int, window: int = 0, drafts: int = 5) -> Speculation:
    rng = random.Random(seed)
    return Speculation(drafts, lambda request: Adversary(request, window, rng), Reckless(rng), [EOS])
