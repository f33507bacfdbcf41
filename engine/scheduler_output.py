"""What the scheduler tells the runner about one step. Plain data: the runner needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pagemill.engine.logprobs import PositionLogprobs
from pagemill.engine.request import Request


@dataclass(slots=True)
class ScheduledSequence:
    """Compute the tokens at positions start .. start + num_tokens of `request` (`request.tokens` has them).

    `block_ids` covers them and all before. `samples`: the last token's logits decide the next token, drawn once for
    each of the request's `seats`; with `top` > 0 nothing is drawn and the `top` likeliest tokens are wanted instead.

    `drafts`: guesses of what follows the sequence's last known token, computed in the same step and counted in
    `num_tokens`. A token is drawn behind that token and behind every draft; a draft is right if it is what was drawn
    before it.
    """

    request: Request
    start: int
    num_tokens: int
    block_ids: list[int]
    samples: bool
    top: int = 0
    drafts: Sequence[int] = ()


MoveKind = Literal["copy", "out", "in"]


@dataclass(frozen=True, slots=True)
class BlockMove:
    """Move one block's content: "copy" within the pool, "out" from the pool to the host pool, "in" back."""

    kind: MoveKind
    source: int
    target: int


@dataclass(slots=True)
class SchedulerOutput:
    """One step: sequences in batch order (decodes first), and block moves to make before it, one after the other.

    `preempted`: lost their blocks to make room. `outgrown`: alone and too large for the pool, so they end here.
    """

    step: int
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    moves: list[BlockMove] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    outgrown: list[Request] = field(default_factory=list)
    num_tokens: int = 0


@dataclass(slots=True)
class Sampled:
    """What a step sampled for one sequence.

    `tokens`: one id for each seat, -1 where the row's logits were unusable; with drafts the right ones of them and the
    one token more that was drawn behind the last of those; with `top` the likeliest ids, best first, and then
    `top_logprobs` has their log-probabilities. `logprobs`: of each of `tokens`, where the request asks for them.
    """

    tokens: list[int]
    top_logprobs: list[float] | None = None
    logprobs: list[PositionLogprobs] | None = None


@dataclass(slots=True)
class StepResult:
    """`sampled`: for each item with `samples`, in order; or `drawn`, where all that was wanted is a token of each.
    `prompt_logprobs`: by the item's place in the step, of prompt tokens that follow those computed, in order. `copy_s`:
    seconds that the block moves took."""

    sampled: list[Sampled] = field(default_factory=list)
    drawn: list[int] | None = None
    prompt_logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)
    copy_s: float = 0.0
