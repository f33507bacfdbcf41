"""What the scheduler tells the runner about one step. Plain data: the runner needs nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagemill.engine.request import Request


@dataclass(slots=True)
class ScheduledSequence:
    """Compute the tokens at positions start .. start + num_tokens of `request` (`request.tokens` has them).

    `block_ids` covers them and all before. `samples`: the last token's logits decide the next token.
    """

    request: Request
    start: int
    num_tokens: int
    block_ids: list[int]
    samples: bool


@dataclass(slots=True)
class SchedulerOutput:
    """One step: sequences in batch order (decodes first), block copies (source, destination) to make before it.

    `preempted`: lost their blocks to make room. `outgrown`: alone and too large for the pool, so they end here.
    """

    step: int
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    outgrown: list[Request] = field(default_factory=list)
    num_tokens: int = 0
