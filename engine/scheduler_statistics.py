"""What the scheduler says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.engine.cache_statistics import CacheStatistics


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """State and record of the scheduler: sequences by state now, and counts since the start.

    `prefill_tokens_s`, `decode_tokens_s`: tokens a second of steps full of prompts, and of steps with a token for each
    of those that run now; None while too few steps were measured.
    `draft_tokens`: guessed and computed, of which `accepted_tokens` were right.
    """

    running: int
    waiting: int
    preempted: int
    steps: int
    scheduled_tokens: int
    preemptions: int
    swap_preemptions: int
    recomputed_tokens: int
    swapped_blocks: int
    draft_tokens: int
    accepted_tokens: int
    peak_running: int
    prefill_tokens_s: float | None
    decode_tokens_s: float | None
    cache: CacheStatistics
