"""The sequences of one request: one or several choices drawn from the same prompt, or the beams of a search.

A group turns what the runner sampled for its sequences into increments, forks them off their common prompt, and knows
when the request has ended. The scheduler sees only sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from pagemill.engine.beam import BeamSearch, FinishedBeam
from pagemill.engine.errors import RequestError
from pagemill.engine.logprobs import PositionLogprobs
from pagemill.engine.output_processor import OutputProcessor
from pagemill.engine.outputs import FinishReason, RequestMetrics, SequenceOutput
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduler import Scheduler
from pagemill.engine.scheduler_output import Sampled
from pagemill.engine.stopping import Finish
from pagemill.engine.tokenizer import Tokenizer

_COMPLETE = Finish("stop")  # a structured output is whole


class SequenceGroup(Protocol):
    """What the core needs of a request's sequences. Each call returns increments; the request is over when the last
    of them is `final`."""

    request_id: str

    def begin(self, resumed: Sequence[Sequence[int]]) -> list[SequenceOutput]:
        """Queue the first sequence, or one for each choice that goes on from tokens told already."""
        ...

    def advance(
        self, sequence: Request, sampled: Sampled | None, prompt_logprobs: Sequence[PositionLogprobs] = ()
    ) -> list[SequenceOutput]:
        """A step has computed tokens of `sequence`; `sampled` is None in mid-prompt."""
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


class _Group:
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
        self._all = [request]  # every sequence that ever ran for the request

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
            rules=origin.rules,
            logits_state=None if origin.logits_state is None else origin.logits_state.fork(),
        )
        self._all.append(fork)
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
        token_times = [s.first_token_at for s in self._all if s.first_token_at is not None]
        preempted = sum(s.preempted_ms for s in self._all)
        preempted += sum((now - s.preempted_at) * 1000 for s in self._all if s.preempted_at is not None)
        return RequestMetrics(
            queue_ms=(started - first.arrived_at) * 1000,
            ttft_ms=(min(token_times) - first.arrived_at) * 1000 if token_times else None,
            total_ms=(now - first.arrived_at) * 1000,
            preemptions=sum(s.num_preemptions for s in self._all),
            recomputed_tokens=sum(s.num_recomputed_tokens for s in self._all),
            swapped_blocks=sum(s.num_swapped_blocks for s in self._all),
            preempted_ms=preempted,
            cached_tokens=first.num_cached_tokens,
        )


class SamplingGroup(_Group):
    """`n` choices. The first computes the prompt; the others are forked from it when its first token is drawn."""

    def begin(self, resumed: Sequence[Sequence[int]]) -> list[SequenceOutput]:
        self._processors: dict[Request, OutputProcessor] = {}
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        if self._first.params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]  # nothing comes before the first token
        count = self._first.params.n
        told = [list(tokens) for tokens in resumed] or [self._first.output_token_ids]
        self._first.output_token_ids = told[0]
        if not any(told):
            self._first.seats = count
            refused = self._begin_states([self._first])
            if not refused:
                self._queue(self._first)
            return refused
        outputs: list[SequenceOutput] = []
        self._prompt_logprobs = None  # they came with the first token
        sequences = [self._first, *(self._fork(self._first, index) for index in range(1, count))]
        for sequence, tokens in zip(sequences, told, strict=True):
            sequence.output_token_ids = tokens
            sequence.num_told_logprobs = len(sequence.prompt_token_ids)
        refused = self._begin_states(sequences)
        if refused:
            return refused
        for sequence in sequences:
            self._queue(sequence)
        for sequence in sequences:
            finish = self._processors[sequence].finished
            if finish is None and sequence.logits_state is not None and sequence.logits_state.is_complete:
                self._processors[sequence].finish()
                finish = _COMPLETE
            if finish is not None:
                output = self._take(sequence, [])
                output.stop_reason = finish.stop_reason
                outputs.append(self._end(sequence, output, finish.reason))
            elif not self._scheduler.can_hold(sequence):
                # It grew in a larger pool than this one.
                outputs += self.outgrow(sequence)
        return outputs

    def advance(
        self, sequence: Request, sampled: Sampled | None, prompt_logprobs: Sequence[PositionLogprobs] = ()
    ) -> list[SequenceOutput]:
        if prompt_logprobs and self._prompt_logprobs is not None:
            self._prompt_logprobs += self._named(prompt_logprobs)
            sequence.num_told_logprobs = len(self._prompt_logprobs)
        if sampled is None:
            return [] if self._started else [self._start(self._place(sequence))]
        sequence.num_told_logprobs = len(sequence.prompt_token_ids)
        parts = [(sequence, sampled)]
        if sequence.seats > 1:
            parts = list(zip(self._fork_choices(sequence), _seats(sampled), strict=True))
        outputs: list[SequenceOutput] = []
        for each, part in parts:
            told = len(each.output_token_ids)
            try:
                outputs += self._extend(each, part)
            except Exception as exception:
                # Text handling and grammars are per request: whatever they trip over must not end the neighbours.
                del each.output_token_ids[told:]
                reason = f"decoding failed: {type(exception).__name__}: {exception}"
                outputs += self.abort(
                    exception if isinstance(exception, RequestError) else RequestError("engine_error", reason)
                )
            if outputs and outputs[-1].final:
                break
        if self._prompt_logprobs is not None and outputs:
            outputs[0].prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return outputs

    def _fork_choices(self, sequence: Request) -> list[Request]:
        sequences = [sequence]
        for index in range(1, sequence.seats):
            fork = self._fork(sequence, index)
            fork.num_told_logprobs = sequence.num_told_logprobs
            self._scheduler.fork(sequence, fork)
            self._processors[fork] = OutputProcessor(self._tokenizer, fork, self._eos_token_ids)
            sequences.append(fork)
        return sequences

    def end_step(self) -> list[SequenceOutput]:
        return []

    def outgrow(self, sequence: Request) -> list[SequenceOutput]:
        self._processors[sequence].finish()
        return [self._end(sequence, self._take(sequence, []), "length")]

    def abort(self, error: RequestError | None) -> list[SequenceOutput]:
        reason: FinishReason = "cancelled" if error is None else "error"
        outputs = []
        for sequence, processor in list(self._processors.items()):
            processor.finish()  # what was held back for a stop string is text after all
            outputs.append(self._end(sequence, self._take(sequence, []), reason))
        outputs[-1].error = error
        return outputs

    def _queue(self, sequence: Request) -> None:
        self._processors[sequence] = OutputProcessor(self._tokenizer, sequence, self._eos_token_ids)
        self._scheduler.add(sequence)

    def _extend(self, sequence: Request, sampled: Sampled) -> list[SequenceOutput]:
        """Take what was sampled, up to the token that ends the sequence."""
        taken: list[int] = []
        finish: Finish | None = None
        for token_id in sampled.tokens:
            if token_id < 0:
                break
            self._scheduler.append_token(sequence, token_id)
            taken.append(token_id)
            finish = self._take_token(sequence, token_id)
            if finish is not None:
                break
        if not taken:
            return self.abort(self._unusable(sequence))
        output = self._start(self._take(sequence, taken))
        if sampled.logprobs is not None:
            output.logprobs = self._named(sampled.logprobs[: len(taken)])
        if finish is not None:
            output.stop_reason = finish.stop_reason
            return [self._end(sequence, output, finish.reason)]
        if len(taken) < len(sampled.tokens):
            return [output, *self.abort(self._unusable(sequence))]
        return [output]

    def _take_token(self, sequence: Request, token_id: int) -> Finish | None:
        processor, state = self._processors[sequence], sequence.logits_state
        finish = processor.append(token_id)
        if state is not None and (finish is None or finish.reason == "length"):
            state.append(token_id)
            if state.is_complete:
                processor.finish()
                return _COMPLETE
        return finish

    def _named(self, positions: Sequence[PositionLogprobs]) -> list[PositionLogprobs]:
        """The positions with the bytes of their tokens."""
        if self._tokenizer is not None:
            pieces = self._tokenizer.token_bytes
            for position in positions:
                for token in position.tokens():
                    token.piece = pieces[token.token_id]
        return list(positions)

    def _place(self, sequence: Request) -> SequenceOutput:
        """An increment without tokens."""
        return SequenceOutput(
            self.request_id,
            sequence.index,
            offset=len(sequence.output_token_ids),
            text_offset=self._processors[sequence].text_length,
        )

    def _take(self, sequence: Request, token_ids: list[int]) -> SequenceOutput:
        processor = self._processors[sequence]
        text_offset = processor.text_length
        return SequenceOutput(
            self.request_id,
            sequence.index,
            offset=len(sequence.output_token_ids) - len(token_ids),
            token_ids=token_ids,
            text=processor.take_text(),
            text_offset=text_offset,
        )

    def _end(self, sequence: Request, output: SequenceOutput, reason: FinishReason) -> SequenceOutput:
        self._scheduler.finish(sequence, ended=reason == "stop")
        del self._processors[sequence]
        output.finish_reason = reason
        if not self._processors:
            output.final = True
            output.metrics = self._metrics()
        return output


class BeamGroup(_Group):
    """A beam search. Beams move in step and are reserved, so all of them report in every step; tokens are told at the
    end, since until then any beam may still be dropped."""

    def begin(self, resumed: Sequence[Sequence[int]]) -> list[SequenceOutput]:
        first = self._first
        params = first.params
        ends = () if params.ignore_eos else self._eos_token_ids
        self._search = BeamSearch(
            params.beam_width,
            sorted({*ends, *(params.stop_token_ids or ())}),
            first.max_tokens,
            params.length_penalty,
            params.early_stopping,
        )
        # Nothing of a search was told before its end: another engine starts it over.
        first.output_token_ids = []
        first.seats = params.beam_width
        first.top = self._search.num_offers
        first.is_reserved = True
        self._beams = [first]
        self._offers: dict[Request, tuple[list[int], list[float]]] = {}
        refused = self._begin_states([first])
        if not refused:
            self._scheduler.add(first)
        return refused

    def advance(
        self, sequence: Request, sampled: Sampled | None, prompt_logprobs: Sequence[PositionLogprobs] = ()
    ) -> list[SequenceOutput]:
        if sampled is not None:
            assert sampled.top_logprobs is not None
            if not sampled.tokens or sampled.tokens[0] < 0:
                return self.abort(self._unusable(sequence))
            self._offers[sequence] = _possible(sampled.tokens, sampled.top_logprobs)
        return [] if self._started else [self._start(SequenceOutput(self.request_id))]

    def end_step(self) -> list[SequenceOutput]:
        if not self._offers:
            return []
        assert len(self._offers) == len(self._beams), "beams are out of step"
        offers = [self._offers[beam] for beam in self._beams]
        self._offers = {}
        steps = self._search.advance([beam.output_token_ids for beam in self._beams], offers)
        if not steps:
            return self._tell()
        beams: list[Request] = []
        survivors: list[tuple[Request, Request | None]] = []
        continued: set[Request] = set()
        for step in steps:
            parent = self._beams[step.parent]
            fork = self._fork(parent, 0) if parent in continued else None
            continued.add(parent)
            survivors.append((parent, fork))
            beams.append(parent if fork is None else fork)
        self._scheduler.replace(self._beams, survivors)
        self._beams = beams
        for beam, step in zip(beams, steps, strict=True):
            self._scheduler.append_token(beam, step.token_id)
            if beam.logits_state is not None:
                try:
                    beam.logits_state.append(step.token_id)
                except RequestError as error:
                    return self.abort(error)
        return []

    def outgrow(self, sequence: Request) -> list[SequenceOutput]:
        self._search.give_up([beam.output_token_ids for beam in self._beams])
        return self._tell()

    def abort(self, error: RequestError | None) -> list[SequenceOutput]:
        self._release()
        output = SequenceOutput(self.request_id, error=error, finish_reason="cancelled" if error is None else "error")
        output.final, output.metrics = True, self._metrics()
        return [output]

    def _tell(self) -> list[SequenceOutput]:
        """The best beams as choices, best first."""
        best = self._search.best(self._first.params.n)
        outputs = [self._choice(index, beam) for index, beam in enumerate(best)]
        self._release()
        outputs[-1].final, outputs[-1].metrics = True, self._metrics()
        return outputs

    def _choice(self, index: int, beam: FinishedBeam) -> SequenceOutput:
        params = SamplingParams(
            skip_special_tokens=self._first.params.skip_special_tokens, max_tokens=len(beam.token_ids), ignore_eos=True
        )
        own = Request(self.request_id, self._first.prompt_token_ids, params, 0, len(beam.token_ids), index=index)
        processor = OutputProcessor(self._tokenizer, own, ())
        shown = beam.token_ids[:-1] if beam.ended else beam.token_ids
        for token_id in shown:
            processor.append(token_id)
        processor.finish()
        last = beam.token_ids[-1]
        return SequenceOutput(
            self.request_id,
            index,
            token_ids=beam.token_ids,
            text=processor.take_text(),
            finish_reason="stop" if beam.ended else "length",
            stop_reason=last if beam.ended and last not in self._eos_token_ids else None,
            cumulative_logprob=beam.logprob,
        )

    def _release(self) -> None:
        for beam in self._beams:
            self._scheduler.finish(beam)
        self._beams = []


def _seats(sampled: Sampled) -> list[Sampled]:
    """One token for each choice that begins."""
    logprobs = sampled.logprobs
    return [
        Sampled([token_id], logprobs=None if logprobs is None else [logprobs[seat]])
        for seat, token_id in enumerate(sampled.tokens)
    ]


def _possible(tokens: list[int], logprobs: list[float]) -> tuple[list[int], list[float]]:
    """The offers that the request's rules allow: the likeliest ones, best first, may run into those they exclude."""
    count = len(logprobs)
    while count and logprobs[count - 1] == -math.inf:
        count -= 1
    return tokens[:count], logprobs[:count]
