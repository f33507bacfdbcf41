"""The step loop's body: schedule, run, commit, and turn sampled tokens into text and endings.

`EngineCore` is single-threaded and knows neither asyncio nor Redis. What goes wrong because of one request ends that
request alone; an exception of the runner means that the device failed, and passes through to whoever drives the loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pagemill.engine.beam_group import BeamGroup
from pagemill.engine.errors import RequestError
from pagemill.engine.output_processor import OutputProcessor
from pagemill.engine.outputs import SequenceOutput
from pagemill.engine.request import Request, RequestStatus
from pagemill.engine.sampling_group import SamplingGroup
from pagemill.engine.scheduler import Scheduler
from pagemill.engine.scheduler_output import Sampled, ScheduledSequence, SchedulerOutput, StepResult
from pagemill.engine.sequence_group import SequenceGroup
from pagemill.engine.tokenizer import Tokenizer

PREFILL_STEP = 64  # tokens beside one for each sequence, from which on a step's time is the tokens', not the step's own


class Runner(Protocol):
    """Whatever can compute a step: the model, or an invented one in the scheduler's tests."""

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Make the step's block moves in order, then compute it."""
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
        self._groups: dict[str, SequenceGroup] = {}
        self._processors: dict[Request, OutputProcessor] = {}  # of sequences that have been told a token
        self.step_tokens = 0  # of the step that is computed now, or of the last one

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests

    def add(self, request: Request, resumed: Sequence[Sequence[int]] = ()) -> list[SequenceOutput]:
        """Queue a request. `resumed`: what each of several choices has generated and told already.

        Where that is complete, its end comes back at once.
        """
        assert request.request_id not in self._groups, f"request {request.request_id} is live already"
        kind = BeamGroup if request.params.uses_beams else SamplingGroup
        group = kind(request, self.scheduler, self._tokenizer, self._eos_token_ids, self._clock)
        self._groups[request.request_id] = group
        return self._collect(group, group.begin(resumed))

    def abort(self, request_id: str, error: RequestError | None = None) -> list[SequenceOutput]:
        """End a live request, with "error" where one is given, else "cancelled". Empty: it is not live (any more)."""
        group = self._groups.get(request_id)
        return [] if group is None else self._collect(group, group.abort(error))

    def step(self) -> list[SequenceOutput]:
        """Run one step and return what it brought, in batch order."""
        output = self.scheduler.schedule()
        results: list[SequenceOutput] = []
        for request in output.outgrown:
            outgrown = self._groups.get(request.request_id)
            if outgrown is not None:  # one outgrown beam ends them all
                results += self._collect(outgrown, outgrown.outgrow(request))
        if not output.scheduled and not output.moves:
            self.scheduler.commit(output)
            return results
        self.step_tokens = output.num_tokens
        before = self._clock()
        result = self._runner.execute(output)
        seconds = self._clock() - before
        if not output.moves:
            self.scheduler.observe(output, seconds)
        if output.moves or output.num_tokens - len(output.scheduled) >= PREFILL_STEP:
            self._observe(output, result, seconds)
        self.scheduler.commit(output, result.sampled)
        if result.drawn is not None:
            self._pass_on(output.scheduled, result.drawn, results)
            return results
        sampled = iter(result.sampled)
        touched: dict[SequenceGroup, list[SequenceOutput]] = {}
        groups, prompt_logprobs = self._groups, result.prompt_logprobs
        for place, item in enumerate(output.scheduled):
            request = item.request
            mine = next(sampled) if item.samples else None
            found = groups.get(request.request_id)
            if found is None or request.status is RequestStatus.FINISHED:
                continue
            outputs = found.advance(request, mine, prompt_logprobs.get(place, ()) if prompt_logprobs else ())
            if found in touched:
                touched[found] += outputs
            else:
                touched[found] = outputs
        for group, outputs in touched.items():
            outputs += group.end_step()
            results += self._collect(group, outputs)
        return results

    def _pass_on(
        self, scheduled: Sequence[ScheduledSequence], drawn: Sequence[int], results: list[SequenceOutput]
    ) -> None:
        """A step of which nothing was wanted but one token for each sequence that is done with its prompt. Most are
        such, and most of these tokens are text and no end; the group learns of the others."""
        processors, finished, place = self._processors, RequestStatus.FINISHED, 0
        append_token = self.scheduler.append_token
        for item in scheduled:
            request, token_id = item.request, None
            if item.samples:
                token_id = drawn[place]
                place += 1
            if request.status is finished:
                continue
            processor = processors.get(request)
            if processor is not None and token_id is not None:
                text_offset = processor.text_length
                text = processor.pass_on(token_id)
                if text is not None:
                    offset = len(request.output_token_ids)
                    append_token(request, token_id)
                    results.append(
                        SequenceOutput(
                            request.request_id,
                            request.index,
                            offset,
                            [token_id],
                            text,
                            text_offset,
                            reasoning_tokens=processor.reasoning_tokens,
                        )
                    )
                    continue
            results += self._advance(request, token_id)

    def _advance(self, request: Request, token_id: int | None) -> list[SequenceOutput]:
        group = self._groups.get(request.request_id)
        if group is None:
            return []
        outputs = group.advance(request, None if token_id is None else Sampled([token_id]))
        outputs = self._collect(group, [*outputs, *group.end_step()])
        processor = group.processor(request)
        if token_id is not None and processor is not None and request.status is not RequestStatus.FINISHED:
            self._processors[request] = processor
        return outputs

    def check(self) -> None:
        """Assert the invariants of everything below, and that no finished request is remembered."""
        self.scheduler.check()
        live = {request.request_id for request in self.scheduler.requests()}
        assert set(self._groups) == live, "a finished request is remembered"
        assert {sequence.request_id for sequence in self._processors} <= live, "a finished sequence is remembered"

    def _collect(self, group: SequenceGroup, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        if outputs and outputs[-1].final:
            del self._groups[group.request_id]
            for sequence in group.sequences:
                self._processors.pop(sequence, None)
        return outputs

    def _observe(self, output: SchedulerOutput, result: StepResult, seconds: float) -> None:
        """Learn what computing and moving cost here."""
        cost = self.scheduler.preemption.cost
        if result.copy_s > 0 and any(move.kind != "copy" for move in output.moves):
            cost.observe_moves(len(output.moves), result.copy_s)
        if output.num_tokens - len(output.scheduled) >= PREFILL_STEP and seconds > result.copy_s:
            cost.observe_tokens(output.num_tokens, seconds - result.copy_s)
