"""The engine on a virtual clock: real core, scheduler and block code; only the device is a timing model.

`Simulation` is the runner that the core calls. Computing a step means: add up what it would take, deliver the requests
that arrive meanwhile, move the clock on, and hand out the tokens that the trace recorded. So whatever reads the clock
(queue times, ageing, forecasts) sees the times that a device would have made.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import cast

from pagemill.engine.acceptance import Acceptance, QueueCaps
from pagemill.engine.admission import Limits, check_request, resolve_max_tokens
from pagemill.engine.core import EngineCore
from pagemill.engine.errors import RequestError
from pagemill.engine.forecast import Outlook
from pagemill.engine.outputs import SequenceOutput
from pagemill.engine.policy import make_queue
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduler_output import Sampled, SchedulerOutput, StepResult
from pagemill.engine.simulator.arrivals import Arrivals, Feed
from pagemill.engine.simulator.device import StepLoad
from pagemill.engine.simulator.recorder import Recorder
from pagemill.engine.simulator.result import Result
from pagemill.engine.simulator.setup import Progress, Setup
from pagemill.engine.simulator.tokens import END_TOKEN, VOCABULARY, TokenRuns
from pagemill.engine.simulator.trace import Trace
from pagemill.engine.wiring import make_scheduler

OUTLOOK_S = 0.1  # how often the asynchronous engine works out when those who wait will start


def simulate(trace: Trace, setup: Setup, arrivals: Arrivals, progress: Progress | None = None) -> Result:
    """Run a trace through the engine. Raises `ConfigError` where trace and arrivals do not go together."""
    return Simulation(trace, setup, arrivals).run(progress)


@dataclass(slots=True)
class _Live:
    """A request in the engine: its place in the trace, the tokens it will get, when it came, and whether it has not
    started."""

    index: int
    output: range | list[int]
    arrived: float
    request: Request
    waits: bool = True


class Simulation:
    """One run. `core` may be looked at, and checked, at any time."""

    def __init__(self, trace: Trace, setup: Setup, arrivals: Arrivals) -> None:
        self._trace = trace
        self._setup = setup
        self._timing = setup.device.timing
        self._feed = Feed(trace, arrivals)
        self.now = 0.0
        self._live: dict[str, _Live] = {}
        self._early: list[SequenceOutput] = []  # ends that came between two steps, or during one
        self._deadlines: deque[tuple[float, str]] = deque()  # by time, as everybody has as long
        settings = setup.to_dict() | {"arrivals": str(arrivals)}
        self._recorder = Recorder("pagemill", trace, settings, setup.num_blocks * setup.block_size)
        self._scheduler = make_scheduler(
            num_blocks=setup.num_blocks + 1,
            block_size=setup.block_size,
            num_host_blocks=setup.num_host_blocks,
            enable_prefix_caching=setup.enable_prefix_caching,
            max_num_seqs=setup.seats,
            max_num_batched_tokens=setup.budget,
            admission=setup.admission,
            preemption_mode=setup.preemption_mode,
            scheduling_policy=setup.scheduling_policy,
            block_move_s=self._timing.move * setup.block_size,
            forecasts_growth=setup.forecast == "lengths",
            clock=self._clock,
        )
        self._cache = self._scheduler.cache
        self._acceptance = Acceptance(QueueCaps(setup.max_waiting_requests, setup.max_waiting_prompt_tokens))
        self._waiting = make_queue(setup.scheduling_policy, self._clock)  # as the asynchronous engine's, for forecasts
        self._outlook: Outlook | None = None
        self._outlook_at = 0.0
        self._limits = Limits(
            vocab_size=VOCABULARY,
            max_model_len=setup.max_model_len or VOCABULARY,
            block_size=setup.block_size,
            num_blocks=setup.num_blocks,
            default_max_tokens=setup.max_tokens or VOCABULARY,
            max_num_seqs=setup.seats,
        )
        self.core = EngineCore(self._scheduler, self, None, [END_TOKEN], clock=self._clock)

    def run(self, progress: Progress | None = None) -> Result:
        while True:
            self._deliver(self.now)
            if self._early:
                self._fold([])
            if not self.core.has_requests:
                coming = self._feed.next_time
                if coming is None:
                    break
                self.now = max(self.now, coming)
                continue
            before = self.now
            outputs = self.core.step()
            if self.now == before and not outputs:
                coming = self._feed.next_time
                assert coming is not None, "the scheduler stands still with requests waiting"
                self.now = max(self.now, coming)
            self._fold(outputs)
            if self._outlook is None or self.now >= self._outlook_at:
                self._outlook, self._outlook_at = self._scheduler.outlook(), self.now + OUTLOOK_S
            if progress is not None:
                progress(self._recorder.finished, len(self._trace.requests))
        statistics = self._scheduler.statistics()
        recorder = self._recorder
        recorder.preemptions = statistics.preemptions
        recorder.swap_preemptions = statistics.swap_preemptions
        recorder.swapped_blocks = statistics.swapped_blocks
        recorder.recomputed_tokens = statistics.recomputed_tokens
        recorder.queried_tokens = statistics.cache.queried_tokens
        recorder.hit_tokens = statistics.cache.hit_tokens
        return recorder.result()

    # -- the device ----------------------------------------------------------------------------------------------

    def execute(self, output: SchedulerOutput) -> StepResult:
        """The runner's part: let the step's time pass, and give the recorded tokens."""
        recorder, size, live = self._recorder, self._setup.block_size, self._live
        load = StepLoad()
        decodes = contexts = held = blocks = 0
        sampled: list[int] = []
        for item in output.scheduled:
            context = item.start + item.num_tokens
            if item.num_tokens == 1:
                decodes += 1
                contexts += context
            else:
                load.add_prefill(item.start, item.num_tokens)
            if item.samples:
                request = item.request
                tokens = live[request.request_id].output
                position = len(request.output_token_ids)
                held += context
                blocks += len(item.block_ids)
                if position + 1 < len(tokens):
                    sampled.append(tokens[position])
                else:
                    sampled.append(END_TOKEN)
                    recorder.held_end += context
                    recorder.allocated_end += len(item.block_ids) * size
        load.decodes = decodes
        load.kv_tokens += contexts
        load.moved_tokens = size * sum(move.kind != "copy" for move in output.moves)
        recorder.held_life += held
        recorder.allocated_life += blocks * size
        recorder.computed_tokens += output.num_tokens
        cache = self._cache.statistics()
        kept = cache.pool.used * size - cache.wasted_slots + output.num_tokens
        start, end = self.now, self.now + self._timing.seconds(load)
        recorder.step(start, end, self._scheduler.num_running, self._scheduler.num_waiting, kept)
        self._deliver(end)
        self.now = end
        copy_s = load.moved_tokens * self._timing.move
        return StepResult([Sampled([token_id]) for token_id in sampled], copy_s=copy_s)

    def _clock(self) -> float:
        return self.now

    # -- requests come and go ------------------------------------------------------------------------------------

    def _deliver(self, until: float) -> None:
        """Submit what arrives by `until`, and abort whose deadline passes, each at its own time."""
        while True:
            coming = self._feed.next_time
            if self._deadlines and self._deadlines[0][0] <= min(until, math.inf if coming is None else coming):
                deadline, name = self._deadlines.popleft()
                self.now = max(self.now, deadline)
                self._expire(name)
                continue
            arrival = self._feed.take(until)
            if arrival is None:
                return
            arrived, index = arrival
            self.now = max(self.now, arrived)
            self._submit(index, arrived)

    def _expire(self, name: str) -> None:
        if name in self._live:
            ended = self.core.abort(name, RequestError("deadline_exceeded", "its time is over"))
            assert ended, f"request {name} is live here only"
            self._early += ended

    def _submit(self, index: int, arrived: float) -> None:
        """What the asynchronous engine does with a request: check it, count it in or refuse it, queue it."""
        recorded = self._trace.requests[index]
        name = f"{index}"
        wanted = self._setup.max_tokens
        asked = recorded.output_tokens if wanted is None else max(wanted, recorded.output_tokens)
        params = SamplingParams(temperature=0.0, max_tokens=asked)
        begun = time.thread_time()
        try:
            request = Request(
                request_id=name,
                prompt_token_ids=cast("list[int]", TokenRuns(recorded.prompt)),
                params=params,
                seed=index,
                max_tokens=resolve_max_tokens(recorded.prompt_tokens, params, self._limits),
                tenant=recorded.tenant,
                priority=recorded.priority,
            )
            check_request(request, self._limits)
            request.arrived_at = self.now
            self._acceptance.accept(
                recorded.prompt_tokens,
                outlook=self._outlook,
                ahead=self._waiting.ahead_of(request) if self._outlook is not None else None,
                time_left_s=self._setup.ttl_s if self._setup.refuse_late else None,
            )
        except RequestError as error:
            self._recorder.refuse(error.code, arrived, self.now, time.thread_time() - begun)
            self._feed.ended(index, self.now)
            return
        self._live[name] = _Live(index, _tokens(recorded.output), arrived, request)
        self._waiting.add(request)
        self._early += self.core.add(request)
        if self._setup.ttl_s is not None:
            self._deadlines.append((arrived + self._setup.ttl_s, name))

    def _fold(self, outputs: list[SequenceOutput]) -> None:
        live = self._live
        if self._early:
            outputs = outputs + self._early
            self._early.clear()
        got = [live[output.request_id].index for output in outputs if output.token_ids]
        if got:
            self._recorder.tokens(got, self.now)
        for output in outputs:
            if output.started or output.final:
                started = live[output.request_id]
                if started.waits:
                    started.waits = False
                    self._acceptance.leave(len(started.request.prompt_token_ids))
                    self._waiting.remove(started.request)
            if output.final:
                self._end(output)

    def _end(self, output: SequenceOutput) -> None:
        ended = self._live.pop(output.request_id)
        metrics = output.metrics
        assert metrics is not None
        if metrics.preemptions:
            self._recorder.preempted(metrics.preempted_ms / 1000)
        if output.finish_reason == "error":
            assert output.error is not None
            at, tokens = ended.arrived + metrics.total_ms / 1000, len(ended.request.output_token_ids)
            self._recorder.fail(ended.index, output.error.code, at, tokens)
        else:
            first = None if metrics.ttft_ms is None else ended.arrived + metrics.ttft_ms / 1000
            self._recorder.cut_short += output.finish_reason == "length"
            self._recorder.end(ended.index, ended.arrived, ended.arrived + metrics.queue_ms / 1000, first, self.now)
        self._feed.ended(ended.index, self.now)


def _tokens(runs: tuple[tuple[int, int], ...]) -> range | list[int]:
    if len(runs) == 1:
        first, count = runs[0]
        return range(first, first + count)
    return list(TokenRuns(runs))
