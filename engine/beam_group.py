"""The beams of one request's search, as sequences of the scheduler."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pagemill.engine.beam import BeamSearch, FinishedBeam
from pagemill.engine.errors import RequestError
from pagemill.engine.logprobs import PositionLogprobs
from pagemill.engine.output_processor import OutputProcessor
from pagemill.engine.outputs import SequenceOutput
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduler_output import Sampled
from pagemill.engine.sequence_group import Group


class BeamGroup(Group):
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

    def processor(self, sequence: Request) -> OutputProcessor | None:
        return None  # a beam's text is told at the end

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
        own.tool_parser = self._first.tool_parser
        own.reasoning_parser = self._first.reasoning_parser
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
            reasoning_tokens=processor.reasoning_tokens,
        )

    def _release(self) -> None:
        for beam in self._beams:
            self._scheduler.finish(beam)
        self._beams = []


def _possible(tokens: list[int], logprobs: list[float]) -> tuple[list[int], list[float]]:
    """The offers that the request's rules allow: the likeliest ones, best first, may run into those they exclude."""
    count = len(logprobs)
    while count and logprobs[count - 1] == -math.inf:
        count -= 1
    return tokens[:count], logprobs[:count]
