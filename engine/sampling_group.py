"""One or several choices drawn from the same prompt."""

from __future__ import annotations

from collections.abc import Sequence

from pagemill.engine.errors import RequestError
from pagemill.engine.logprobs import PositionLogprobs
from pagemill.engine.output_processor import OutputProcessor
from pagemill.engine.outputs import FinishReason, SequenceOutput
from pagemill.engine.request import Request
from pagemill.engine.scheduler_output import Sampled
from pagemill.engine.sequence_group import Group
from pagemill.engine.stopping import Finish

_COMPLETE = Finish("stop")  # a structured output is whole


class SamplingGroup(Group):
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
        if self._prompt_logprobs is None and sequence.seats == 1:
            return self._tell(sequence, sampled)
        sequence.num_told_logprobs = len(sequence.prompt_token_ids)
        parts = [(sequence, sampled)]
        if sequence.seats > 1:
            parts = list(zip(self._fork_choices(sequence), _seats(sampled), strict=True))
        outputs: list[SequenceOutput] = []
        for each, part in parts:
            outputs += self._tell(each, part)
            if outputs and outputs[-1].final:
                break
        if self._prompt_logprobs is not None and outputs:
            outputs[0].prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return outputs

    def processor(self, sequence: Request) -> OutputProcessor | None:
        return self._processors.get(sequence)

    def _tell(self, sequence: Request, sampled: Sampled) -> list[SequenceOutput]:
        told = len(sequence.output_token_ids)
        try:
            return self._extend(sequence, sampled)
        except Exception as exception:
            # Text handling and grammars are per request: whatever they trip over must not end the neighbours.
            del sequence.output_token_ids[told:]
            reason = f"decoding failed: {type(exception).__name__}: {exception}"
            return self.abort(
                exception if isinstance(exception, RequestError) else RequestError("engine_error", reason)
            )

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
            reasoning_tokens=processor.reasoning_tokens,
        )

    def _end(self, sequence: Request, output: SequenceOutput, reason: FinishReason) -> SequenceOutput:
        self._scheduler.finish(sequence, ended=reason == "stop")
        del self._processors[sequence]
        output.finish_reason = reason
        if not self._processors:
            output.final = True
            output.metrics = self._metrics()
        return output


def _seats(sampled: Sampled) -> list[Sampled]:
    """One token for each choice that begins."""
    logprobs = sampled.logprobs
    return [
        Sampled([token_id], logprobs=None if logprobs is None else [logprobs[seat]])
        for seat, token_id in enumerate(sampled.tokens)
    ]
