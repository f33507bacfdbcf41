"""What the core asks of the sequences of one request, and what both kinds of them share.

A group turns what the runner sampled for its sequences into increments, forks them off their common prompt, and knows
when the request has ended. The scheduler sees only sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pagemill.engine.errors import RequestError
from pagemill.engine.logprobs import PositionLogprobs
from pagemill.engine.output_processor import OutputProcessor
from pagemill.engine.outputs import RequestMetrics, SequenceOutput
from pagemill.engine.request import Request
from pagemill.engine.scheduler import Scheduler
from pagemill.engine.scheduler_output import Sampled
from pagemill.engine.tokenizer import Tokenizer


class SequenceGroup(Protocol):
    """What the core needs of a request's sequences. Each call returns increments; the request is over when the last
    of them is `final`."""

    request_id: str
    sequences: list[Request]
    """Every one that ever ran for the request."""

    def begin(self, resumed: Sequence[Sequence[int]]) -> list[SequenceOutput]:
        """Queue the first sequence, or one for each choice that goes on from tokens told already."""
        ...

    def advance(
        self, sequence: Request, sampled: Sampled | None, prompt_logprobs: Sequence[PositionLogprobs] = ()
    ) -> list[SequenceOutput]:
        """A step has computed tokens of `sequence`; `sampled` is None in mid-prompt."""
        ...

    def processor(self, sequence: Request) -> OutputProcessor | None:
        """What turns the tokens of `sequence`, which has been told some, into text. Where it lets one pass on, an
        increment of this token and its text is all there is to tell."""
        ...

    def end_step(self) -> list[SequenceOutput]:
        """All sequences of the step have been told."""
        ...

    def outgrow(self, sequence: Request) -> list[SequenceOutput]:
        """The pool has no more room for `sequence`, which the scheduler has ended."""
        ...

    def abort(self, error: RequestError | None) -> list[SequenceOutput]:
        """End everything."""
        ...


class Group:
    """What both kinds share: the bill, and the first increment's `started`."""

    def __init__(
        self,
        request: Request,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        eos_token_ids: Sequence[int],
        clock: Callable[[], float],
    ) -> None:
        self.request_id = request.request_id
        self._first = request
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._started = False
        self.sequences = [request]

    def _start(self, output: SequenceOutput) -> SequenceOutput:
        output.started, self._started = not self._started, True
        return output

    def _fork(self, origin: Request, index: int) -> Request:
        fork = Request(
            request_id=origin.request_id,
            prompt_token_ids=origin.prompt_token_ids,
            params=origin.params,
            seed=origin.seed,
            max_tokens=origin.max_tokens,
            tenant=origin.tenant,
            cache_salt=origin.cache_salt,
            priority=origin.priority,
            index=index,
            top=origin.top,
            output_token_ids=list(origin.output_token_ids),
            tool_parser=origin.tool_parser,
            reasoning_parser=origin.reasoning_parser,
            rules=origin.rules,
            logits_state=None if origin.logits_state is None else origin.logits_state.fork(),
        )
        self.sequences.append(fork)
        return fork

    def _begin_states(self, sequences: Sequence[Request]) -> list[SequenceOutput]:
        """What the tokens that the sequences have mean for their next logits. Where they cannot go on from these, the
        request's only increment, which says so."""
        try:
            for sequence in sequences:
                if sequence.rules is not None:
                    sequence.logits_state = sequence.rules.begin(sequence.prompt_token_ids, sequence.output_token_ids)
        except RequestError as error:
            self._first.arrived_at = self._clock()
            refused = SequenceOutput(self.request_id, finish_reason="error", error=error)
            refused.final, refused.metrics = True, self._metrics()
            return [refused]
        return []

    def _unusable(self, sequence: Request) -> RequestError:
        if sequence.logits_state is not None and sequence.logits_state.failure is not None:
            return sequence.logits_state.failure
        if self._first.rules is None:
            return RequestError("engine_error", "the model's output for this request is not a number")
        return RequestError(
            "engine_error",
            "no token can be sampled: the request's own rules (allowed_token_ids, bad_words, min_tokens, structured "
            "output) leave none, or the model's output is not a number",
        )

    def _metrics(self) -> RequestMetrics:
        now = self._clock()
        first = self._first
        started = first.started_at if first.started_at is not None else now
        token_times = [s.first_token_at for s in self.sequences if s.first_token_at is not None]
        preempted = sum(s.preempted_ms for s in self.sequences)
        preempted += sum((now - s.preempted_at) * 1000 for s in self.sequences if s.preempted_at is not None)
        return RequestMetrics(
            queue_ms=(started - first.arrived_at) * 1000,
            ttft_ms=(min(token_times) - first.arrived_at) * 1000 if token_times else None,
            total_ms=(now - first.arrived_at) * 1000,
            preemptions=sum(s.num_preemptions for s in self.sequences),
            recomputed_tokens=sum(s.num_recomputed_tokens for s in self.sequences),
            swapped_blocks=sum(s.num_swapped_blocks for s in self.sequences),
            preempted_ms=preempted,
            cached_tokens=first.num_cached_tokens,
            draft_tokens=sum(s.num_draft_tokens for s in self.sequences),
            accepted_tokens=sum(s.num_accepted_tokens for s in self.sequences),
        )
