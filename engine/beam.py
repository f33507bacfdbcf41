"""Beam search over one request's running sequences: which beams go on, which are finished, when it is over.

The rules are those of transformers' `generate(num_beams=...)`, so that the same model gives the same beams. Each step
every running beam offers its likeliest next tokens; of all offers the best `width * (1 + number of end tokens)` count.
Of these, the ones that end (by an end token, or all of them at max_tokens) may become finished beams if they are among
the best `width`; the best that do not end run on. A finished beam's score is its log-probability divided by
length ** length_penalty. Pure bookkeeping: no blocks and no tensors here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    """A complete hypothesis. `score` is what beams are compared by, `logprob` the sum of its tokens'."""

    token_ids: list[int]
    logprob: float
    score: float
    ended: bool  # by an end token, not by max_tokens


@dataclass(frozen=True, slots=True)
class BeamStep:
    """A beam that runs on: which of the beams before it continues, with which token, and its log-probability now."""

    parent: int
    token_id: int
    logprob: float


class BeamSearch:
    """One search. Feed it each step's offers with `advance` until that returns no beam; then read `best`."""

    def __init__(
        self,
        width: int,
        end_token_ids: Sequence[int],
        max_tokens: int,
        length_penalty: float,
        early_stopping: bool | Literal["never"],
    ) -> None:
        self._width = width
        self._ends = frozenset(end_token_ids)
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._finished: list[FinishedBeam] = []
        self._logprobs = [0.0]
        self._length = 0

    @property
    def num_offers(self) -> int:
        """How many likeliest tokens each beam has to offer."""
        return max(2, 1 + len(self._ends)) * self._width

    def advance(
        self,
        beams: Sequence[Sequence[int]],
        offers: Sequence[tuple[Sequence[int], Sequence[float]]],
    ) -> list[BeamStep]:
        """Choose the next beams from the running `beams`' tokens and their offers (token ids, log-probabilities).

        Returns the beams that run on, best first; none when the search is over.
        """
        candidates = [
            BeamStep(parent, token_id, before + logprob)
            for parent, (before, (token_ids, logprobs)) in enumerate(zip(self._logprobs, offers, strict=True))
            for token_id, logprob in zip(token_ids, logprobs, strict=True)
        ]
        candidates.sort(key=lambda candidate: -candidate.logprob)
        del candidates[self.num_offers :]
        self._length += 1
        full = self._length >= self._max_tokens
        # With early stopping a full set takes no more; but all that end in one step compete for it together.
        closed = self._early_stopping is True and len(self._finished) == self._width
        for candidate in candidates[: self._width]:
            if not closed and (full or candidate.token_id in self._ends):
                self._finish(beams[candidate.parent], candidate)
        running = [c for c in candidates if not full and c.token_id not in self._ends][: self._width]
        self._logprobs = [beam.logprob for beam in running]
        if self._is_over():
            return []
        return running

    def give_up(self, beams: Sequence[Sequence[int]]) -> None:
        """End the search where it stands: the running beams are as good as finished."""
        for beam, logprob in zip(beams, self._logprobs, strict=True):
            self._keep(FinishedBeam(list(beam), logprob, self._score(logprob, max(1, len(beam))), False))
        self._logprobs = []

    def best(self, count: int) -> list[FinishedBeam]:
        """The best finished beams, best first."""
        return self._finished[:count]

    def _finish(self, tokens: Sequence[int], last: BeamStep) -> None:
        score = self._score(last.logprob, self._length)
        ended = last.token_id in self._ends
        self._keep(FinishedBeam([*tokens, last.token_id], last.logprob, score, ended))

    def _keep(self, beam: FinishedBeam) -> None:
        self._finished.append(beam)
        self._finished.sort(key=lambda finished: -finished.score)
        del self._finished[self._width :]

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._length_penalty)

    def _is_over(self) -> bool:
        if not self._logprobs:
            return True
        if len(self._finished) < self._width:
            return False
        if self._early_stopping is True:
            return True
        longest = self._early_stopping == "never" and self._length_penalty > 0.0
        possible = self._score(self._logprobs[0], self._max_tokens if longest else self._length)
        return possible <= self._finished[-1].score
