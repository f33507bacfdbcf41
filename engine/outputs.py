"""What the engine gives back: increments while a request runs, and vLLM's output objects when it is done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pagemill.engine.errors import RequestError
from pagemill.engine.logprobs import Logprob, PositionLogprobs

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """What serving one request took, preemption included. Times in ms, counts in tokens or blocks.

    `draft_tokens`: guessed and computed, of which `accepted_tokens` were right.
    """

    queue_ms: float = 0.0
    ttft_ms: float | None = None
    total_ms: float = 0.0
    preemptions: int = 0
    recomputed_tokens: int = 0
    swapped_blocks: int = 0
    preempted_ms: float = 0.0
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "queue_ms": round(self.queue_ms, 3),
            "ttft_ms": None if self.ttft_ms is None else round(self.ttft_ms, 3),
            "total_ms": round(self.total_ms, 3),
            "preemptions": self.preemptions,
            "recomputed_tokens": self.recomputed_tokens,
            "swapped_blocks": self.swapped_blocks,
            "preempted_ms": round(self.preempted_ms, 3),
        }


@dataclass(slots=True)
class SequenceOutput:
    """One increment of one choice of a request.

    `offset`: tokens generated before this increment; `text_offset`: characters of final text before it. `text` never
    holds half a character, nor a character that a stop string may still take back. `started` is set on the first
    increment after the request entered the batch (it may carry no token). The last increment of a choice has a
    `finish_reason`; the last of the request is `final` and has `metrics`, and with "error" also `error`.
    `cumulative_logprob`: of a finished beam. `logprobs`: one for each of `token_ids`, where the request asks for them;
    `prompt_logprobs`: one for each prompt token (none for the first), with the request's first token.
    `reasoning_tokens`: those of the choice so far that are reasoning, its markers with them.
    """

    request_id: str
    index: int = 0
    offset: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    text_offset: int = 0
    started: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    reasoning_tokens: int = 0
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    final: bool = False
    error: RequestError | None = None
    metrics: RequestMetrics | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One finished choice, with vLLM's attribute names."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """One finished request, with vLLM's attribute names. `error` is set where the request was refused or failed."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    error: RequestError | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    lora_request: None = None
