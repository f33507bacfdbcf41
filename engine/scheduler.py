"""Which tokens are computed in the next step.

The idea. There are no phases. A request has tokens (prompt + generated) of which some are computed; a step computes
more of them, and whoever has all but none left to compute gets its next token sampled. Prefill, decode, a chunk of a
long prompt and the recompute after a preemption are the same thing with different counts. One token budget bounds a
step, and it is spent in this order: decodes (one token each), prefills under way, admissions (preempted requests
before new ones), and what is left lengthens the chunks already chosen.

Invariants:
  * no more sequences run than the budget has tokens, as admission takes one, so every decode moves in every step;
  * one prefill gets at most half of the budget while others want some, so a long prompt cannot own a step;
  * a request is admitted only when all the tokens it has fit, promised by the pool, so nothing holds blocks without
    being able to run on;
  * arrivals are served in order: nobody overtakes the first that does not fit. The one exception is a request whose
    prefix is being computed by a running one: it waits for those blocks, others may pass;
  * only decodes preempt, before anything of the step is decided, and a step that preempts admits nobody;
  * a request is preempted at most `MAX_PREEMPTIONS` times, then it runs with its whole need promised.

Rejected: prefill first (a burst of prompts stalls every decode); a separate prefill queue with its own batches (two
phases again); admitting by chunk (two half-loaded prompts can wait for each other for ever).

`schedule` -> the runner computes -> `commit`. A request may be finished or aborted at any moment between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from pagemill.engine.kv_cache_manager import CacheStatistics, KVCacheManager
from pagemill.engine.preemption import choose_victim, is_protected
from pagemill.engine.request import Request, RequestStatus
from pagemill.engine.scheduler_output import ScheduledSequence, SchedulerOutput

WATERMARK = 0.01  # share of the pool that an admission leaves free while others run, for their next tokens
PASSED_OVER = 64  # waiting requests looked at behind one that waits for its prefix


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """State and record of the scheduler: requests by state now, and counts since the start."""

    running: int
    waiting: int
    preempted: int
    steps: int
    scheduled_tokens: int
    preemptions: int
    recomputed_tokens: int
    peak_running: int
    cache: CacheStatistics


class Scheduler:
    """Continuous batching over a `KVCacheManager`. Not thread-safe: one thread calls everything."""

    def __init__(
        self,
        cache: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self._budget = max_num_batched_tokens
        self._max_running = max_num_seqs
        self._chunk_cap = max(1, max_num_batched_tokens // 2)
        self._watermark = max(1, int(cache.num_usable * WATERMARK))
        self._clock = clock
        self._running: dict[str, Request] = {}
        self._preempted: dict[str, Request] = {}
        self._waiting: dict[str, Request] = {}
        self._last_victim: Request | None = None
        self._step = 0
        self._scheduled_tokens = 0
        self._preemptions = 0
        self._recomputed = 0
        self._peak_running = 0

    # -- requests come and go ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request that `admission.check_request` has let pass."""
        assert self.get(request.request_id) is None, f"request {request.request_id} is live already"
        request.status = RequestStatus.WAITING
        request.arrived_at = self._clock()
        self._waiting[request.request_id] = request

    def get(self, request_id: str) -> Request | None:
        """The live request of this id."""
        return self._running.get(request_id) or self._waiting.get(request_id) or self._preempted.get(request_id)

    def finish(self, request: Request) -> bool:
        """The request ends here, in whatever state it is; its blocks go back. False if it has ended already."""
        for queue in (self._running, self._waiting, self._preempted):
            if queue.pop(request.request_id, None) is not None:
                break
        else:
            return False
        self.cache.free(request)
        request.status = RequestStatus.FINISHED
        if self._last_victim is request:
            self._last_victim = None
        return True

    @property
    def has_requests(self) -> bool:
        return bool(self._running or self._preempted or self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    def requests(self) -> list[Request]:
        """Every live request."""
        return [*self._running.values(), *self._preempted.values(), *self._waiting.values()]

    # -- a step --------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's tokens and take their blocks. An output without sequences: nothing can run."""
        output = SchedulerOutput(step=self._step)
        self._step += 1
        decodes, prefills = self._make_room(output)
        scheduled = [
            ScheduledSequence(r, r.num_computed_tokens, 1, r.block_table.block_ids, samples=True) for r in decodes
        ]
        budget = self._budget - len(scheduled)
        chunks: list[ScheduledSequence] = []
        crowded = len(prefills) > 1 or bool(self._preempted or self._waiting)
        cap = self._chunk_cap if crowded else self._budget
        for request in prefills:
            if budget == 0:
                break
            budget -= self._add_chunk(chunks, request, min(budget, cap))
        if not output.preempted:
            budget = self._admit(chunks, budget, cap)
        for chunk in chunks:
            if budget == 0:
                break
            budget -= self._lengthen(chunk, budget)
        for chunk in chunks:
            chunk.samples = chunk.start + chunk.num_tokens == chunk.request.num_tokens
        output.scheduled = scheduled + chunks
        output.num_tokens = self._budget - budget
        self._scheduled_tokens += output.num_tokens
        self._peak_running = max(self._peak_running, len(self._running))
        self.cache.begin_step()
        return output

    def commit(self, output: SchedulerOutput) -> None:
        """The step has run: its tokens are computed, full blocks become known, fenced blocks become free."""
        for item in output.scheduled:
            if item.request.status is RequestStatus.RUNNING:
                self.cache.commit(item.request, item.num_tokens)
        self.cache.end_step()

    def append_token(self, request: Request, token_id: int) -> None:
        """The token sampled for a sequence whose item said `samples`."""
        now = self._clock()
        request.output_token_ids.append(token_id)
        if request.first_token_at is None:
            request.first_token_at = now
        if request.preempted_at is not None:
            request.preempted_ms += (now - request.preempted_at) * 1000
            request.preempted_at = None

    # -- parts of a step -----------------------------------------------------------------------------------------

    def _make_room(self, output: SchedulerOutput) -> tuple[list[Request], list[Request]]:
        """Give every decode the slot of its next token, preempting where the pool is full.

        Returns the decodes and the prefills under way that are left.
        """
        decodes: list[Request] = []
        prefills: list[Request] = []
        grow = self.cache.grow
        for request in list(self._running.values()):
            if request.status is not RequestStatus.RUNNING:
                continue
            computed = request.num_computed_tokens
            if request.num_tokens - computed > 1:
                prefills.append(request)
                continue
            while not grow(request, computed + 1):
                if len(self._running) == 1:
                    self.finish(request)
                    output.outgrown.append(request)
                    break
                victim = choose_victim(self._running.values(), self._last_victim)
                assert victim is not None, "a protected request outgrew its promise beside others"
                self._preempt(victim)
                output.preempted.append(victim)
                if victim is request:
                    break
            else:
                decodes.append(request)
        if output.preempted:
            decodes = [r for r in decodes if r.status is RequestStatus.RUNNING]
            prefills = [r for r in prefills if r.status is RequestStatus.RUNNING]
        return decodes, prefills

    def _preempt(self, victim: Request) -> None:
        del self._running[victim.request_id]
        victim.num_lost_tokens = victim.num_computed_tokens
        self.cache.free(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        if victim.preempted_at is None:
            victim.preempted_at = self._clock()
        self._preemptions += 1
        self._last_victim = victim
        self._preempted[victim.request_id] = victim
        if len(self._preempted) > 1:
            self._preempted = dict(sorted(self._preempted.items(), key=lambda item: item[1].arrived_at))

    def _admit(self, chunks: list[ScheduledSequence], budget: int, cap: int) -> int:
        """Admit from the head of the queue while budget, seats and blocks last. Returns the budget left."""
        for queue in (self._preempted, self._waiting):
            for request in list(islice(queue.values(), min(PASSED_OVER, budget))):
                if budget == 0 or len(self._running) >= self._max_running:
                    return budget
                match = self.cache.match(request)
                if match.waits:
                    continue
                promise = self._promise(request)
                watermark = self._watermark if self._running else 0
                if not self.cache.can_start(match, promise, watermark):
                    return budget
                self.cache.start(request, match, promise)
                del queue[request.request_id]
                self._running[request.request_id] = request
                self._enter(request)
                budget -= self._add_chunk(chunks, request, min(budget, cap))
            if queue:
                return budget
        return budget

    def _promise(self, request: Request) -> int:
        """Blocks promised at admission: all of its tokens and the next, or its whole need when it is protected."""
        if is_protected(request):
            return min(self.cache.blocks_for(request.max_slots), self.cache.num_usable)
        return self.cache.blocks_for(min(request.num_tokens + 1, request.max_slots))

    def _enter(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        if request.started_at is None:
            request.started_at = self._clock()
            request.num_cached_tokens = request.num_computed_tokens
            self.cache.count_hit(request)
        recomputed = max(0, request.num_lost_tokens - request.num_computed_tokens)
        request.num_recomputed_tokens += recomputed
        self._recomputed += recomputed
        request.num_lost_tokens = 0

    def _add_chunk(self, chunks: list[ScheduledSequence], request: Request, limit: int) -> int:
        """Schedule up to `limit` tokens of a prefill. Returns how many."""
        start = request.num_computed_tokens
        chunk = ScheduledSequence(request, start, 0, request.block_table.block_ids, samples=False)
        chunks.append(chunk)
        return self._lengthen(chunk, limit)

    def _lengthen(self, chunk: ScheduledSequence, limit: int) -> int:
        """Add up to `limit` tokens to a chunk, within what the request was promised. Returns how many."""
        request = chunk.request
        end = chunk.start + chunk.num_tokens
        more = min(limit, request.num_tokens - end)
        if more:
            grown = self.cache.grow(request, end + more)
            assert grown, "a prefill did not fit what it was promised"
            chunk.num_tokens += more
            self.cache.schedule(request, end + more)
        return more

    # -- insight -------------------------------------------------------------------------------------------------

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(
            running=len(self._running),
            waiting=len(self._waiting),
            preempted=len(self._preempted),
            steps=self._step,
            scheduled_tokens=self._scheduled_tokens,
            preemptions=self._preemptions,
            recomputed_tokens=self._recomputed,
            peak_running=self._peak_running,
            cache=self.cache.statistics(),
        )

    def check(self) -> None:
        """Assert every invariant of scheduler, promises and pool. O(pool)."""
        self.cache.check(list(self._running.values()))
        for request in [*self._waiting.values(), *self._preempted.values()]:
            assert not request.block_table.block_ids, f"{request.request_id} holds blocks without running"
            assert request.promised_blocks == request.num_computed_tokens == 0
        assert len(self._running) <= min(self._max_running, self._budget)
