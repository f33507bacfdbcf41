"""A request as the scheduler sees it: tokens, progress, blocks and the bill for every preemption."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from pagemill.engine.block_table import BlockTable
from pagemill.engine.logit_rules import LogitRules
from pagemill.engine.logits_state import LogitsState
from pagemill.engine.reasoning import ReasoningParserName
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.tool_calls import ToolParserName


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()  # its blocks are gone; it will be computed again
    SWAPPED = enum.auto()  # its blocks lie in the host pool
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to generate: a request of one choice, or one choice (or beam) of several with the same id.

    `prompt_token_ids` never changes; `output_token_ids` grows, and starts non-empty when a request is resumed from
    what another engine has already published. `num_computed_tokens` tokens of prompt + output have their keys and
    values in the blocks of `block_table`. The first of several choices computes the prompt for all of them: until it is
    forked it takes `seats` places in the batch, and so does a beam in the place of those that are still to be.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    tenant: str = "default"
    cache_salt: str = ""
    priority: int = 1
    index: int = 0
    seats: int = 1
    top: int = 0  # likeliest next tokens wanted of each step, instead of a draw
    is_reserved: bool = False  # runs with its whole need promised, so it never gives way
    output_token_ids: list[int] = field(default_factory=list)
    tool_parser: ToolParserName | None = None  # how calls of tools are written in its text, where it has tools
    reasoning_parser: ReasoningParserName | None = None  # how reasoning stands in front of its answer, where it may
    rules: LogitRules | None = None  # what its parameters change in its logits
    logits_state: LogitsState | None = None  # what its tokens change in them
    num_told_logprobs: int = 0  # leading prompt tokens whose log-probabilities were told, where they are wanted

    status: RequestStatus = RequestStatus.WAITING
    block_table: BlockTable = field(default_factory=BlockTable)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0

    block_hashes: list[bytes] = field(default_factory=list)  # names of the full blocks, as far as needed yet
    num_published_blocks: int = 0  # leading blocks of the table that the prefix cache knows
    num_announced_blocks: int = 0  # leading blocks whose names were announced while being computed
    num_scheduled_blocks: int = 0  # of those, the ones that a step has filled or will: others may share them
    may_copy: bool = False  # others may hold its last block too, so writing there may take a copy
    promised_blocks: int = 0  # blocks that the pool keeps back for it
    host_blocks: list[int] = field(default_factory=list)  # where its blocks lie while it is swapped out

    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_swapped_blocks: int = 0
    num_draft_tokens: int = 0  # guessed for it and computed
    num_accepted_tokens: int = 0  # of those, the right ones
    num_lost_tokens: int = 0  # computed before the last preemption; what of it is not found again is recomputed
    preempted_ms: float = 0.0
    preempted_at: float | None = None
    arrived_at: float = 0.0  # all times: seconds of the scheduler's clock
    started_at: float | None = None
    first_token_at: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt + generated."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_slots(self) -> int:
        """KV slots it may ever need: prompt + max_tokens - 1, since nothing follows the last token."""
        return len(self.prompt_token_ids) + self.max_tokens - 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some of the prompt has to be computed for its log-probabilities, known to the cache or not."""
        return self.params.prompt_logprobs is not None and self.num_told_logprobs < len(self.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions start..end of prompt + output."""
        split = len(self.prompt_token_ids)
        if end <= split:
            return self.prompt_token_ids[start:end]
        if start >= split:
            return self.output_token_ids[start - split : end - split]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - split]
