"""What a sequence's own tokens change in its next logits: penalties, bad words, the place in a grammar.

All of it is a function of the tokens, so a sequence that another engine began, or that was preempted, goes on with the
same state once its tokens have been told. A fork (a choice, a beam, a guessed continuation) copies it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pagemill.engine.errors import RequestError

if TYPE_CHECKING:
    from pagemill.engine.grammar import Grammar, Matcher
    from pagemill.engine.reasoning_gate import GatedGrammar, GatedMatcher


class TokenCounts:
    """The distinct tokens of prompt and output, and how often each was generated. O(1) per token."""

    __slots__ = ("_counts", "_ids", "_place", "_size")

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        distinct = dict.fromkeys(prompt_token_ids)
        self._size = len(distinct)
        self._ids = np.fromiter(distinct, np.int32, self._size)
        self._counts = np.zeros(self._size, np.int32)
        self._place = {token_id: place for place, token_id in enumerate(distinct)}

    def add(self, token_id: int) -> None:
        """One more generated token."""
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = self._size
            if place == len(self._ids):
                room = max(16, place)
                self._ids = np.concatenate((self._ids, np.zeros(room, np.int32)))
                self._counts = np.concatenate((self._counts, np.zeros(room, np.int32)))
            self._ids[place] = token_id
            self._size += 1
        self._counts[place] += 1

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """Times in the output of each of `ids`; 0: in the prompt only."""
        return self._counts[: self._size]

    def copy(self) -> TokenCounts:
        twin = TokenCounts(())
        twin._ids, twin._counts = self._ids.copy(), self._counts.copy()
        twin._place, twin._size = dict(self._place), self._size
        return twin


@dataclass(frozen=True, slots=True)
class BadWords:
    """Token sequences whose last token may not follow the others. `always`: the sequences of one token."""

    always: tuple[int, ...]
    after: dict[int, tuple[tuple[int, ...], ...]]  # by the token before the last: the whole sequences

    @classmethod
    def of(cls, sequences: Iterable[tuple[int, ...]]) -> BadWords:
        distinct = sorted(set(sequences))
        after: dict[int, tuple[tuple[int, ...], ...]] = {}
        for sequence in distinct:
            if len(sequence) > 1:
                after[sequence[-2]] = (*after.get(sequence[-2], ()), sequence)
        return cls(tuple(sequence[0] for sequence in distinct if len(sequence) == 1), after)

    def banned_after(self, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
        """The tokens that would complete a sequence begun at the end of prompt + output."""
        last = output[-1] if output else prompt[-1]
        return [sequence[-1] for sequence in self.after.get(last, ()) if _ends_with(prompt, output, sequence[:-1])]


def _ends_with(prompt: Sequence[int], output: Sequence[int], tail: tuple[int, ...]) -> bool:
    if len(tail) > len(output):
        missing = len(tail) - len(output)
        tokens = [*prompt[-missing:], *output]
    else:
        tokens = list(output[-len(tail) :])
    return tuple(tokens) == tail


class LogitsState:
    """The state of one sequence; only what its request asks for is kept."""

    __slots__ = ("counts", "failure", "matcher")

    def __init__(self, counts: TokenCounts | None, matcher: Matcher | GatedMatcher | None) -> None:
        self.counts = counts
        self.matcher = matcher
        self.failure: RequestError | None = None  # of the grammar: the sequence can go no further

    @classmethod
    def begin(
        cls,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        *,
        counted: bool,
        grammar: Grammar | GatedGrammar | None,
    ) -> LogitsState | None:
        """The state behind these tokens; None where the request asks for nothing that needs one.

        Raises `engine_error` where the output does not follow the grammar.
        """
        if not counted and grammar is None:
            return None
        state = cls(
            TokenCounts(prompt_token_ids) if counted else None, grammar.matcher() if grammar is not None else None
        )
        for token_id in output_token_ids:
            state.append(token_id)
        return state

    def append(self, token_id: int) -> None:
        """A token was generated. Raises `engine_error` where the grammar does not allow it, or why it failed."""
        if self.counts is not None:
            self.counts.add(token_id)
        if self.matcher is not None and not self.matcher.accept(token_id):
            raise self.matcher.failure or RequestError(
                "engine_error", f"token {token_id} does not follow the request's structured output"
            )

    @property
    def is_complete(self) -> bool:
        """Whether the structured output is whole and nothing but an end may follow."""
        return self.matcher is not None and self.matcher.is_finished

    def mask(self, words: int) -> npt.NDArray[np.uint32]:
        """uint32 [words]: the tokens that the grammar allows next. None of them where it fails: that is its request's
        misfortune, and the step is everybody's."""
        assert self.matcher is not None
        allowed = np.zeros(words, np.uint32)
        try:
            self.matcher.fill(allowed)
        except RequestError as error:
            self.failure = error
            allowed[:] = 0
        return allowed

    def fork(self) -> LogitsState:
        return LogitsState(
            None if self.counts is None else self.counts.copy(), None if self.matcher is None else self.matcher.fork()
        )
