"""Whether guessed tokens pay: how often guesses are right, against what a step of more tokens costs. All measured.

With B sequences decoding, a step without drafts brings B tokens in T(B) seconds. D drafts bring E more in the mean, the
sum of their chances to be right, and make it T(B + D). The likeliest drafts are taken, as many as make
(B + E) / T(B + D) largest, and none where that is not above B / T(B).

T is a line fitted to the recent steps of nothing but decodes, and for sizes seen lately what these took: kernels work
in tiles, so five tokens may take longer than eight. What was seen is forgotten after a while, so that a size which a
busy moment made look bad is tried again. Of both, a step without drafts is believed the shorter time and one with them
the longer: the best of many sizes is mostly one that noise made look good, and with 80 sequences, where a draft must be
right nearly always to pay, drafts chosen so cost 8 % of the throughput.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagemill.engine.forecast import StepTimes

MARGIN = 1.05  # the rate with drafts must be so much better; what is below may be noise
LEAST_CHANCE = 0.02  # drafts less likely than that are not looked at
START_RATE = 0.3  # of right guesses, before any was seen
OWN_WEIGHT = 0.1  # of a guess in its sequence's rate, once there were a few
COMMON_WEIGHT = 0.01  # in the rate that new sequences start with
START_GUESSES = 3  # that the rate at the start counts for
TIME_WEIGHT = 0.2  # of a step in the time of its size
REMEMBERED_STEPS = 256  # after which a size's time is forgotten
LARGEST = 256  # tokens of a step, above which only the line is asked


class Acceptance:
    """Share of guessed tokens that were right, the last ones counting most. `common`: also told of each."""

    __slots__ = ("_common", "_count", "_weight", "rate")

    def __init__(self, rate: float, weight: float, common: Acceptance | None = None) -> None:
        self.rate = rate
        self._count = START_GUESSES
        self._weight = weight
        self._common = common

    def observe(self, right: bool) -> None:
        self._count += 1
        self.rate += max(self._weight, 1 / self._count) * (right - self.rate)
        if self._common is not None:
            self._common.observe(right)


class DecodeTimes:
    """Seconds of a step that only decodes, by its tokens, drafts included."""

    def __init__(self) -> None:
        self._line = StepTimes()
        self._steps = 0
        self._seen: dict[int, tuple[float, int]] = {}  # tokens -> seconds, and the step that they are of

    def observe(self, tokens: int, seconds: float) -> None:
        self._steps += 1
        self._line.observe(tokens, seconds)
        if tokens <= LARGEST:
            known = self._recent(tokens)
            if known is not None:
                seconds = known + TIME_WEIGHT * (min(seconds, 2 * known) - known)
            self._seen[tokens] = (seconds, self._steps)

    def least(self, tokens: int) -> float | None:
        """Expected time, the shorter of what is known of it. None: nothing is known yet."""
        fitted = self._line.seconds(tokens)
        known = self._recent(tokens)
        return fitted if fitted is None or known is None else min(fitted, known)

    def most(self, tokens: int) -> float | None:
        """The same, the longer."""
        fitted = self._line.seconds(tokens)
        known = self._recent(tokens)
        return fitted if fitted is None or known is None else max(fitted, known)

    def _recent(self, tokens: int) -> float | None:
        seen = self._seen.get(tokens)
        return seen[0] if seen is not None and seen[1] > self._steps - REMEMBERED_STEPS else None


class DraftGain:
    """How many drafts each sequence gets."""

    def __init__(self) -> None:
        self.times = DecodeTimes()
        self.common = Acceptance(START_RATE, COMMON_WEIGHT)

    def newcomer(self) -> Acceptance:
        """The record of a sequence that has not guessed yet."""
        return Acceptance(self.common.rate, OWN_WEIGHT, self.common)

    def may_pay(self, decodes: int, most: int) -> bool:
        """Whether drafts, up to `most`, would pay beside so many decodes if all were right."""
        without = self.times.least(decodes)
        if not without:
            return False
        return any(
            (decodes + drafts) / (self.times.most(decodes + drafts) or without) > MARGIN * decodes / without
            for drafts in {1, (most + 3) // 4, (most + 1) // 2, most}
        )

    def choose(self, decodes: int, guesses: Sequence[tuple[int, float]], limit: int) -> list[int]:
        """Of each guess, (length, chance of each token if those before it are right), how many tokens to draft."""
        counts = [0] * len(guesses)
        without = self.times.least(decodes)
        if not without:
            return counts
        ranked = sorted(
            (
                (rate**place, -place, index)
                for index, (length, rate) in enumerate(guesses)
                for place in range(1, length + 1)
                if rate**place >= LEAST_CHANCE
            ),
            reverse=True,
        )[:limit]
        best, best_rate = 0, MARGIN * decodes / without
        expected = float(decodes)
        for drafts, (chance, _, _) in enumerate(ranked, 1):
            expected += chance
            rate = expected / (self.times.most(decodes + drafts) or without)
            if rate > best_rate:
                best, best_rate = drafts, rate
        for _, _, index in ranked[:best]:
            counts[index] += 1
        return counts
