"""How many threads of a team to use while something else wants the same cores.

A call ends when its last part ends. Where a neighbour keeps a core busy, the thread that shares this core is off it for
milliseconds at a time, with a part in its hands, and all others wait: two threads are then slower than one. Nothing
says so beforehand, and a neighbour that takes little is no reason to give up a core. So it is tried:

* While threads are not held up, nothing happens.
* Where a good part of the time is lost to waiting (`lost_s`), one thread fewer is tried for a moment. It stays so if
  that was quicker, and is not tried again soon if it was not.
* With fewer threads than there are, one more is tried now and then: at most `TRIAL_S` of every `LONGEST_PAUSE_S`, once
  that has failed a few times in a row.

Steps of different sizes are compared by their tokens. A step of few tokens takes as long as one of `LIGHT_TOKENS`: it
waits for the weights.

Only the time changes: no result depends on the number of threads.
"""

from __future__ import annotations

TRIAL_S = 0.25  # of computing; the time slices of the system's scheduler are a few milliseconds
TRIAL_STEPS = 4
LOST_SHARE = 0.10  # of the time, from which on fewer threads are worth a trial
GAIN = 1.03  # times as fast, to count as quicker: runs of a quarter of a second differ by less
PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
LIGHT_TOKENS = 16


class Watchdog:
    """Decides from what steps took. Knows no clock: it is told."""

    def __init__(self, threads: int) -> None:
        self.most = threads
        self.threads = threads
        """How many to use in the next step."""
        self.settled = threads
        """The number that is kept, also during a trial of another."""
        self._rate = 0.0  # that of the settled number, which a trial is compared with
        self._fewer_at = 0.0
        self._more_at = 0.0
        self._fewer_pause = PAUSE_S
        self._more_pause = PAUSE_S
        self._disturbed = False
        self._fresh = True
        self._forget()

    def observe(self, now: float, seconds: float, lost_s: float, tokens: int) -> None:
        """A step that ended at `now`. `lost_s`: how long its calling thread was off its core or waited for another."""
        if self._fresh:
            self._fresh = False  # threads were being woken
            return
        self._seconds += seconds
        self._lost += lost_s
        self._work += max(tokens, LIGHT_TOKENS)
        self._steps += 1
        if self._seconds >= TRIAL_S and self._steps >= TRIAL_STEPS:
            self._decide(now, self._work / self._seconds, self._lost / self._seconds)

    def _decide(self, now: float, rate: float, lost: float) -> None:
        gain = rate / self._rate if self._rate else 1.0
        if self.threads < self.settled:
            if gain >= GAIN:
                self._settle(now)
                self._more_pause, self._fewer_pause = PAUSE_S, PAUSE_S
                self._more_at = now + PAUSE_S
            else:
                self._fewer_at = now + self._fewer_pause
                self._fewer_pause = min(2 * self._fewer_pause, LONGEST_PAUSE_S)
        elif self.threads > self.settled:
            # The neighbour may be gone although one thread more of many brings little.
            if gain >= GAIN or (lost < LOST_SHARE and gain * GAIN >= 1.0):
                self._settle(now)
                self._more_at, self._more_pause = now, PAUSE_S
            else:
                self._more_at = now + self._more_pause
                self._more_pause = min(2 * self._more_pause, LONGEST_PAUSE_S)
        else:
            self._rate = rate
            before, self._disturbed = self._disturbed, lost >= LOST_SHARE
            # Twice in a row: in the first window a neighbour came, and its rate is that of neither state.
            if self.threads > 1 and before and self._disturbed and now >= self._fewer_at:
                self.threads -= 1
            elif self.threads < self.most and now >= self._more_at:
                self.threads += 1
            self._forget(fresh=self.threads != self.settled)
            return
        self.threads = self.settled
        self._forget(fresh=True)

    def _settle(self, now: float) -> None:
        self.settled = self.threads
        self._disturbed = False
        self._fewer_at = now

    def _forget(self, fresh: bool = True) -> None:
        self._seconds = self._lost = 0.0
        self._work = self._steps = 0
        self._fresh = fresh
