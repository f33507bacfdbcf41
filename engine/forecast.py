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
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import mul

import numpy as np
from numpy.typing import NDArray

from pagemill.engine.lengths import TABLE, OutputLengths
from pagemill.engine.policy import Backlog
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams

SAFETY = 2.0  # standard deviations of occupancy that admission leaves free
REFRESH_STEPS = 8
SEQUENCES_A_STEP = 64  # with many running the forecast is made anew more seldom: a step bears no more than so many
EMPTIER = 1 / 32  # share of the pool: if this much was given back unforeseen, the forecast is made anew at once
HORIZONS = np.array(
    [0, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192],
    dtype=np.int64,
)  # steps, which is tokens of a running request

SHARE_SMOOTHING = 0.05  # weight of an admission in the share of tokens that were not found in the prefix cache
SAMPLE = 32  # waiting requests that stand for all
INTERVALS = 32  # of the outlook
INTERVALS_A_LIFE = 6  # of them, in the mean time from admission to end
FORGET = 127 / 128
MIN_STEPS = 16

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def _is_endless(params: SamplingParams) -> bool:
    return params.ignore_eos and not params.stop and not params.stop_token_ids


@dataclass(slots=True)
class _Profile:
    """Sequences as columns [n].

    `generated`: tokens so far. `held`: tokens in blocks that are its own, once all are computed; `grows`: tokens that
    come to them each step. `least`, `most`: tokens that it may generate. `missing`: tokens to compute. `seats`: places
    in the batch. `row`: its life table. `tells`: whether its length says something about others'.
    """

    generated: Integers
    held: Integers
    grows: Integers
    least: Integers
    most: Integers
    missing: Integers
    seats: Integers
    row: Integers
    tells: Integers

    @classmethod
    def of(cls, sequences: Collection[Request], lengths: OutputLengths, window: int) -> _Profile:
        values: list[int] = []
        row_of = lengths.row_of
        for sequence in sequences:
            params, most, seats = sequence.params, sequence.max_tokens, sequence.seats
            generated, prompt = len(sequence.output_token_ids), len(sequence.prompt_token_ids)
            missing = prompt + generated - sequence.num_computed_tokens
            prompt -= sequence.num_cached_tokens
            if params.n > 1 or params.beam_width > 1:
                # Choices and beams share their prompt: each is taken to own its part of it.
                prompt //= params.num_sequences - seats + 1
            held, grows = prompt + generated, seats
            if sequence.is_reserved:
                held, grows = prompt + seats * most, 0  # what it grows by is promised to it already
            elif window and held >= window:
                held, grows = window, 0
            endless = _is_endless(params)
            least = most if endless else params.min_tokens
            tells = not endless and not sequence.top
            values += (generated, held, grows, least, most, missing, seats, row_of(sequence.tenant), tells)
        return cls(*np.fromiter(values, np.int64, len(values)).reshape(-1, 9).T.copy())

    def alive(self, lengths: OutputLengths) -> Floats:
        """The chance [horizons, n] that each still runs at each horizon."""
        known = np.minimum(self.generated, TABLE)  # past the table the chance to end is the same at every length
        alive = lengths.survival(self.row, known + HORIZONS[:, None])
        alive /= lengths.survival(self.row, known)
        reached = self.generated + HORIZONS[:, None]
        if (self.least > self.generated).any():
            alive[reached < self.least] = 1.0
        alive *= reached < self.most
        return alive


@dataclass(slots=True)
class _Change:
    """What sequences do by each horizon, as rows [4, horizons], so that two are added at once.

    `mean`, `variance`: of the change of the tokens held, against now; `worst`: that change if nobody ends; `seats`: how
    many they still take, in the mean.
    """

    rows: Floats

    @classmethod
    def none(cls) -> _Change:
        return cls(np.zeros((4, len(HORIZONS))))

    @classmethod
    def of(cls, profile: _Profile, alive: Floats) -> _Change:
        # A sequence holds (held + grows x t) tokens with chance `alive`. Summed over the sequences for each power of t.
        held, grows = profile.held.astype(np.float64), profile.grows.astype(np.float64)
        there = alive @ np.stack((grows, held, profile.seats), axis=1)
        spread = (alive - alive * alive) @ np.stack((grows * grows, grows * held, held * held), axis=1)
        time = HORIZONS.astype(np.float64)
        change = cls.none()
        change.rows[0] = there[:, 1] + time * there[:, 0] - held.sum()
        change.rows[1] = spread[:, 2] + time * (2.0 * spread[:, 1] + time * spread[:, 0])
        change.rows[2] = np.minimum(HORIZONS[:, None], profile.most - profile.generated) @ profile.grows
        change.rows[3] = there[:, 2]
        return change

    @classmethod
    def of_one(cls, profile: _Profile, alive: Floats) -> _Change:
        """Of a single sequence, with `alive` [horizons]."""
        held, grows = int(profile.held[0]), int(profile.grows[0])
        size = held + grows * HORIZONS
        there = alive * size
        change = cls.none()
        np.subtract(there, held, out=change.rows[0])
        np.multiply(there, size - there, out=change.rows[1])
        np.multiply(np.minimum(HORIZONS, int(profile.most[0] - profile.generated[0])), grows, out=change.rows[2])
        np.multiply(alive, int(profile.seats[0]), out=change.rows[3])
        return change

    @property
    def mean(self) -> Floats:
        mean: Floats = self.rows[0]
        return mean

    @property
    def variance(self) -> Floats:
        variance: Floats = self.rows[1]
        return variance

    @property
    def seats(self) -> Floats:
        seats: Floats = self.rows[3]
        return seats

    def __add__(self, other: _Change) -> _Change:
        return _Change(self.rows + other.rows)

    def peak(self) -> float:
        mean, variance, worst, _ = self.rows
        return float(np.minimum(mean + SAFETY * np.sqrt(variance), worst).max())


_NOTHING = 0.0, 0.0, 0.0, 0.0, 0.0


class StepTimes:
    """How long a step of so many tokens takes: overhead + tokens x time per token, fitted to the recent steps.

    Each step weighs `FORGET` of the next one. Until `MIN_STEPS` have been seen nothing is known. One odd step (a kernel
    compiled, a paused machine) counts as four times what was expected at most; a step that takes a quarter of it means
    that what was learnt is no longer so, and is forgotten.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._sums = _NOTHING
        self._fit = (0.0, 0.0)

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` tokens took so long."""
        if tokens == 0:
            return
        expected = self._fit[0] + tokens * self._fit[1]
        if expected > 0.0:
            if seconds < expected / 4:
                self._steps = 0
                self._sums = _NOTHING
            else:
                seconds = min(seconds, expected * 4)
        self._steps += 1
        weight, x, y, xx, xy = self._sums
        weight = FORGET * weight + 1.0
        x, y = FORGET * x + tokens, FORGET * y + seconds
        xx, xy = FORGET * xx + tokens * tokens, FORGET * xy + tokens * seconds
        self._sums = weight, x, y, xx, xy
        spread = weight * xx - x * x
        # Steps of nearly one size tell no slope; then every size is taken to last as long.
        slope = (weight * xy - x * y) / spread if spread > 0.01 * x * x else 0.0
        slope = min(max(slope, 0.0), y / x)
        self._fit = ((y - slope * x) / weight, slope)

    def seconds(self, tokens: float) -> float | None:
        """Expected time of a step of `tokens` tokens. None: not known yet."""
        if self._steps < MIN_STEPS or self._sums[2] == 0.0:
            return None
        return self._fit[0] + tokens * self._fit[1]


@dataclass(frozen=True, slots=True)
class Outlook:
    """When those who wait will be admitted: a snapshot, to be read from any thread.

    `times`: seconds from its making; `admitted`: how many of the waiting will have been admitted by then, in the mean.
    """

    times: tuple[float, ...]
    admitted: tuple[float, ...]
    mean_tokens: float

    def start_s(self, ahead: Backlog, prompt_tokens: int) -> float:
        """Seconds until a request of `prompt_tokens` behind `ahead` should have its first token."""
        return self._time_of(self._count(ahead) + prompt_tokens / self.mean_tokens)

    def admission_s(self, first: Backlog) -> float:
        """Seconds until so much of what waits should have been admitted."""
        return self._time_of(self._count(first))

    def _count(self, backlog: Backlog) -> float:
        """In requests of the mean size."""
        return max(float(backlog.requests), backlog.tokens / self.mean_tokens)

    def _time_of(self, admitted: float) -> float:
        index = bisect_left(self.admitted, admitted)
        if index == 0:
            return self.times[0]
        if index == len(self.admitted):
            # Beyond the horizon it goes on as in its second half. If nobody moves there: not before its end.
            half = (index - 1) // 2
            rate = (self.admitted[-1] - self.admitted[half]) / (self.times[-1] - self.times[half])
            return self.times[-1] + ((admitted - self.admitted[-1]) / rate if rate > 0.0 else 0.0)
        low, high = self.admitted[index - 1], self.admitted[index]
        share = (admitted - low) / (high - low)
        return self.times[index - 1] + share * (self.times[index] - self.times[index - 1])


class GrowthForecast:
    """The peak of the pool's occupancy if nobody but one candidate were admitted. Sizes in blocks.

    `committed_blocks`: blocks of the pool that are used or promised. Once in `REFRESH_STEPS` steps the running
    sequences are looked at one by one; between, admissions are added.
    """

    def __init__(self, lengths: OutputLengths, *, num_blocks: int, block_size: int, sliding_window: int = 0) -> None:
        """`num_blocks`: the usable ones. `sliding_window`: tokens that the model sees; 0: all."""
        self.lengths = lengths
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._window = sliding_window
        self._refresh_at = 0
        self._committed = 0
        self._change = _Change.none()
        self._computed_share = 1.0
        self._to_prefill = 0.0
        self._candidate: tuple[Request, _Change] | None = None
        self._alive: dict[tuple[int, int, int, int], Floats] = {}  # of candidates since the last refresh

    def learn(self, sequence: Request, *, ended: bool) -> None:
        """A sequence that ran is over, by itself (`ended`) or cut off. Beams, dropped by the dozen, and outputs that
        were forbidden to end say nothing about others."""
        generated = len(sequence.output_token_ids)
        if generated and not sequence.top and not _is_endless(sequence.params):
            self.lengths.observe(sequence.tenant, generated, ended=ended)

    def refresh(self, step: int, running: Collection[Request], committed_blocks: int) -> None:
        """Look at the running sequences, if it is time. Call before a step's first `watermark`."""
        if step < self._refresh_at and committed_blocks >= self._committed - self._num_blocks * EMPTIER:
            return
        self._refresh_at = step + REFRESH_STEPS + len(running) // SEQUENCES_A_STEP
        self._committed = committed_blocks
        self._candidate = None
        self._alive.clear()
        profile = _Profile.of(running, self.lengths, self._window)
        telling = profile.tells > 0
        self.lengths.update(profile.row[telling], profile.generated[telling])
        self._change = _Change.of(profile, profile.alive(self.lengths))
        self._to_prefill = float(np.maximum(profile.missing - 1, 0).sum())

    def watermark(self, request: Request, committed_blocks: int) -> int:
        """Blocks that must stay free, beside those promised to the request, if it is admitted: its own growth counts.
        `committed_blocks` are those before its admission."""
        peak = (self._change + self._change_by(request)).peak() / self._block_size
        return max(0, math.ceil(self._committed + peak) - committed_blocks)

    def admit(self, request: Request, promised_blocks: int) -> None:
        """The request has been admitted and promised so many blocks; `num_cached_tokens` says what it found."""
        if request.num_cached_tokens:
            self._candidate = None  # it was judged without
        self._change = self._change + self._change_by(request)
        self._candidate = None
        self._committed += promised_blocks
        missing = request.num_tokens - request.num_computed_tokens
        self._to_prefill += missing
        share = missing / request.num_tokens
        self._computed_share += SHARE_SMOOTHING * (share - self._computed_share)

    def _change_by(self, request: Request) -> _Change:
        if self._candidate is None or self._candidate[0] is not request:
            profile = _Profile.of([request], self.lengths, self._window)
            # Most candidates are alike: nothing generated yet, the same limits.
            kind = (int(profile.row[0]), int(profile.generated[0]), int(profile.least[0]), int(profile.most[0]))
            alive = self._alive.get(kind)
            if alive is None:
                alive = self._alive[kind] = profile.alive(self.lengths)[:, 0]
            self._candidate = (request, _Change.of_one(profile, alive))
        return self._candidate[1]

    def outlook(
        self,
        sample: Sequence[Request],
        times: StepTimes,
        *,
        waiting: Backlog,
        max_running: int,
        step_tokens: int,
    ) -> Outlook | None:
        """When requests like those of `sample` will be admitted, as of the last `refresh`. None: cannot be told yet.

        `sample`: some that wait, or running ones where nobody does. `waiting`: all that wait, preempted ones included.
        `step_tokens`: a step's budget.
        """
        full_step = times.seconds(step_tokens)
        if full_step is None or not sample:
            return None
        sample = sample[:SAMPLE]
        tokens = sum(request.num_tokens for request in sample) / len(sample)
        if waiting.requests:
            tokens = waiting.tokens / waiting.requests
        computed = max(1.0, tokens * self._computed_share)
        # What one newcomer holds, in blocks and seats, so many steps after its admission.
        profile = _Profile.of(sample, self.lengths, self._window)
        profile.generated[:] = 0
        alive = profile.alive(self.lengths)
        reserved = np.array([request.is_reserved for request in sample])
        own = computed + np.where(reserved, profile.most, HORIZONS[:, None]) * profile.seats
        if self._window:
            own = np.minimum(own, self._window)
        held = (alive * own).mean(1) / self._block_size
        seat = (alive * profile.seats).mean(1)
        steps = math.ceil(max(1.0, float(np.trapezoid(seat / seat[0], HORIZONS)) / INTERVALS_A_LIFE))
        grid = steps * np.arange(INTERVALS)

        def on_grid(values: Floats) -> list[float]:
            return list(map(float, np.interp(grid, HORIZONS, values)))

        blocks_busy = on_grid(self._committed + self._change.mean / self._block_size)
        seats_busy = on_grid(self._change.seats)
        blocks_each = on_grid(held)
        blocks_aged, seats_aged = blocks_each[::-1], on_grid(seat)[::-1]
        now = times.seconds(seats_busy[0]) or 0.0  # the step in flight comes first
        points = [(now, 0.0)]
        newcomers: list[float] = []
        admitted, backlog = 0.0, self._to_prefill
        for interval in range(INTERVALS):
            ages = slice(INTERVALS - 1 - interval, INTERVALS - 1)
            blocks = blocks_busy[interval] + sum(map(mul, newcomers, blocks_aged[ages]))
            seats = seats_busy[interval] + sum(map(mul, newcomers, seats_aged[ages]))
            room = max(1.0, step_tokens - seats)  # tokens of a step that are left for prefill
            by_blocks = (self._num_blocks - blocks) / blocks_each[0]
            by_tokens = (steps * room - backlog) / computed
            new = max(0.0, min(by_blocks, (max_running - seats) / seat[0], by_tokens))
            newcomers.append(new)
            admitted += new
            backlog += new * computed
            prefill_steps = min(float(steps), backlog / room)
            backlog -= prefill_steps * room
            points.append((now + prefill_steps * full_step, admitted))
            now += prefill_steps * full_step + (steps - prefill_steps) * (times.seconds(seats) or 0.0)
            points.append((now, admitted))
        return Outlook(tuple(p[0] for p in points), tuple(p[1] for p in points), max(1.0, tokens))
