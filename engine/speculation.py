"""Speculative decoding: guess the next tokens from the text so far, and let one step check the guesses.

The idea. A step of few tokens takes about as long as a step of one, since it waits for the weights either way. So a
sequence's next tokens are guessed (*drafts*), computed behind its last known token in the same step, and a token is
drawn behind each of them. A draft is right if it is what was drawn before it; what stands behind the first wrong one is
dropped. As noise depends on seed, choice and position alone, what is drawn is what would have been drawn without
drafts, token for token, greedy or sampled: a guess changes when tokens come, never which. (A draft is a certain guess,
for which this is the acceptance rule of speculative sampling, Leviathan et al., arXiv 2211.17192, with the draw decided
by the seed.)

The guess is a look-up, no second model: the longest run of last tokens that stands earlier in prompt or output, and
what followed it there (prompt lookup, github.com/apoorvumang/prompt-lookup-decoding). It is right where the output
quotes: summaries, edits of code, answers from documents.

Whether it pays is decided anew in each step (`speculation_gain`): each sequence's guesses are compared with what really
came, drafted or not, which costs nothing, and the time of decode steps by their size is measured.

Invariants:
  * drafts are spent from what decodes, prefills and admissions have left of the step's budget, and from blocks that are
    free and promised to nobody, above the watermark: no guess ever displaces a token or preempts anybody;
  * between two steps a sequence holds the blocks of its computed tokens and no more: what only wrong drafts needed is
    given back when the step has run, and no block is published that a wrong draft stands in;
  * what a sequence guesses is a function of its tokens alone, so it needs no state to be resumed, moved or preempted.

Rejected: drafts for beams (their next tokens depend on all beams at once); searching the context in every step, as
vLLM's n-gram proposer does (its cost grows with the context, that of an index does not); probing with drafts whether
they pay again (comparing undrafted guesses tells the same at no cost).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pagemill.engine.kv_cache_manager import KVCacheManager
from pagemill.engine.request import Request
from pagemill.engine.scheduler_output import Sampled, ScheduledSequence
from pagemill.engine.speculation_gain import Acceptance, DraftGain

REMEMBERED = 1 << 18  # runs of tokens after which the older half of an index is dropped
READ_A_STEP = 4096  # tokens that a step's indexes take in at most; a long prompt is read over several steps
BATCH_A_REST = 8  # for each so many decodes, a sequence without a guess worth drafting is passed over for a step


class Proposer(Protocol):
    """Guesses how one sequence goes on."""

    def read(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that follow those read so far."""
        ...

    def propose(self, count: int) -> list[int]:
        """Up to `count` tokens that may follow."""
        ...


class NgramProposer:
    """Looks up the longest run of last tokens, of `shortest` to `longest` tokens, that stands earlier in what was read.

    An index from every run to the latest place behind it, kept up in O(1) for a token. It remembers a bounded number of
    runs, the latest ones.
    """

    __slots__ = ("_index", "_lengths", "_older", "_tokens")

    def __init__(self, longest: int, shortest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        self._index: dict[tuple[int, ...], int] = {}
        self._older: dict[tuple[int, ...], int] = {}

    def read(self, token_ids: Sequence[int]) -> None:
        tokens, index, lengths = self._tokens, self._index, self._lengths
        # A run is entered when the token behind it is there, so the last tokens never find themselves.
        for token_id in token_ids:
            end = len(tokens)
            for length in lengths:
                if length <= end:
                    index[tuple(tokens[end - length :])] = end
            tokens.append(token_id)
        if len(index) >= REMEMBERED:
            self._older, self._index = index, {}

    def propose(self, count: int) -> list[int]:
        tokens = self._tokens
        for length in self._lengths:
            run = tuple(tokens[-length:])
            place = self._index.get(run) or self._older.get(run)
            if place is not None:
                found = tokens[place : place + count]
                period = len(tokens) - place
                while len(found) < count:
                    found.append(found[-period])  # it reaches the end of the text: what repeats goes on repeating
                return found
        return []


@dataclass(slots=True)
class _Guesser:
    """One sequence: its proposer, the tokens that this has read, the guess for what follows them, how often such
    guesses come true, and for how many steps it is passed over."""

    proposer: Proposer
    acceptance: Acceptance
    num_read: int = 0
    guess: Sequence[int] = ()
    rest: int = 0


class Speculation:
    """The drafts of all running sequences. `num_drafts`: tokens guessed for a sequence in a step at most.

    `end_token_ids`: the model's; nothing follows an end, so no draft is one. `make_proposer`: the guessing of one
    sequence.
    """

    def __init__(
        self,
        num_drafts: int,
        make_proposer: Callable[[Request], Proposer],
        gain: DraftGain,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        self.num_drafts = num_drafts
        self.gain = gain
        self.num_drafted = 0
        self.num_accepted = 0
        self._make_proposer = make_proposer
        self._ends = frozenset(end_token_ids)
        self._guessers: dict[Request, _Guesser] = {}

    def draft(
        self, decodes: Sequence[ScheduledSequence], cache: KVCacheManager, *, limit: int, blocks_kept: int
    ) -> int:
        """Add drafts to decodes, `limit` tokens in all at most. `blocks_kept`: free blocks to leave. Returns how many
        tokens were added."""
        if limit <= 0 or not self.gain.may_pay(len(decodes), min(limit, self.num_drafts * len(decodes))):
            return 0
        guesses = self._guesses(decodes)
        rates = [(len(tokens), guesser.acceptance.rate) for _, guesser, tokens in guesses]
        counts = self.gain.choose(len(decodes), rates, limit)
        added = 0
        for (item, guesser, tokens), count in zip(guesses, counts, strict=True):
            if count == 0:
                guesser.rest = self._rest(decodes)
                continue
            covered = cache.extend(item.request, item.start + 1 + count, blocks_kept)
            item.drafts = list(tokens[: covered - item.start - 1])
            item.num_tokens = 1 + len(item.drafts)
            added += len(item.drafts)
        return added

    def settle(self, scheduled: Sequence[ScheduledSequence], sampled: Sequence[Sampled]) -> list[ScheduledSequence]:
        """A step has run: leave each sequence the drafts that were right. Returns those that had any."""
        drafted = [
            (item, result)
            for item, result in zip((item for item in scheduled if item.samples), sampled, strict=True)
            if item.drafts
        ]
        for item, result in drafted:
            right = len(result.tokens) - 1
            self.num_drafted += len(item.drafts)
            self.num_accepted += right
            item.request.num_draft_tokens += len(item.drafts)
            item.request.num_accepted_tokens += right
            item.drafts = item.drafts[:right]
            item.num_tokens = 1 + right
        return [item for item, _ in drafted]

    def observe(self, scheduled: Sequence[ScheduledSequence], num_tokens: int, seconds: float) -> None:
        """How long a step took; it says something if it only decoded."""
        if num_tokens == len(scheduled) + sum(len(item.drafts) for item in scheduled):
            self.gain.times.observe(num_tokens, seconds)

    def forget(self, request: Request) -> None:
        """The sequence runs no more."""
        self._guessers.pop(request, None)

    def _guesses(self, decodes: Sequence[ScheduledSequence]) -> list[tuple[ScheduledSequence, _Guesser, Sequence[int]]]:
        """What each sequence that may have drafts guesses, as far as the request goes."""
        found: list[tuple[ScheduledSequence, _Guesser, Sequence[int]]] = []
        to_read = READ_A_STEP
        for item in decodes:
            request = item.request
            room = request.max_tokens - len(request.output_token_ids) - 1  # the step brings one token in any case
            if request.top or request.seats > 1 or room <= 0:
                continue
            guesser = self._guessers.get(request)
            if guesser is None:
                guesser = _Guesser(self._make_proposer(request), self.gain.newcomer())
                self._guessers[request] = guesser
            if guesser.rest:
                guesser.rest -= 1
                continue
            to_read -= self._read(guesser, request, to_read)
            if guesser.num_read == request.num_tokens:
                guesser.guess = self._until_end(request, guesser.proposer.propose(self.num_drafts))
                if guesser.guess:
                    found.append((item, guesser, guesser.guess[:room]))
                else:
                    guesser.rest = self._rest(decodes)
        return found

    def _rest(self, decodes: Sequence[ScheduledSequence]) -> int:
        """Looking costs a sequence microseconds: nothing beside the step of a few, but something beside that of many. A
        guess made before the rest is still compared with what came meanwhile."""
        return min(self.num_drafts, len(decodes) // BATCH_A_REST)

    def _read(self, guesser: _Guesser, request: Request, limit: int) -> int:
        """Let the proposer see what has come since, and see how good its guess was."""
        new = request.tokens(guesser.num_read, min(request.num_tokens, guesser.num_read + limit))
        for guessed, token_id in zip(guesser.guess, new, strict=False):
            guesser.acceptance.observe(guessed == token_id)
            if guessed != token_id:
                break
        guesser.proposer.read(new)
        guesser.num_read += len(new)
        guesser.guess = ()
        return len(new)

    def _until_end(self, request: Request, guess: list[int]) -> list[int]:
        params = request.params
        for place, token_id in enumerate(guess):
            if token_id in (params.stop_token_ids or ()) or (token_id in self._ends and not params.ignore_eos):
                return guess[:place]
        return guess
