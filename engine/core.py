"""The step loop's body: schedule, run, commit, and turn sampled tokens into text and endings.

`EngineCore` is single-threaded and knows neither asyncio nor Redis. What goes wrong because of one request ends that
request alone; an exception of the runner means that the device failed, and passes through to whoever drives the loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pagemill.engine.errors import RequestError
from pagemill.engine.output_processor import OutputProcessor
from pagemill.engine.outputs import FinishReason, RequestMetrics, SequenceOutput
from pagemill.engine.request import Request
from pagemill.engine.scheduler import Scheduler
from pagemill.engine.scheduler_output import SchedulerOutput
from pagemill.engine.tokenizer import Tokenizer


class Runner(Protocol):
    """Whatever can compute a step: the model, or an invented one in the scheduler's tests."""

    def execute(self, output: SchedulerOutput) -> list[int]:
        """Compute the step. Returns one sampled token id for each item with `samples`, in order; -1 where the row's
        logits were unusable."""
        ...


class EngineCore:
    """Requests in, `SequenceOutput` increments out, one step at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer | None,
        eos_token_ids: Sequence[int],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._processors: dict[str, OutputProcessor] = {}
        self._started: set[str] = set()

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests

    def add(self, request: Request) -> list[SequenceOutput]:
        """Queue a request. Where what was resumed is complete already, its end comes back at once."""
        processor = OutputProcessor(self._tokenizer, request, self._eos_token_ids)
        self.scheduler.add(request)
        self._processors[request.request_id] = processor
        finish = processor.finished
        if finish is None:
            return []
        output = self._take(request)
        output.stop_reason = finish.stop_reason
        return [self._end(request, output, finish.reason)]

    def abort(self, request_id: str, error: RequestError | None = None) -> SequenceOutput | None:
        """End a live request, with "error" where one is given, else "cancelled". None: it is not live (any more)."""
        request = self.scheduler.get(request_id)
        if request is None:
            return None
        output = SequenceOutput(request_id, error=error)
        self._place(request, output)
        return self._end(request, output, "cancelled" if error is None else "error")

    def step(self) -> list[SequenceOutput]:
        """Run one step and return what it brought, in batch order."""
        output = self.scheduler.schedule()
        results: list[SequenceOutput] = []
        for request in output.outgrown:
            self._processors[request.request_id].finish()
            results.append(self._end(request, self._take(request), "length"))
        sampled = self._runner.execute(output) if output.scheduled else []
        self.scheduler.commit(output)
        tokens = iter(sampled)
        for item in output.scheduled:
            token_id = next(tokens) if item.samples else None
            if item.request.is_finished:
                continue
            result = self._advance(item.request, token_id)
            if result is not None:
                results.append(result)
        return results

    def check(self) -> None:
        """Assert the invariants of everything below, and that no finished request is remembered."""
        self.scheduler.check()
        live = {request.request_id for request in self.scheduler.requests()}
        assert set(self._processors) == live, "a finished request is remembered"
        assert self._started <= live

    # -- one request ---------------------------------------------------------------------------------------------

    def _advance(self, request: Request, token_id: int | None) -> SequenceOutput | None:
        started = request.request_id not in self._started
        if token_id is None:
            if not started:
                return None
            self._started.add(request.request_id)
            output = SequenceOutput(request.request_id, started=True)
            self._place(request, output)
            return output
        self._started.add(request.request_id)
        if token_id < 0:
            error = RequestError("engine_error", "the model's output for this request is not a number")
            return self.abort(request.request_id, error)
        self.scheduler.append_token(request, token_id)
        try:
            finish = self._processors[request.request_id].append(token_id)
            output = self._take(request, [token_id])
        except Exception as exception:
            # Text handling is per request: whatever it trips over must not end the neighbours. The token was not told.
            request.output_token_ids.pop()
            error = RequestError("engine_error", f"decoding failed: {type(exception).__name__}: {exception}")
            return self.abort(request.request_id, error)
        output.started = started
        if finish is not None:
            output.stop_reason = finish.stop_reason
            return self._end(request, output, finish.reason)
        return output

    def _place(self, request: Request, output: SequenceOutput) -> None:
        """Say where an output without tokens stands."""
        output.offset = len(request.output_token_ids)
        output.text_offset = self._processors[request.request_id].text_length

    def _take(self, request: Request, token_ids: list[int] | None = None) -> SequenceOutput:
        processor = self._processors[request.request_id]
        tokens = token_ids or []
        text_offset = processor.text_length
        return SequenceOutput(
            request.request_id,
            offset=len(request.output_token_ids) - len(tokens),
            token_ids=tokens,
            text=processor.take_text(),
            text_offset=text_offset,
        )

    def _end(self, request: Request, output: SequenceOutput, reason: FinishReason) -> SequenceOutput:
        self.scheduler.finish(request)
        del self._processors[request.request_id]
        self._started.discard(request.request_id)
        output.finish_reason = reason
        output.metrics = self._metrics(request)
        return output

    def _metrics(self, request: Request) -> RequestMetrics:
        now = self._clock()
        started = request.started_at if request.started_at is not None else now
        first = request.first_token_at
        preempted = request.preempted_ms
        if request.preempted_at is not None:
            preempted += (now - request.preempted_at) * 1000
        return RequestMetrics(
            queue_ms=(started - request.arrived_at) * 1000,
            ttft_ms=None if first is None else (first - request.arrived_at) * 1000,
            total_ms=(now - request.arrived_at) * 1000,
            preemptions=request.num_preemptions,
            recomputed_tokens=request.num_recomputed_tokens,
            preempted_ms=preempted,
            cached_tokens=request.num_cached_tokens,
        )
