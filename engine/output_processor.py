"""From sampled token ids to final text and an end, for one sequence. State is a function of the tokens alone, so a
sequence that another engine began goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagemill.engine.detokenizer import Detokenizer
from pagemill.engine.errors import invalid
from pagemill.engine.harmony import HarmonyReader
from pagemill.engine.reasoning import ReasoningReader, reasoning_reader
from pagemill.engine.request import Request
from pagemill.engine.stopping import Finish, StopChecker, StopStrings
from pagemill.engine.tokenizer import Tokenizer


class OutputProcessor:
    """Feed it every token with `append`, ask for text with `take_text`.

    Text is final when no later token can change it: whole characters that begin no stop string. What ends a sequence,
    a stop string or the text of a token that ends it by its id, becomes text only with include_stop_str_in_output, and
    what follows it never. A stop string that is a special token's name ends the sequence at that token also where
    skip_special_tokens keeps it out of the text. Without a tokenizer the text stays empty.

    Made for a request that already has `output_token_ids`, it is in the state of the processor that saw those tokens
    and whose text was taken: `text_length` says how much. `finished` is set if they already ended the sequence.
    `reasoning_tokens`: how many of the tokens are reasoning, its markers with them.

    Raises `invalid_request` where stop strings are asked for and there is no tokenizer to find them with.
    """

    __slots__ = (
        "_checker",
        "_detokenizer",
        "_ends",
        "_flushed",
        "_include_stop",
        "_last",
        "_passes",
        "_ready",
        "_reasoning",
        "_stop_names",
        "_stops",
        "_tail",
        "_texts",
        "finished",
        "num_tokens",
        "reasoning_tokens",
        "text_length",
    )

    def __init__(self, tokenizer: Tokenizer | None, request: Request, eos_token_ids: Sequence[int]) -> None:
        params = request.params
        if params.stop and tokenizer is None:
            raise invalid("stop strings need a tokenizer, and this engine runs without one", "stop")
        self._checker = StopChecker(params, request.max_tokens, eos_token_ids)
        self.num_tokens = 0
        """How many it was fed."""
        self._detokenizer = (
            Detokenizer(
                tokenizer,
                request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                kept=tokenizer.marker_ids(request.tool_parser, request.reasoning_parser),
            )
            if tokenizer is not None
            else None
        )
        self._reasoning = None if request.reasoning_parser is None else reasoning_reader(request.reasoning_parser)
        self.reasoning_tokens = 0
        self._stops = StopStrings(tuple(params.stop)) if params.stop else None
        self._stop_names: dict[int, str] = {}
        if params.stop and tokenizer is not None and params.skip_special_tokens:
            named = ((tokenizer.special_token_ids.get(stop), stop) for stop in params.stop)
            self._stop_names = {token_id: stop for token_id, stop in named if token_id is not None}
        self._include_stop = params.include_stop_str_in_output
        self._ready: list[str] = []
        self._tail = ""
        self.text_length = 0
        """Characters that `take_text` has returned so far."""
        self._flushed = False
        self.finished: Finish | None = None
        # What `pass_on` reads, and nothing else: a token is looked at in fewer places than it has to be understood in.
        self._ends, self._last = self._checker.ends, request.max_tokens - 1
        self._texts: Mapping[int, str] = self._detokenizer.texts if self._detokenizer is not None else {}
        self._passes = False
        for token_id in request.output_token_ids:
            if self.append(token_id) is not None:
                break
        self.take_text()

    def append(self, token_id: int) -> Finish | None:
        """Add the next token; return the end of the sequence if this token brings it. Then its text is complete."""
        assert self.finished is None, "a token after the end"
        self._passes = False
        self.num_tokens += 1
        finish = self._checker.end(token_id, self.num_tokens)
        if self._detokenizer is not None and (finish is None or self._include_stop):
            text = self._detokenizer.append(token_id)
            if self._reasoning is not None:
                self._count(self._reasoning, text)
            finish = self._add_text(text) or finish
        if finish is None and token_id in self._stop_names and self._checker.may_stop(self.num_tokens):
            finish = Finish("stop", self._stop_names[token_id])
        if finish is None and self.num_tokens >= self._checker.max_tokens:
            finish = Finish("length")
        if finish is not None:
            finish = self._flush() or finish
            self.finished = finish
        return finish

    def pass_on(self, token_id: int) -> str | None:
        """`append` and `take_text` in one, for a token that is text by itself and can be no end, in a text that nothing
        is looked for in: what most are. None, and nothing has happened, where it may be something else, or is -1."""
        if not self._passes or token_id < 0 or token_id in self._ends or self.num_tokens >= self._last:
            return None
        text = self._texts.get(token_id)  # only looked up: what is not known yet `append` works out
        if not text:
            return None
        self.num_tokens += 1
        self.text_length += len(text)
        return text

    def take_text(self) -> str:
        """The characters that have become final since the last call."""
        text = "".join(self._ready)
        self._ready.clear()
        self.text_length += len(text)
        detokenizer = self._detokenizer
        self._passes = (
            detokenizer is not None and detokenizer.is_between and self._stops is None and self._reasoning is None
        )
        return text

    def finish(self) -> None:
        """End the text from outside (a cancelled request): what was held back becomes final. May be called twice."""
        self._flush()

    def _count(self, reasoning: ReasoningReader | HarmonyReader, text: str) -> None:
        """Count the last token, which brought this text, if it is reasoning."""
        was_inside = reasoning.is_inside
        reasoning.feed(text)
        if was_inside or reasoning.is_inside:
            self.reasoning_tokens = self.num_tokens
        if reasoning.is_over:
            self._reasoning = None

    def _flush(self) -> Finish | None:
        """Release held text; the replacement character of half a character may complete a stop string."""
        if self._flushed:
            return None
        finish = self._add_text(self._detokenizer.flush()) if self._detokenizer is not None else None
        self._flushed = True
        if self._tail:
            self._ready.append(self._tail)
            self._tail = ""
        return finish

    def _add_text(self, text: str) -> Finish | None:
        if not text or self._flushed:
            return None
        if self._stops is None:
            self._ready.append(text)
            return None
        match = self._stops.feed(text, counts=self._checker.may_stop(self.num_tokens))
        if match is not None:
            text = self._tail + text[: match.end]
            self._ready.append(text if self._include_stop else text[: len(text) - len(match.stop)])
            self._tail = ""
            self._flushed = True
            return Finish("stop", match.stop)
        text = self._tail + text
        held = 0 if self._include_stop else self._stops.held
        self._tail = text[len(text) - held :]
        self._ready.append(text[: len(text) - held])
        return None
