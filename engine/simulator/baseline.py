"""Engines to compare with: a contiguous KV cache, and a naive paged one. Counts only, no blocks.

Both batch continuously, first come first served, and know neither prefixes nor refusals. They differ in what a request
takes from the pool:

* *contiguous*: its whole reservation at its start, and nothing later. The pool is taken to be perfectly packed, which
  flatters this twin wherever reservations differ in size.
* *naive paged*: the blocks of the tokens it has, then one by one. Where there is none left, the request that was
  admitted last loses its blocks and its progress. No admission right after a preemption; 1 % of the pool stays free
  at admissions. This is the baseline of the workload research: 318 preemptions per 1,000 requests on ShareGPT.

`budget` bounds the tokens of a step, decodes first, as in the engine. None: a prompt is computed whole in the step
that admits it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pagemill.engine.simulator.arrivals import Arrivals, Feed
from pagemill.engine.simulator.device import StepLoad
from pagemill.engine.simulator.recorder import Recorder
from pagemill.engine.simulator.result import Result
from pagemill.engine.simulator.setup import Progress, Setup
from pagemill.engine.simulator.trace import Trace

NAIVE_WATERMARK = 0.01

Contiguous = int | Literal["pow2", "exact"]  # tokens reserved, next power of two of the final size, or the final size


@dataclass(slots=True, eq=False)
class _Sequence:
    index: int
    prompt: int
    output: int
    arrived: float
    generated: int = 0
    computed: int = 0
    lost: int = 0
    preempted_at: float | None = None
    preempted_s: float | None = None
    slots: int = 0
    released: bool = False
    started: float | None = None
    first_token: float | None = None

    @property
    def tokens(self) -> int:
        return self.prompt + self.generated


def simulate_contiguous(
    trace: Trace, setup: Setup, arrivals: Arrivals, size: Contiguous, progress: Progress | None = None
) -> Result:
    """A cache that reserves `size` slots for each request. Requests that do not fit are refused."""

    def reservation(sequence: _Sequence) -> int:
        final = sequence.prompt + sequence.output
        if size == "exact":
            return final
        if size == "pow2":
            return 1 << (final - 1).bit_length()
        return size if final <= size else 0

    name = f"contiguous {size}"
    return _Baseline(name, trace, setup, arrivals, reservation, 1, setup.budget, 0).run(progress)


def simulate_naive(
    trace: Trace, setup: Setup, arrivals: Arrivals, budget: int | None = None, progress: Progress | None = None
) -> Result:
    """Paged, preempting whoever was admitted last."""
    watermark = int(setup.num_blocks * NAIVE_WATERMARK) * setup.block_size
    return _Baseline("naive paged", trace, setup, arrivals, None, setup.block_size, budget, watermark).run(progress)


class _Baseline:
    def __init__(
        self,
        name: str,
        trace: Trace,
        setup: Setup,
        arrivals: Arrivals,
        reservation: Callable[[_Sequence], int] | None,
        block_size: int,
        budget: int | None,
        watermark: int,
    ) -> None:
        self._trace = trace
        self._setup = setup
        self._feed = Feed(trace, arrivals)
        self._reservation = reservation
        self._block_size = block_size
        self._budget = budget
        self._watermark = watermark
        self._pool = self._free = setup.tokens // block_size * block_size
        self._recorder = Recorder(name, trace, setup.to_dict() | {"arrivals": str(arrivals)}, self._pool)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._now = 0.0
        self._has_preempted = False

    def run(self, progress: Progress | None) -> Result:
        while True:
            self._deliver(self._now)
            if not self._running and not self._waiting:
                coming = self._feed.next_time
                if coming is None:
                    return self._recorder.result()
                self._now = max(self._now, coming)
                continue
            self._step()
            if progress is not None:
                progress(self._recorder.finished, len(self._trace.requests))

    # -- memory --------------------------------------------------------------------------------------------------

    def _paged(self, tokens: int) -> int:
        return -(-tokens // self._block_size) * self._block_size

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._setup.seats:
            sequence = self._waiting[0]
            need = self._reservation(sequence) if self._reservation else self._paged(sequence.tokens)
            if self._free - need < (self._watermark if self._running else 0):
                return
            self._waiting.popleft()
            self._free -= need
            sequence.slots = need
            self._running.append(sequence)
            if sequence.started is None:
                sequence.started = self._now
            self._recorder.recomputed_tokens += sequence.lost
            sequence.lost = 0

    def _grow(self, sequence: _Sequence, tokens: int) -> bool:
        """Room for `tokens`, at the cost of whoever came last. False: that was the sequence itself."""
        need = self._paged(tokens) - sequence.slots
        if self._reservation is not None or need <= 0:
            return True
        while self._free < need:
            victim = self._running.pop()
            self._free += victim.slots
            victim.lost, victim.computed, victim.slots = victim.computed, 0, 0
            self._waiting.appendleft(victim)
            self._recorder.preemptions += 1
            if victim.preempted_at is None:
                victim.preempted_at = self._now
            self._has_preempted = True
            if victim is sequence:
                return False
        self._free -= need
        sequence.slots += need
        return True

    def _release(self, sequence: _Sequence) -> None:
        self._free += sequence.slots
        sequence.released = True

    # -- a step --------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        if not self._has_preempted:
            self._admit()
        self._has_preempted = False
        load, sampling, computed = self._schedule()
        running, recorder = len(self._running), self._recorder
        start, end = self._now, self._now + self._setup.device.timing.seconds(load)
        held = sum(sequence.computed for sequence in self._running)
        recorder.step(start, end, running, len(self._waiting), held)
        recorder.computed_tokens += computed
        self._deliver(end)
        self._now = end
        recorder.tokens([sequence.index for sequence in sampling], end)
        for sequence in sampling:
            sequence.generated += 1
            if sequence.preempted_at is not None:
                sequence.preempted_s = (sequence.preempted_s or 0.0) + end - sequence.preempted_at
                sequence.preempted_at = None
            recorder.held_life += sequence.computed
            recorder.allocated_life += sequence.slots
            if sequence.first_token is None:
                sequence.first_token = end
            if sequence.generated == sequence.output:
                self._end(sequence)

    def _schedule(self) -> tuple[StepLoad, list[_Sequence], int]:
        """Decodes, then prefills, as far as the budget goes. Who gets a token, and how many tokens are computed."""
        load = StepLoad()
        sampling: list[_Sequence] = []
        prefills: list[_Sequence] = []
        place = 0
        while place < len(self._running):  # victims come from the end, so what lies before `place` stays
            sequence = self._running[place]
            if sequence.tokens - sequence.computed > 1:
                prefills.append(sequence)
            elif self._grow(sequence, sequence.tokens):
                sequence.computed += 1
                load.decodes += 1
                load.kv_tokens += sequence.computed
                sampling.append(sequence)
                if sequence.generated + 1 == sequence.output:
                    # Within the step, as in the research: a device could not, but it only saves the twin preemptions.
                    self._release(sequence)
            else:
                break
            place += 1
        total = load.decodes
        for sequence in prefills:
            left = sequence.tokens - sequence.computed
            chunk = left if self._budget is None else min(left, self._budget - total)
            if chunk <= 0:
                break
            load.add_prefill(sequence.computed, chunk)
            sequence.computed += chunk
            total += chunk
            if chunk == left:
                sampling.append(sequence)
        return load, sampling, total

    # -- requests come and go ------------------------------------------------------------------------------------

    def _deliver(self, until: float) -> None:
        while (arrival := self._feed.take(until)) is not None:
            time, index = arrival
            self._now = max(self._now, time)
            recorded = self._trace.requests[index]
            sequence = _Sequence(index, recorded.prompt_tokens, recorded.output_tokens, time)
            need = self._paged(sequence.prompt + sequence.output)
            if self._reservation is not None:
                need = self._reservation(sequence)
            if not 0 < need <= self._pool:
                self._recorder.refuse("never_fits", time, self._now)
                self._feed.ended(index, self._now)
                continue
            self._waiting.append(sequence)

    def _end(self, sequence: _Sequence) -> None:
        recorder = self._recorder
        recorder.held_end += sequence.computed
        recorder.allocated_end += sequence.slots
        self._running.remove(sequence)
        if not sequence.released:
            self._release(sequence)
        if sequence.preempted_s is not None:
            recorder.preempted(sequence.preempted_s)
        assert sequence.started is not None
        recorder.end(sequence.index, sequence.arrived, sequence.started, sequence.first_token, self._now)
        self._feed.ended(sequence.index, self._now)
