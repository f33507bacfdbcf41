"""An invented model for the scheduler's tests, and the naive twin that says what it should have said.

The model keeps a pool of its own: each slot remembers which token was written there, at which position. The next token
is a hash of the context *as read back through the block table*, so a wrong block, a block that was overwritten, a slot
that was never computed or a prefix shared wrongly changes the text or trips an assertion. The twin hashes the tokens
themselves, one request at a time, and has no blocks at all.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, Literal

from pagemill.engine.beam import BeamSearch
from pagemill.engine.config import PreemptionMode
from pagemill.engine.core import EngineCore
from pagemill.engine.forecast import GrowthForecast
from pagemill.engine.kv_cache_manager import KVCacheManager
from pagemill.engine.lengths import OutputLengths
from pagemill.engine.outputs import SequenceOutput
from pagemill.engine.policy import SchedulingPolicy, make_queue
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduler import Scheduler
from pagemill.engine.scheduler_output import Sampled, ScheduledSequence, SchedulerOutput, StepResult
from pagemill.engine.speculation import Speculation

VOCABULARY = 50
EOS = 0


def invent(context: Sequence[int], seed: int, position: int, choice: int = 0) -> int:
    """The invented model's next token after `context`."""
    return zlib.crc32(repr((list(context), seed, position, choice)).encode()) % VOCABULARY


def offers(context: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """The invented model's likeliest next tokens after `context`, with log-probabilities."""
    weights = [zlib.crc32(repr((list(context), token)).encode()) for token in range(VOCABULARY)]
    ranked = sorted(range(VOCABULARY), key=lambda token: -weights[token])[:count]
    total = sum(weights)
    return ranked, [math.log(weights[token] / total) for token in ranked]


def twin(
    prompt: Sequence[int], seed: int, max_tokens: int, *, ignore_eos: bool = False, choice: int = 0, window: int = 0
) -> list[int]:
    """What a choice of a request should generate, whatever runs beside it."""
    tokens = list(prompt)
    output: list[int] = []
    while len(output) < max_tokens:
        token = invent(tokens[-window:], seed, len(output), choice)
        tokens.append(token)
        output.append(token)
        if token == EOS and not ignore_eos:
            break
    return output


def beam_twin(
    prompt: Sequence[int], width: int, count: int, max_tokens: int, penalty: float, early: bool | Literal["never"]
) -> list[list[int]]:
    """The best beams of a search, found without blocks or batches."""
    search = BeamSearch(width, [EOS], max_tokens, penalty, early)
    beams: list[list[int]] = [[]]
    while True:
        steps = search.advance(beams, [offers([*prompt, *beam], search.num_offers) for beam in beams])
        if not steps:
            return [beam.token_ids for beam in search.best(count)]
        beams = [[*beams[step.parent], step.token_id] for step in steps]


class InventedModel:
    """A runner over slots that remember tokens."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0, window: int = 0) -> None:
        self._block_size = block_size
        self._window = window
        self._slots: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self._host: list[tuple[int, int] | None] = [None] * (num_host_blocks * block_size)
        self.computed_tokens = 0
        self.steps = 0

    def _move(self, output: SchedulerOutput) -> None:
        size = self._block_size
        for move in output.moves:
            source = self._host if move.kind == "in" else self._slots
            target = self._host if move.kind == "out" else self._slots
            target[move.target * size : (move.target + 1) * size] = source[
                move.source * size : (move.source + 1) * size
            ]

    def execute(self, output: SchedulerOutput) -> StepResult:
        size = self._block_size
        self.steps += 1
        self._move(output)
        written: dict[int, tuple[int, int]] = {}
        for item in output.scheduled:
            known = item.request.tokens(item.start, item.start + item.num_tokens - len(item.drafts))
            tokens = [*known, *item.drafts]
            assert len(tokens) == item.num_tokens > 0
            self.computed_tokens += item.num_tokens
            for position, token in enumerate(tokens, item.start):
                block_id = item.block_ids[position // size]
                slot = block_id * size + position % size
                assert block_id != 0, "the null block was written"
                assert slot not in written, "two sequences wrote one slot"
                written[slot] = self._slots[slot] = (token, position)
        result = StepResult()
        for item in output.scheduled:
            if not item.samples:
                continue
            request = item.request
            if item.drafts:
                result.sampled.append(Sampled(self._verify(item)))
                continue
            context = self._read(item, item.start + item.num_tokens)
            if item.top:
                tokens, logprobs = offers(context, item.top)
                result.sampled.append(Sampled(tokens, logprobs))
                continue
            choices = range(request.index, request.index + request.seats)
            position = len(request.output_token_ids)
            result.sampled.append(Sampled([invent(context, request.seed, position, choice) for choice in choices]))
        return result

    def _read(self, item: ScheduledSequence, end: int) -> list[int]:
        """What the sequence's blocks say of the positions before `end` that the model sees."""
        size = self._block_size
        context = []
        for position in range(max(0, end - self._window) if self._window else 0, end):
            held = self._slots[item.block_ids[position // size] * size + position % size]
            assert held is not None and held[1] == position, f"position {position} reads {held}"
            context.append(held[0])
        return context

    def _verify(self, item: ScheduledSequence) -> list[int]:
        """The tokens that follow: as many drafts as are right, and one more."""
        request = item.request
        assert item.samples and request.seats == 1 and not item.top
        first, tokens = item.start + item.num_tokens - len(item.drafts), list[int]()
        for place in range(1 + len(item.drafts)):
            context = self._read(item, first + place)
            tokens.append(invent(context, request.seed, len(request.output_token_ids) + place, request.index))
            if tokens[-1] not in item.drafts[place : place + 1]:
                break
        return tokens


class Bench:
    """An engine core on the invented model, with a clock that moves one millisecond a look."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 64,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        preemption_mode: PreemptionMode = "auto",
        reserve: bool = False,
        sliding_window: int = 0,
        policy: SchedulingPolicy = "fcfs",
        forecast: bool = False,
        speculation: Speculation | None = None,
    ) -> None:
        self._now = 0.0
        self.cache = KVCacheManager(
            num_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            num_host_blocks=num_host_blocks,
            sliding_window=sliding_window,
        )
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            reserve=reserve,
            preemption_mode=preemption_mode,
            queue=make_queue(policy, self._clock),
            forecast=GrowthForecast(
                OutputLengths(),
                num_blocks=num_blocks - 1,
                block_size=block_size,
                sliding_window=sliding_window,
            )
            if forecast
            else None,
            speculation=speculation,
            clock=self._clock,
        )
        self.model = InventedModel(num_blocks, block_size, num_host_blocks, sliding_window)
        self.core = EngineCore(self.scheduler, self.model, None, [EOS], clock=self._clock)
        self.tokens: dict[str, list[int]] = {}  # of each request's first choice
        self.choices: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[str, SequenceOutput] = {}
        self._late: list[SequenceOutput] = []
        self.choice_ends: dict[tuple[str, int], SequenceOutput] = {}

    def _clock(self) -> float:
        self._now += 0.001
        return self._now

    def add(self, request: Request, resumed: Sequence[Sequence[int]] = ()) -> Request:
        told = resumed or [request.output_token_ids]
        for index in range(request.params.n):
            self.choices[request.request_id, index] = list(told[index]) if index < len(told) else []
        self.tokens[request.request_id] = self.choices[request.request_id, 0]
        self._fold(self.core.add(request, resumed))
        return request

    def abort(self, request_id: str) -> None:
        self._fold(self.core.abort(request_id))

    def abort_in_flight(self, request_id: str) -> None:
        """Abort while a step is computed; it is told after what that step brings."""
        self._late += self.core.abort(request_id)

    def step(self) -> None:
        outputs = self.core.step()
        self._fold([*outputs, *self._late])
        self._late.clear()
        self.core.check()

    def run(self, max_steps: int = 100_000) -> None:
        for _ in range(max_steps):
            if not self.core.has_requests:
                break
            self.step()
        assert not self.core.has_requests, f"still busy after {max_steps} steps"
        self.core.check()
        assert self.cache.pool.num_used == 0

    def _fold(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            name, choice = output.request_id, (output.request_id, output.index)
            assert name not in self.ends, f"{name} spoke after its end"
            assert choice not in self.choice_ends, f"{choice} spoke after its end"
            assert output.offset == len(self.choices[choice])
            self.choices[choice] += output.token_ids
            if output.finish_reason is not None:
                self.choice_ends[choice] = output
            if output.final:
                assert output.metrics is not None and output.finish_reason is not None
                self.ends[name] = output


def make(
    name: str,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    seed: int = 0,
    ignore_eos: bool = False,
    salt: str = "",
    tenant: str = "default",
    priority: int = 1,
    **params_: Any,
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, **params_)
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        params=params,
        seed=seed,
        max_tokens=max_tokens,
        cache_salt=salt,
        tenant=tenant,
        priority=priority,
    )
