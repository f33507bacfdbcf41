"""An invented model for the scheduler's tests, and the naive twin that says what it should have said.

The model keeps a pool of its own: each slot remembers which token was written there, at which position. The next token
is a hash of the context *as read back through the block table*, so a wrong block, a block that was overwritten, a slot
that was never computed or a prefix shared wrongly changes the text or trips an assertion. The twin hashes the tokens
themselves, one request at a time, and has no blocks at all.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from pagemill.engine.core import EngineCore
from pagemill.engine.kv_cache_manager import KVCacheManager
from pagemill.engine.outputs import SequenceOutput
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduler import Scheduler
from pagemill.engine.scheduler_output import SchedulerOutput

VOCABULARY = 50
EOS = 0


def invent(context: Sequence[int], seed: int, position: int) -> int:
    """The invented model's next token after `context`."""
    return zlib.crc32(repr((list(context), seed, position)).encode()) % VOCABULARY


def twin(prompt: Sequence[int], seed: int, max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    """What a request should generate, whatever runs beside it."""
    tokens = list(prompt)
    output: list[int] = []
    while len(output) < max_tokens:
        token = invent(tokens, seed, len(output))
        tokens.append(token)
        output.append(token)
        if token == EOS and not ignore_eos:
            break
    return output


class InventedModel:
    """A runner over slots that remember tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._slots: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self.computed_tokens = 0
        self.steps = 0

    def execute(self, output: SchedulerOutput) -> list[int]:
        size = self._block_size
        self.steps += 1
        for item in output.scheduled:
            tokens = item.request.tokens(item.start, item.start + item.num_tokens)
            assert len(tokens) == item.num_tokens > 0
            self.computed_tokens += item.num_tokens
            for position, token in enumerate(tokens, item.start):
                self._slots[item.block_ids[position // size] * size + position % size] = (token, position)
        sampled = []
        for item in output.scheduled:
            if not item.samples:
                continue
            context = []
            for position in range(item.start + item.num_tokens):
                slot = self._slots[item.block_ids[position // size] * size + position % size]
                assert slot is not None and slot[1] == position, f"position {position} reads {slot}"
                context.append(slot[0])
            request = item.request
            sampled.append(invent(context, request.seed, len(request.output_token_ids)))
        return sampled


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
    ) -> None:
        self._now = 0.0
        self.cache = KVCacheManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            clock=self._clock,
        )
        self.model = InventedModel(num_blocks, block_size)
        self.core = EngineCore(self.scheduler, self.model, None, [EOS], clock=self._clock)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, SequenceOutput] = {}

    def _clock(self) -> float:
        self._now += 0.001
        return self._now

    def add(self, request: Request) -> Request:
        self.tokens[request.request_id] = list(request.output_token_ids)
        self._fold(self.core.add(request))
        return request

    def abort(self, request_id: str) -> None:
        output = self.core.abort(request_id)
        self._fold([output] if output is not None else [])

    def step(self) -> None:
        self._fold(self.core.step())
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
            name = output.request_id
            assert name not in self.ends, f"{name} spoke after its end"
            assert output.offset == len(self.tokens[name])
            self.tokens[name] += output.token_ids
            if output.finish_reason is not None:
                assert output.metrics is not None
                self.ends[name] = output


def make(
    name: str, prompt: Sequence[int], max_tokens: int, *, seed: int = 0, ignore_eos: bool = False, salt: str = ""
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        params=params,
        seed=seed,
        max_tokens=max_tokens,
        cache_salt=salt,
    )
