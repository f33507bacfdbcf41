"""Where a sequence ends: stop strings, stop token ids, end-of-sequence, length.

Stop strings are found in the text, character by character, not in tokens or deltas, so the outcome does not depend on
how the text was cut. The match that *completes* first wins, whatever the order of the list; of matches that complete
at the same character, the longest. Nothing ends a sequence before it has more than `min_tokens` tokens: a match
completed by then does not count, one that only began by then does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pagemill.engine.outputs import FinishReason
from pagemill.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended. `stop_reason`: the stop string or stop token id that ended it; None otherwise."""

    reason: FinishReason
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string found in fed text, which ends `end` characters into the last text fed."""

    stop: str
    end: int


class StopStrings:
    """All stop strings at once (Aho and Corasick, 1975): a constant amount of work per character.

    A state is the longest suffix of the text so far that begins some stop string.
    """

    __slots__ = ("_edges", "_fail", "_held", "_match", "_state")

    def __init__(self, stops: Sequence[str]) -> None:
        self._edges: list[dict[str, int]] = [{}]
        self._match: list[str | None] = [None]
        depth = [0]
        for stop in stops:
            state = 0
            for character in stop:
                following = self._edges[state].get(character)
                if following is None:
                    following = len(self._edges)
                    self._edges[state][character] = following
                    self._edges.append({})
                    self._match.append(None)
                    depth.append(depth[state] + 1)
                state = following
            self._match[state] = stop
        self._fail = [0] * len(self._edges)
        self._held = [0] * len(self._edges)
        self._state = 0
        queue = deque([0])
        while queue:
            state = queue.popleft()
            # A state without edges is a whole stop string that begins no other: only its suffixes may still grow.
            self._held[state] = depth[state] if self._edges[state] else self._held[self._fail[state]]
            for character, child in self._edges[state].items():
                if state:
                    self._fail[child] = self._step(self._fail[state], character)
                if self._match[child] is None:
                    self._match[child] = self._match[self._fail[child]]
                queue.append(child)

    @property
    def held(self) -> int:
        """How many characters at the end of the text may still be the beginning of a stop string."""
        return self._held[self._state]

    def feed(self, text: str, *, counts: bool = True) -> StopMatch | None:
        """Go on through `text`; return the first match completed in it. Without `counts`, matches are passed over."""
        for index, character in enumerate(text):
            self._state = self._step(self._state, character)
            stop = self._match[self._state]
            if stop is not None and counts:
                return StopMatch(stop, index + 1)
        return None

    def _step(self, state: int, character: str) -> int:
        following = self._edges[state].get(character)
        while following is None:
            if not state:
                return 0
            state = self._fail[state]
            following = self._edges[state].get(character)
        return following


class StopChecker:
    """Decides after each token by its id and by the count of tokens, which the caller keeps. Strings are `StopStrings`'
    business. `ends`: all ids that may end the sequence; `max_tokens`: the count that does."""

    __slots__ = ("_eos", "_min_tokens", "_stop_ids", "ends", "max_tokens")

    def __init__(self, params: SamplingParams, max_tokens: int, eos_token_ids: Sequence[int]) -> None:
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self.ends = self._eos | self._stop_ids
        self._min_tokens = params.min_tokens
        self.max_tokens = max_tokens

    def may_stop(self, num_tokens: int) -> bool:
        """Whether stops count by now: there are more than min_tokens tokens."""
        return num_tokens > self._min_tokens

    def end(self, token_id: int, num_tokens: int) -> Finish | None:
        """The end that a token brings by its id, the last of so many: `stop`, with no reason for end-of-sequence."""
        if self.may_stop(num_tokens):
            if token_id in self._eos:
                return Finish("stop")
            if token_id in self._stop_ids:
                return Finish("stop", token_id)
        return None
