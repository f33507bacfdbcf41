"""What the future will ask of the pool, and when a request that comes now could start.

`GrowthForecast` answers the question of optimistic admission: how many blocks must stay free so that those who run can
grow. Every running request is looked at on a grid of horizons: with the chance that it still runs then (its life
table, given what it has generated) it holds what it holds now and a token a step more, else it has given all back. Sums
over the requests give mean and variance of the pool's occupancy at every horizon, and the forecast is the peak of
mean + `SAFETY` standard deviations, no more than if nobody ended.

Rejected: a fixed share (no share suits short prompts with long outputs and the opposite); one drawn or median length
for each request and the peak of that schedule (Past-Future, arXiv 2507.10150), which needs the running requests sorted
anew at each admission and says nothing about how far off it may be.

`Outlook` answers the question of deadlines, with the same numbers run forward as a flow: blocks, seats and step tokens
that become free are taken by those who wait, in order.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pagemill.engine.lengths import LOG_TAIL, TABLE, OutputLengths
from pagemill.engine.preemption import is_protected
from pagemill.engine.request import Request

SAFETY = 2.0  # standard deviations of occupancy that admission leaves free
REFRESH_STEPS = 8
EMPTIER = 1 / 32  # share of the pool: if this much was given back unforeseen, the forecast is made anew at once
HORIZONS = np.array(
    [0, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192],
    dtype=np.int64,
)  # steps, which is tokens of a running request

Floats = NDArray[np.float64]


def _certain_output(request: Request) -> int:
    """Tokens that the request generates whatever the model says."""
    params = request.params
    endless = params.ignore_eos and not params.stop and not params.stop_token_ids
    return request.max_tokens if endless else params.min_tokens


@dataclass(slots=True)
class _Profile:
    """Requests as columns [n, 1]: tokens generated, tokens held that nobody shares, limits, row of the life table."""

    generated: NDArray[np.int64]
    held: NDArray[np.int64]
    most: NDArray[np.int64]
    least: NDArray[np.int64]
    row: NDArray[np.int64]

    @classmethod
    def of(cls, requests: Collection[Request], lengths: OutputLengths) -> _Profile:
        row_of = lengths.row_of
        values = [
            (
                len(request.output_token_ids),
                request.num_tokens - request.num_cached_tokens,
                request.max_tokens,
                _certain_output(request),
                row_of(request.tenant),
            )
            for request in requests
        ]
        table = np.fromiter(chain.from_iterable(values), np.int64, 5 * len(values)).reshape(-1, 5, 1)
        return cls(*(table[:, column] for column in range(5)))

    def alive(self, lengths: OutputLengths) -> Floats:
        """The chance [n, horizons] that each still runs at each horizon."""
        reached = self.generated + HORIZONS
        table = lengths.log_survival
        now = table[self.row, np.minimum(self.generated, TABLE)] + np.maximum(self.generated - TABLE, 0) * LOG_TAIL
        then = table[self.row, np.minimum(reached, TABLE)] + np.maximum(reached - TABLE, 0) * LOG_TAIL
        alive: Floats = np.exp(then - now)
        alive[reached < self.least] = 1.0
        alive[reached >= self.most] = 0.0
        return alive


@dataclass(slots=True)
class _Change:
    """Change of tokens held, against now, at each horizon: mean, variance, and at worst."""

    mean: Floats
    variance: Floats
    worst: Floats

    @classmethod
    def of(cls, profile: _Profile, alive: Floats) -> _Change:
        size = profile.held + HORIZONS
        there = alive * size
        return cls(
            (there - profile.held).sum(0),
            (there * size * (1.0 - alive)).sum(0),
            np.minimum(HORIZONS, profile.most - profile.generated).sum(0).astype(np.float64),
        )

    def __add__(self, other: _Change) -> _Change:
        return _Change(self.mean + other.mean, self.variance + other.variance, self.worst + other.worst)

    def peak(self) -> float:
        return float(np.minimum(self.mean + SAFETY * np.sqrt(self.variance), self.worst).max())


class GrowthForecast:
    """The peak of the pool's occupancy if nobody but one candidate were admitted. Sizes in blocks.

    `committed_blocks`: blocks of the pool that are used or promised. Once in `REFRESH_STEPS` steps the running requests
    are looked at one by one; between, admissions are added.
    """

    def __init__(self, lengths: OutputLengths, *, num_blocks: int, block_size: int) -> None:
        """`num_blocks`: the usable ones."""
        self.lengths = lengths
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._refresh_at = 0
        self._committed = 0
        self._nothing = _Change(*np.zeros((3, len(HORIZONS))))
        self._change = self._nothing
        self._candidate: tuple[Request, _Change] | None = None

    def refresh(self, step: int, running: Collection[Request], committed_blocks: int) -> None:
        """Look at the running requests, if it is time. Call before a step's first `watermark`."""
        if step < self._refresh_at and committed_blocks >= self._committed - self._num_blocks * EMPTIER:
            return
        self._refresh_at = step + REFRESH_STEPS
        self._committed = committed_blocks
        self._candidate = None
        # The growth of a protected request is promised to it already.
        profile = _Profile.of([request for request in running if not is_protected(request)], self.lengths)
        free = profile.least < profile.most
        self.lengths.update(profile.row[free], profile.generated[free])
        self._change = _Change.of(profile, profile.alive(self.lengths))

    def watermark(self, request: Request, committed_blocks: int) -> int:
        """Blocks that must stay free, beside those promised to the request, if it is admitted. The request counts what
        it will grow by itself; `committed_blocks` are those before its admission."""
        peak = (self._change + self._change_by(request)).peak() / self._block_size
        return max(0, math.ceil(self._committed + peak) - committed_blocks)

    def admit(self, request: Request, promised_blocks: int) -> None:
        """The request has been admitted, with so many blocks."""
        self._change = self._change + self._change_by(request)
        self._committed += promised_blocks

    def _change_by(self, request: Request) -> _Change:
        if self._candidate is None or self._candidate[0] is not request:
            profile = _Profile.of([request], self.lengths)
            self._candidate = (request, _Change.of(profile, profile.alive(self.lengths)))
        return self._candidate[1]
