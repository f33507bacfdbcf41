"""Which tokens are computed in the next step.

The idea. There are no phases. A request has tokens (prompt + generated) of which some are computed; a step computes
more of them, and whoever has all but none left to compute gets its next token sampled. Prefill, decode, a chunk of a
long prompt and the recompute after a preemption are the same thing with different counts. One token budget bounds a
step, and it is spent in this order: decodes (one token each), prefills under way, admissions (preempted requests
before new ones), what is left lengthens the chunks already chosen, and what is left then is for guesses.

Invariants:
  * no more sequences run than the budget has tokens, as admission takes one, so every decode moves in every step;
  * one prefill gets at most half of the budget while others want some, so a long prompt cannot own a step;
  * a request is admitted only when all the tokens it has fit, promised by the pool, so nothing holds blocks without
    being able to run on;
  * the waiting queue's policy says who is next, and nobody overtakes the first that does not fit. The one exception is
    a request whose prefix is being computed by a running one: it waits for those blocks, others may pass;
  * an admission leaves free what the running ones are expected to grow by (`forecast`; without one, a small share);
  * only decodes preempt, before anything of the step is decided, and a step that preempts admits nobody;
  * a request is preempted at most `MAX_PREEMPTIONS` times, then it runs *reserved*: with its whole need promised, so
    that it never gives way. Beams always do, and everybody with `reserve` (then nobody is ever preempted).

Rejected: prefill first (a burst of prompts stalls every decode); a separate prefill queue with its own batches (two
phases again); admitting by chunk (two half-loaded prompts can wait for each other for ever).

`schedule` -> the runner computes -> `commit`. A request may be finished or aborted at any moment between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice

from pagemill.engine.config import PreemptionMode
from pagemill.engine.forecast import SAMPLE, GrowthForecast, Outlook, StepTimes
from pagemill.engine.kv_cache_manager import KVCacheManager, PrefixMatch
from pagemill.engine.policy import FcfsQueue, WaitingQueue
from pagemill.engine.preemption import Preemption, PreemptionCost
from pagemill.engine.promises import Promises
from pagemill.engine.request import Request, RequestStatus
from pagemill.engine.scheduler_output import Sampled, ScheduledSequence, SchedulerOutput
from pagemill.engine.scheduler_statistics import SchedulerStatistics
from pagemill.engine.speculation import Speculation
from pagemill.engine.waiting_line import WaitingLine

CHARGED_TOKENS = 16  # output tokens are told to the policy so many at a time


class Scheduler:
    """Continuous batching over a `KVCacheManager`. Not thread-safe: one thread calls everything."""

    def __init__(
        self,
        cache: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        reserve: bool = False,
        preemption_mode: PreemptionMode = "auto",
        cost: PreemptionCost | None = None,
        queue: WaitingQueue | None = None,
        forecast: GrowthForecast | None = None,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self.promises = Promises(cache, forecast, reserve=reserve)
        self.step_times = StepTimes()
        self._speculation = speculation
        self.preemption = Preemption(cache, preemption_mode, cost or PreemptionCost())
        self._budget = max_num_batched_tokens
        self._max_seats = min(max_num_seqs, max_num_batched_tokens)
        self._chunk_cap = max(1, max_num_batched_tokens // 2)
        self._clock = clock
        self._running: dict[Request, None] = {}
        self._prefilling: dict[Request, None] = {}  # of them, those with more than one token to compute
        self._queue: WaitingQueue = queue if queue is not None else FcfsQueue()
        self._waiting = WaitingLine(self._queue)
        self._seats = 0  # taken by the running ones
        self._step = 0
        self._scheduled_tokens = 0
        self._recomputed = 0
        self._peak_running = 0

    # -- requests come and go ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request that `admission.check_request` has let pass."""
        request.status = RequestStatus.WAITING
        request.arrived_at = self._clock()
        self.promises.enter(request)
        self._waiting.add(request)

    def can_hold(self, request: Request) -> bool:
        """Whether the pool is large enough for what the request has generated so far."""
        return self.cache.blocks_for(request.num_tokens) <= self.cache.num_usable

    def fork(self, origin: Request, fork: Request) -> None:
        """Let `fork` run on from where `origin` is, on the same blocks, in one of the seats that it holds."""
        assert origin in self._running and origin.seats > 1
        promise = self.promises.for_fork(origin, origin.seats)
        origin.seats -= 1
        self._continue(origin, fork, promise)

    def replace(self, beams: list[Request], survivors: list[tuple[Request, Request | None]]) -> None:
        """Exchange the running `beams` of one request: of each pair in `survivors` the first goes on as it is, or, with
        a second, the second is forked from it. Whoever of `beams` is not the first of a pair without a second ends.

        Where rules leave fewer tokens than there are beams, fewer go on for a while: one of them keeps the seats, and
        the promise, of those that may be forked from it later.
        """
        kept = {origin for origin, fork in survivors if fork is None}
        seats = sum(beam.seats for beam in beams)
        for beam in beams:
            if beam.promised_blocks:
                self.cache.promise(beam, 0)
        forks = [(origin, fork) for origin, fork in survivors if fork is not None]
        for origin, fork in forks:
            self._continue(origin, fork, 0)
        for beam in beams:
            if beam not in kept:
                self.finish(beam)
        self._seats += seats - sum(beam.seats for beam in kept)
        going_on = [*kept, *(fork for _, fork in forks)]
        for request in going_on:
            request.seats = 1
        going_on[0].seats += seats - len(going_on)
        for request in going_on:
            self.cache.promise(request, request.seats * self.promises.for_fork(request, seats))
            seats -= request.seats

    def finish(self, request: Request, *, ended: bool = False) -> bool:
        """The request ends here, in whatever state it is; its blocks go back. False if it has ended already.

        `ended`: of itself, not by a limit or from outside; its length says something about those to come.
        """
        if request in self._running:
            self._leave(request)
        elif not self._waiting.remove(request):
            return False
        if self.promises.forecast is not None and request.started_at is not None:
            self.promises.forecast.learn(request, ended=ended)
        self._queue.charge(request, output_tokens=len(request.output_token_ids) % CHARGED_TOKENS)
        self.cache.free(request)
        request.status = RequestStatus.FINISHED
        self.preemption.forget(request)
        return True

    @property
    def has_requests(self) -> bool:
        return bool(self._running) or self._waiting.count > 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return self._waiting.count

    def requests(self) -> list[Request]:
        """Every live sequence."""
        return [*self._running, *self._waiting]

    # -- a step --------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's tokens and take their blocks. An output without sequences: nothing can run."""
        output = SchedulerOutput(step=self._step)
        self._step += 1
        scheduled = self._make_room(output)
        budget = self._budget - len(scheduled)
        chunks: list[ScheduledSequence] = []
        if self._prefilling or self._waiting.count > 0:
            budget = self._add_chunks(chunks, budget, output)
        if self._speculation is not None:
            budget -= self._speculation.draft(
                scheduled,
                self.cache,
                limit=min(budget, self._max_seats + self._speculation.num_drafts - len(scheduled) - len(chunks)),
                blocks_kept=self.promises.watermark,
            )
        output.scheduled = scheduled + chunks
        output.num_tokens = self._budget - budget
        self._scheduled_tokens += output.num_tokens
        self._peak_running = max(self._peak_running, len(self._running))
        self.cache.begin_step()
        return output

    def observe(self, output: SchedulerOutput, seconds: float) -> None:
        """A step, without its block moves, took so long. Call before its `commit`."""
        self.step_times.observe(output.num_tokens, seconds)
        if self._speculation is not None:
            self._speculation.observe(output.scheduled, output.num_tokens, seconds)

    def commit(self, output: SchedulerOutput, sampled: Sequence[Sampled] = ()) -> None:
        """The step has run: its tokens are computed, full blocks become known, fenced blocks become free.

        `sampled`: what it sampled, in order; of drafts only the right ones are computed. Empty, where it had none.
        """
        drafted = (
            self._speculation.settle(output.scheduled, sampled) if self._speculation is not None and sampled else ()
        )
        self.cache.commit(output.scheduled)
        for item in drafted:
            if item.request.status is RequestStatus.RUNNING:
                self.cache.trim(item.request, item.start + 1)
        self.cache.end_step()

    def append_token(self, request: Request, token_id: int) -> None:
        """The token sampled for a sequence whose item said `samples`."""
        request.output_token_ids.append(token_id)
        if len(request.output_token_ids) % CHARGED_TOKENS == 0:
            self._queue.charge(request, output_tokens=CHARGED_TOKENS)
        if request.first_token_at is not None and request.preempted_at is None:
            return
        now = self._clock()
        if request.first_token_at is None:
            request.first_token_at = now
        if request.preempted_at is not None:
            request.preempted_ms += (now - request.preempted_at) * 1000
            request.preempted_at = None

    # -- parts of a step -----------------------------------------------------------------------------------------

    def _make_room(self, output: SchedulerOutput) -> list[ScheduledSequence]:
        """Give every decode the slot of its next token, preempting where the pool is full. Returns the decodes left."""
        decodes: list[ScheduledSequence] = []
        prefilling = self._prefilling
        grow, block_size, running = self.cache.grow, self.cache.block_size, RequestStatus.RUNNING
        moves = output.moves
        # This loop is run for every sequence in every step. Mostly the slot is there already.
        for request in list(self._running):
            if request.status is not running or request in prefilling:
                continue
            computed = request.num_computed_tokens
            if computed % block_size and not request.may_copy:
                table = request.block_table.block_ids
                decodes.append(ScheduledSequence(request, computed, 1, table, True, request.top))
                continue
            while not grow(request, computed + 1, moves):
                if request.top and self.promises.borrow(request, self._running):
                    continue
                victim = None if len(self._running) == 1 else self.preemption.choose(self._running)
                if victim is None:
                    # It is alone, or only it and what never gives way: the pool has no more for it.
                    self.finish(request)
                    output.outgrown.append(request)
                    break
                self._preempt(victim, output)
                if victim is request:
                    break
            else:
                table = request.block_table.block_ids
                decodes.append(ScheduledSequence(request, computed, 1, table, True, request.top))
        if output.preempted or output.outgrown:
            decodes = [item for item in decodes if item.request.status is running]
        return decodes

    def _preempt(self, victim: Request, output: SchedulerOutput) -> None:
        """Take the victim's blocks. If the whole pool is too small for its tokens it ends: it could never run again."""
        if not self.cache.can_recompute(victim):
            self.finish(victim)
            output.outgrown.append(victim)
            return
        self._leave(victim)
        self.preemption.take_blocks(victim, output.moves, self._clock())
        output.preempted.append(victim)
        self._waiting.put_back(victim)

    def _admit(self, chunks: list[ScheduledSequence], budget: int, cap: int, output: SchedulerOutput) -> int:
        """Admit from the head of the line while budget, seats and blocks last. Returns the budget left."""
        if budget == 0 or self._seats >= self._max_seats:
            return budget
        self.promises.refresh(self._step, self._running)
        for request in self._waiting.candidates():
            if budget == 0 or self._seats + request.seats > self._max_seats:
                break
            match = PrefixMatch() if request.host_blocks else self.cache.match(request)
            if match.waits:
                continue
            if not self.promises.start(request, match, output.moves, alone=not self._running):
                break
            self._enter(request)
            budget -= self._add_chunk(chunks, request, min(budget, cap), output)
        return budget

    def _enter(self, request: Request) -> None:
        """Take a queued request that has its blocks into the batch."""
        self._waiting.remove(request)
        self._running[request] = self._prefilling[request] = None
        self._seats += request.seats
        request.status = RequestStatus.RUNNING
        if request.started_at is None:
            request.started_at = self._clock()
            self._queue.charge(request, prompt_tokens=request.num_tokens - request.num_computed_tokens)
        recomputed = max(0, request.num_lost_tokens - request.num_computed_tokens)
        request.num_recomputed_tokens += recomputed
        self._recomputed += recomputed
        request.num_lost_tokens = 0

    def _leave(self, request: Request) -> None:
        """Take a running request out of the batch."""
        del self._running[request]
        self._prefilling.pop(request, None)
        if self._speculation is not None:
            self._speculation.forget(request)
        self._seats -= request.seats

    def _continue(self, origin: Request, fork: Request, promise: int) -> None:
        self.cache.fork(origin, fork, promise)
        fork.status = RequestStatus.RUNNING
        fork.is_reserved = origin.is_reserved
        fork.arrived_at, fork.started_at = origin.arrived_at, origin.started_at
        fork.first_token_at = origin.first_token_at
        self._running[fork] = None

    def _add_chunks(self, chunks: list[ScheduledSequence], budget: int, output: SchedulerOutput) -> int:
        """Schedule prefills, those under way and those that begin. Returns the budget left."""
        prefills = list(self._prefilling)
        crowded = len(prefills) > 1 or self.num_waiting > 0
        cap = self._chunk_cap if crowded else self._budget
        for request in prefills:
            if budget == 0:
                break
            budget -= self._add_chunk(chunks, request, min(budget, cap), output)
        if not output.preempted:
            budget = self._admit(chunks, budget, cap, output)
        for chunk in chunks:
            if budget == 0:
                break
            budget -= self._lengthen(chunk, budget, output)
        for chunk in chunks:
            left = chunk.request.num_tokens - chunk.start - chunk.num_tokens
            chunk.samples = left == 0
            if left <= 1:
                del self._prefilling[chunk.request]
        return budget

    def _add_chunk(self, chunks: list[ScheduledSequence], request: Request, limit: int, output: SchedulerOutput) -> int:
        """Schedule up to `limit` tokens of a prefill. Returns how many."""
        start = request.num_computed_tokens
        chunk = ScheduledSequence(request, start, 0, request.block_table.block_ids, False, request.top)
        chunks.append(chunk)
        return self._lengthen(chunk, limit, output)

    def _lengthen(self, chunk: ScheduledSequence, limit: int, output: SchedulerOutput) -> int:
        """Add up to `limit` tokens to a chunk, within what the request was promised. Returns how many."""
        request = chunk.request
        end = chunk.start + chunk.num_tokens
        more = min(limit, request.num_tokens - end)
        if more:
            grown = self.cache.grow(request, end + more, output.moves)
            assert grown, "a prefill did not fit what it was promised"
            chunk.num_tokens += more
            self.cache.schedule(request, end + more)
        return more

    # -- insight -------------------------------------------------------------------------------------------------

    def outlook(self) -> Outlook | None:
        """When those who wait, or come to wait now, will have been admitted. None: it cannot be told yet."""
        forecast = self.promises.forecast
        if forecast is None:
            return None
        self.promises.refresh(self._step, self._running)
        return forecast.outlook(
            self._waiting.sample(SAMPLE) or list(islice(self._running, SAMPLE)),
            self.step_times,
            waiting=self._waiting.backlog,
            max_running=self._max_seats,
            step_tokens=self._budget,
        )

    def _rate(self, tokens: int) -> float | None:
        """Tokens a second in steps of so many."""
        seconds = self.step_times.seconds(tokens)
        return None if not seconds else tokens / seconds

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(
            running=len(self._running),
            waiting=len(self._queue),
            preempted=len(self._waiting.preempted),
            steps=self._step,
            scheduled_tokens=self._scheduled_tokens,
            preemptions=self.preemption.count,
            swap_preemptions=self.preemption.num_swaps,
            recomputed_tokens=self._recomputed,
            swapped_blocks=self.preemption.swapped_blocks,
            draft_tokens=self._speculation.num_drafted if self._speculation is not None else 0,
            accepted_tokens=self._speculation.num_accepted if self._speculation is not None else 0,
            peak_running=self._peak_running,
            prefill_tokens_s=self._rate(self._budget),
            decode_tokens_s=self._rate(max(1, len(self._running))),
            cache=self.cache.statistics(),
        )

    def check(self) -> None:
        """Assert every invariant of scheduler, promises and pool. O(pool)."""
        self.cache.check(self.requests())
        for request in self._waiting:
            assert not request.block_table.block_ids, f"{request.request_id} holds blocks without running"
            assert request.promised_blocks == request.num_computed_tokens == 0
            assert not request.host_blocks or request.status is RequestStatus.SWAPPED
        prefilling = {request for request in self._running if request.num_tokens - request.num_computed_tokens > 1}
        assert prefilling == self._prefilling.keys(), "a decode passes for a prefill, or the other way round"
        assert self._seats == sum(request.seats for request in self._running), "seats do not add up"
        assert len(self._running) <= self._seats <= self._max_seats
