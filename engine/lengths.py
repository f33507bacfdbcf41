"""How long outputs turn out to be, learnt from the recent past.

A life table (Kaplan and Meier 1958): for every length, the share of the outputs that got so far which ended there. What
was cut off (`max_tokens`, an abort) and what still runs counts as having got so far without ending. A quantile of the
finished ones alone would be too short, as the short ones finish first. To this is added the past of `PRIOR_OUTPUTS`
imagined outputs that end at each token with the same chance, after `PRIOR_MEAN` tokens in the mean: the whole estimate
while nothing is known, hardly any of it after a dozen outputs, and its tail beyond the longest one seen.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

WINDOW = 1024  # outputs remembered, of all tenants together and of each
MIN_OUTPUTS = 32  # outputs from which on a tenant is judged by its own
MAX_TENANTS = 64  # tenants with a window of their own: the last ones that finished something
TABLE = 4096  # lengths told apart
REBUILD_EVERY = 32  # outputs after which a full window's table is made anew
PRIOR_OUTPUTS = 1.0
PRIOR_MEAN = 256.0  # tokens
TAIL = 4096  # lengths past the table for which the prior speaks
SPAN = TABLE + TAIL
BEYOND = (1.0 - 1.0 / PRIOR_MEAN) ** np.arange(1, TAIL + 1)


class OutputLengths:
    """Recent output lengths, of each tenant where there are enough, else of all.

    There is a life table, one row, for each tenant that is judged by its own; row 0 is that of all.
    """

    def __init__(self) -> None:
        # [row, x]: the chance that an output has more than x tokens.
        self._survival = np.ones((MAX_TENANTS + 1, SPAN + 1))
        self._all = _Window(0)
        self._windows: OrderedDict[str, _Window] = OrderedDict()
        self._known: dict[str, int] = {}
        nothing = np.zeros(0, dtype=np.int64)
        self.update(nothing, nothing)

    @property
    def num_observed(self) -> int:
        """Outputs remembered, of all tenants."""
        return self._all.count

    def observe(self, tenant: str, length: int, *, ended: bool) -> None:
        """An output has stopped at `length` tokens: by itself (`ended`), or cut off by `max_tokens`, abort or error.

        Outputs that were forbidden to end (`ignore_eos`) say nothing and do not belong here.
        """
        self._all.append(length, ended)
        window = self._windows.get(tenant)
        if window is None:
            row = len(self._windows) + 1
            if row > MAX_TENANTS:
                name, oldest = self._windows.popitem(last=False)
                self._known.pop(name, None)
                row = oldest.row
            window = self._windows[tenant] = _Window(row)
        self._windows.move_to_end(tenant)
        window.append(length, ended)

    def row_of(self, tenant: str) -> int:
        """The row of the life table that the tenant is judged by."""
        return self._known.get(tenant, 0)

    def update(self, rows: NDArray[np.int64], generated: NDArray[np.int64]) -> None:
        """Bring the tables up to date. The arrays hold `row_of` and the tokens so far of every running output."""
        if self._all.is_due:
            self._all.fill(self._survival[0], generated)
        for tenant, window in reversed(self._windows.items()):
            if window.fresh == 0:
                break
            if window.count >= MIN_OUTPUTS and window.is_due:
                window.fill(self._survival[window.row], generated[rows == window.row])
                self._known[tenant] = window.row

    def survival(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """The chance that an output has more than so many tokens. The shapes are broadcast."""
        return self._survival.ravel().take(rows * (SPAN + 1) + np.minimum(lengths, SPAN))

    def expected_remaining(self, tenant: str, generated: int, max_tokens: int, quantile: float = 0.5) -> int:
        """The `quantile` of what an output that has `generated` tokens and goes on will still get, 1 at least and what
        `max_tokens` leaves at most. As of the last `update`. O(log SPAN)."""
        survival = self._survival[self.row_of(tenant)]
        start = min(generated, SPAN - TAIL)
        target = survival[start] * (1.0 - quantile)
        length = int(np.searchsorted(-survival, -target * (1.0 + 1e-9)))
        return max(1, min(generated + length - start, max_tokens) - generated)


class _Window:
    """The last `WINDOW` outputs."""

    __slots__ = ("_ended", "_lengths", "_next", "count", "fresh", "row")

    def __init__(self, row: int) -> None:
        self.row = row
        self.count = 0
        self.fresh = 0  # outputs since the table was made
        self._next = 0
        self._lengths = np.zeros(WINDOW, dtype=np.int64)
        self._ended = np.zeros(WINDOW, dtype=bool)

    def append(self, length: int, ended: bool) -> None:
        self._lengths[self._next] = min(length, TABLE)
        self._ended[self._next] = ended
        self._next = (self._next + 1) % WINDOW
        self.count = min(self.count + 1, WINDOW)
        self.fresh += 1

    @property
    def is_due(self) -> bool:
        """Whether to make the table anew: always while a few outputs, or the running ones, say much."""
        return self.fresh >= min(REBUILD_EVERY, self.count // 8)

    def fill(self, survival: NDArray[np.float64], running: NDArray[np.int64]) -> None:
        """Write the life table of the window and of the lengths reached by `running` outputs."""
        lengths, ended = self._lengths[: self.count], self._ended[: self.count]
        ends = np.bincount(lengths[ended], minlength=TABLE + 1)
        leaves = np.bincount(lengths[~ended], minlength=TABLE + 1)
        leaves += np.bincount(np.minimum(running, TABLE), minlength=TABLE + 1)
        reached = np.cumsum((ends + leaves)[::-1])[::-1]
        hazard = (ends + PRIOR_OUTPUTS / PRIOR_MEAN) / (reached + PRIOR_OUTPUTS)
        hazard[0] = 0.0  # every output has a token
        hazard[TABLE] = 1.0 / PRIOR_MEAN  # the last entry counts all that are longer
        np.cumprod(1.0 - hazard, out=survival[: TABLE + 1])
        survival[TABLE + 1 :] = survival[TABLE] * BEYOND
        self.fresh = 0
