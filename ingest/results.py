"""What a reader of a request gets: deltas while it runs, a result at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from pagemill.engine.answer_reader import AnswerReader
from pagemill.engine.errors import ErrorCode, RequestError
from pagemill.engine.reasoning import ReasoningParserName
from pagemill.engine.tool_calls import ToolParserName
from pagemill.ingest.events import Transcript


@dataclass(frozen=True, slots=True)
class Delta:
    """New final text of a choice, and the tokens it came from. Offsets count characters and tokens before it.

    `logprobs`: where they were asked for, one entry of OpenAI's `logprobs.content` for each token, with its `token_id`.
    """

    text: str
    token_ids: list[int]
    index: int
    offset: int
    text_offset: int
    seq: int
    logprobs: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice. `logprobs` as in `Delta`; `prompt_logprobs` has one for each prompt token, none for the
    first, and only the first choice has it. `tool_parser`, `reasoning_parser`: how calls of tools and the model's
    reasoning are written in the text, where there may be some; `pagemill.engine.answer_reader` reads them both."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[dict[str, Any]] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    tool_parser: ToolParserName | None = None
    reasoning_parser: ReasoningParserName | None = None

    @property
    def reasoning(self) -> str:
        """What a model that thinks first has thought; empty where there is nothing of it in the text."""
        return self._parts(is_reasoning=True)

    @property
    def answer(self) -> str:
        """The text without the reasoning, calls of tools as they were written."""
        return self.text if self.reasoning_parser is None else self._parts(is_reasoning=False)

    def _parts(self, *, is_reasoning: bool) -> str:
        pieces = AnswerReader(self.reasoning_parser, None, None).read(self.text)
        return "".join(piece.text for piece in pieces if piece.is_reasoning is is_reasoning)


@dataclass(frozen=True, slots=True)
class Result:
    """How a request ended. `usage` counts tokens, `metrics` are ms and counts; `error` is None where it completed."""

    request_id: str
    state: str
    choices: list[Choice]
    usage: Mapping[str, int]
    metrics: Mapping[str, Any]
    error: Mapping[str, Any] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text if self.choices else ""

    @property
    def answer(self) -> str:
        """Text of the first choice without the reasoning that a model may have written in front of it."""
        return self.choices[0].answer if self.choices else ""

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first choice."""
        return self.choices[0].token_ids if self.choices else []

    @property
    def finish_reason(self) -> str | None:
        """Why the first choice ended."""
        return self.choices[0].finish_reason if self.choices else None


class RequestFailed(RequestError):
    """A request that did not complete: rejected, failed, expired or cancelled. `result` has what there is."""

    def __init__(self, result: Result) -> None:
        error = result.error or {}
        code: ErrorCode = error.get("code", "engine_error")
        super().__init__(
            code,
            error.get("message", f"the request ended as {result.state}"),
            param=error.get("param"),
            retry_after_ms=error.get("retry_after_ms"),
        )
        self.result = result

    def __reduce__(self) -> tuple[type[RequestFailed], tuple[Result]]:
        return type(self), (self.result,)  # job queues pickle exceptions


def result_of(request_id: str, transcript: Transcript) -> Result:
    """The result that a transcript up to and with `done` tells."""
    done = transcript.done
    assert done is not None
    return Result(
        request_id=request_id,
        state=done["state"],
        choices=[Choice(**choice) for choice in transcript.result()],
        usage=done["usage"],
        metrics=done["metrics"],
        error=done.get("error"),
        metadata=done.get("metadata") or {},
    )


def refused_result(request_id: str, error: bytes | None) -> Result:
    """The result of a request that the queue did not take; `error` is JSON."""
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
    return Result(request_id, "rejected", [], usage, {"attempts": 0}, orjson.loads(error or b"{}"))
