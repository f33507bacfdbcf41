"""Blocks for requests: prefix hits, growth, forks, promises, swapping, and giving everything back.

Beside the pool this keeps two accounts. *Promises*: blocks that a running request will need for certain (the rest of
its prompt; all of it when it is reserved) are kept back for it, so that two half-loaded prompts cannot lock each
other out. *The step fence*: blocks let go while a step is in flight may still be written by it, so they are handed out
only after `end_step`.

Sharing. A fork holds the same blocks as its origin. A full block is never written again, so only the last, partly
filled one can be written by several: whoever writes first while others hold it gets a copy (copy-on-write). The copy
is told to the runner as data, with swaps in one ordered list, since a block may be let go, handed out again and
written within one decision; the runner makes the moves in that order before it computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pagemill.engine.block_pool import NULL_BLOCK, BlockPool
from pagemill.engine.cache_statistics import CacheStatistics
from pagemill.engine.host_pool import HostPool
from pagemill.engine.prefix_cache import AnnouncedBlocks, MissCounter, block_hashes, root_hash
from pagemill.engine.request import Request, RequestStatus
from pagemill.engine.scheduler_output import BlockMove, ScheduledSequence

_UNNAMED_STEPS = 16  # for so many at most a block that a decode filled has no name


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Leading blocks of a request that exist already. `waits`: the next one is about to be computed by another."""

    block_ids: list[int] = field(default_factory=list)
    num_published: int = 0
    waits: bool = False


class KVCacheManager:
    """Owner of the block pool. All sizes in tokens unless the name says blocks.

    `sliding_window`: a model that sees only so many tokens back; blocks behind it are let go. 0: it sees all.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        model_name: str = "",
        num_host_blocks: int = 0,
        sliding_window: int = 0,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.host = HostPool(num_host_blocks)
        self._caching = enable_prefix_caching
        self._model_name = model_name
        self._window = sliding_window
        self._announced = AnnouncedBlocks()
        self._unnamed: dict[Request, None] = {}  # those with a full block that the prefix cache does not know yet
        self._steps_unnamed = 0
        self._promised = 0
        self._in_flight = False
        self._fence: list[list[int]] = []
        self._used_slots_missing = 0  # allocated and not computed, over all tables
        self._waste_sum = 0
        self._allocated_sum = 0
        self._queried = 0
        self._hit = 0
        self._missed = MissCounter()
        self._copied = 0
        self._peak_used = 0

    # -- capacity ------------------------------------------------------------------------------------------------

    @property
    def num_usable(self) -> int:
        return self.pool.num_usable

    @property
    def num_available(self) -> int:
        """Free blocks that nobody has been promised."""
        return self.pool.num_free - self._promised

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_recompute(self, request: Request) -> bool:
        """Whether the pool is large enough for all tokens that the request has now, if it has lost its blocks."""
        return self._window > 0 or self.blocks_for(request.num_tokens) <= self.num_usable

    # -- a request's life ----------------------------------------------------------------------------------------

    def match(self, request: Request) -> PrefixMatch:
        """Blocks that hold a prefix of the request already. At least its last token is left to compute, since a step
        without a query token has no logits."""
        if not self._caching or request.wants_prompt_logprobs:
            return PrefixMatch()
        self._name_blocks()
        limit = (request.num_tokens - 1) // self.block_size
        names = self._names(request, limit)
        found: list[int] = []
        published = 0
        for index in range(limit):
            block_id = self.pool.lookup(names[index])
            if block_id is not None:
                published += published == len(found)
            else:
                owner = self._announced.owner(names[index])
                if owner is None:
                    break
                if index >= owner.num_scheduled_blocks:
                    return PrefixMatch(found, published, waits=True)
                block_id = owner.block_table.block_ids[index]  # one name, one place in the sequence
            found.append(block_id)
        return PrefixMatch(found, published)

    def can_start(self, match: PrefixMatch, promise_blocks: int, watermark: int) -> bool:
        """Whether the matched blocks, the promise and `watermark` more fit into what is free and not promised."""
        revived = sum(self.pool.is_free(block_id) for block_id in match.block_ids)
        return promise_blocks - len(match.block_ids) + revived + watermark <= self.num_available

    def start(self, request: Request, match: PrefixMatch, promise_blocks: int) -> None:
        """Take the matched blocks for the request and promise it `promise_blocks` in all."""
        assert not request.block_table.block_ids and request.promised_blocks == 0
        self.pool.touch(match.block_ids)
        request.block_table.block_ids = list(match.block_ids)
        request.num_computed_tokens = len(match.block_ids) * self.block_size
        request.num_published_blocks = match.num_published
        self._promise(request, max(0, promise_blocks - len(match.block_ids)))
        if self._caching:
            request.num_announced_blocks = request.num_tokens // self.block_size
            names = self._names(request, request.num_announced_blocks)
            self._announced.announce(names[len(match.block_ids) : request.num_announced_blocks], request)

    def count_hit(self, request: Request) -> None:
        """Enter the request's first admission into the prefix cache's record."""
        request.num_cached_tokens = request.num_computed_tokens
        self._queried += request.num_tokens
        self._hit += request.num_computed_tokens
        missed = request.num_tokens - request.num_computed_tokens
        partial = min(missed, (request.num_tokens - 1) % self.block_size + 1)
        names = request.block_hashes[request.num_computed_tokens // self.block_size :]
        self._missed.count(names, (missed - partial) // self.block_size, self.block_size, partial)

    def grow(self, request: Request, num_tokens: int, moves: list[BlockMove]) -> bool:
        """Make the table cover `num_tokens` with a last block of its own, out of the promise first.

        A copy that this takes is added to `moves`. False, and nothing changed, if there are not enough blocks.
        """
        table = request.block_table.block_ids
        need = self.blocks_for(num_tokens) - len(table)
        last, filled = divmod(request.num_computed_tokens, self.block_size)
        copies = request.may_copy and filled > 0 and self.pool.is_shared(table[last])
        if need <= 0 and not copies:
            request.may_copy = False
            return True
        need = max(0, need) + copies
        promised = min(need, request.promised_blocks)
        if need - promised > self.num_available:
            return False
        taken = self.pool.allocate(need, table[-1] if table else NULL_BLOCK)
        if promised:
            self._promise(request, request.promised_blocks - promised)
        request.may_copy = False
        if copies:
            target = taken.pop(0)
            moves.append(BlockMove("copy", table[last], target))
            self.pool.free([table[last]])
            table[last] = target
            self._copied += 1
        table.extend(taken)
        self._used_slots_missing += len(taken) * self.block_size
        return True

    def schedule(self, request: Request, num_tokens: int) -> None:
        """The blocks that `num_tokens` fill are part of the coming step: others may share them from now on."""
        request.num_scheduled_blocks = min(num_tokens // self.block_size, request.num_announced_blocks)

    def extend(self, request: Request, num_tokens: int, blocks_kept: int) -> int:
        """Make the table cover up to `num_tokens` for one step, with blocks promised to nobody, and leave `blocks_kept`
        of these. Returns how many tokens it covers; `trim` takes back what turns out not to be needed."""
        table = request.block_table.block_ids
        wanted = self.blocks_for(num_tokens) - len(table)
        taken = self.pool.allocate(max(0, min(wanted, self.num_available - blocks_kept)), table[-1])
        table.extend(taken)
        self._used_slots_missing += len(taken) * self.block_size
        return min(num_tokens, len(table) * self.block_size)

    def trim(self, request: Request, num_tokens: int) -> None:
        """After the commit of a step for which the table of `num_tokens` was extended: blocks without a computed token
        go back, and those that are kept count as promised ones."""
        table = request.block_table.block_ids
        needed = self.blocks_for(request.num_computed_tokens)
        excess = table[needed:]
        del table[needed:]
        self.pool.free(excess)
        self._used_slots_missing -= len(excess) * self.block_size
        kept = needed - self.blocks_for(num_tokens)
        self._promise(request, max(0, request.promised_blocks - kept))

    def commit(self, scheduled: Iterable[ScheduledSequence]) -> None:
        """The tokens of a step are computed: publish the blocks that became full, let go of those out of sight. Of
        drafts only the right ones are counted; they are not among the request's tokens yet.

        A block that a decode fills gets its name a little later, with others: of 96 sequences some fill one in every
        step, and naming takes code that nothing else in a step runs, the hash function's among it. Nobody sees the
        difference, since they have their names before a request looks for any.
        """
        size, total, running = self.block_size, 0, RequestStatus.RUNNING
        for item in scheduled:
            request = item.request
            if request.status is not running:
                continue
            total += item.num_tokens
            request.num_computed_tokens = computed = request.num_computed_tokens + item.num_tokens
            if self._caching and computed // size > request.num_published_blocks:
                if item.num_tokens == 1 and not self._window:
                    self._unnamed[request] = None
                else:
                    self._publish(request, computed // size, item.drafts)
            if self._window:
                self._forget_unseen(request)
        self._used_slots_missing -= total
        if self._unnamed:
            self._steps_unnamed += 1
            if self._steps_unnamed >= _UNNAMED_STEPS:
                self._name_blocks()

    def fork(self, origin: Request, fork: Request, promise_blocks: int) -> None:
        """Give `fork` the blocks and progress of `origin`, and a promise taken out of the origin's where it lasts."""
        self.pool.touch([b for b in origin.block_table.block_ids if b != NULL_BLOCK])
        fork.block_table = origin.block_table.fork()
        origin.may_copy = fork.may_copy = True
        fork.num_computed_tokens = origin.num_computed_tokens
        fork.num_published_blocks = origin.num_published_blocks
        fork.block_hashes = origin.block_hashes[: origin.num_published_blocks]
        self._used_slots_missing += len(fork.block_table) * self.block_size - fork.num_computed_tokens
        handed = min(promise_blocks, origin.promised_blocks)
        self._promise(origin, origin.promised_blocks - handed)
        self._promise(fork, promise_blocks)
        assert self.num_available >= 0, "a fork was promised more than there is"

    def promise(self, request: Request, blocks: int) -> None:
        """Keep exactly `blocks` back for the request from now on."""
        self._promise(request, blocks)
        assert self.num_available >= 0, "more was promised than there is"

    def free(self, request: Request) -> None:
        """Give back all blocks, host blocks and promises; nothing is computed afterwards. No-op without blocks."""
        table = request.block_table.block_ids
        if request in self._unnamed:
            self._name_blocks()
        for name in request.block_hashes[request.num_published_blocks : request.num_announced_blocks]:
            self._announced.withdraw(name, request)
        self._used_slots_missing -= len(table) * self.block_size - request.num_computed_tokens if table else 0
        self._promise(request, 0)
        self.host.free(request.host_blocks)
        request.host_blocks = []
        if self._in_flight:
            self._fence.append(table)
        else:
            self.pool.free(table)
        request.block_table.block_ids = []
        request.num_computed_tokens = 0
        request.num_published_blocks = request.num_announced_blocks = request.num_scheduled_blocks = 0

    # -- swapping ------------------------------------------------------------------------------------------------

    def can_swap_out(self, request: Request) -> bool:
        """Whether the host pool has room for everything the request has computed."""
        return 0 < self.blocks_for(request.num_computed_tokens) <= self.host.num_free

    def swap_out(self, request: Request, moves: list[BlockMove]) -> None:
        """Move the request's computed blocks to the host pool and give its blocks and promises back."""
        assert not self._in_flight
        computed = request.num_computed_tokens
        table = request.block_table.block_ids
        source = [block_id for block_id in table[: self.blocks_for(computed)] if block_id != NULL_BLOCK]
        host_blocks = self.host.allocate(len(source))
        moves += [BlockMove("out", block_id, host) for block_id, host in zip(source, host_blocks, strict=True)]
        self.free(request)
        request.host_blocks = host_blocks
        request.num_lost_tokens = computed
        request.num_swapped_blocks += len(host_blocks)

    def swap_in(self, request: Request, promise_blocks: int, moves: list[BlockMove]) -> None:
        """Bring a swapped-out request back to where it was. `can_start` with an empty match has been asked."""
        assert request.host_blocks and not request.block_table.block_ids
        host_blocks = request.host_blocks
        unseen = self.blocks_for(request.num_lost_tokens) - len(host_blocks)
        taken = self.pool.allocate(len(host_blocks))
        moves += [BlockMove("in", host, block_id) for host, block_id in zip(host_blocks, taken, strict=True)]
        self.host.free(host_blocks)
        request.host_blocks = []
        request.block_table.block_ids = [NULL_BLOCK] * unseen + taken
        request.num_computed_tokens = request.num_lost_tokens
        request.num_lost_tokens = 0
        # What lies behind the window has no block to publish any more.
        request.num_published_blocks = unseen
        self._used_slots_missing += len(request.block_table) * self.block_size - request.num_computed_tokens
        self._promise(request, max(0, promise_blocks - len(request.block_table)))

    # -- the step fence ------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._in_flight = True
        self._peak_used = max(self._peak_used, self.pool.num_used)

    def end_step(self) -> None:
        """The step has written its keys and values: fenced blocks are free."""
        self._in_flight = False
        self._waste_sum += self._used_slots_missing
        self._allocated_sum += self.pool.num_used * self.block_size
        for table in self._fence:
            self.pool.free(table)
        self._fence.clear()

    # -- insight -------------------------------------------------------------------------------------------------

    def statistics(self) -> CacheStatistics:
        return CacheStatistics(
            pool=self.pool.statistics(),
            block_size=self.block_size,
            promised_blocks=self._promised,
            wasted_slots=self._used_slots_missing,
            waste_percent=100.0 * self._waste_sum / self._allocated_sum if self._allocated_sum else 0.0,
            queried_tokens=self._queried,
            hit_tokens=self._hit,
            missed_new=self._missed.new,
            missed_evicted=self._missed.evicted,
            missed_partial=self._missed.partial,
            copied_blocks=self._copied,
            host_blocks=self.host.total,
            host_blocks_used=self.host.total - self.host.num_free,
            peak_used=self._peak_used,
        )

    def check(self, requests: list[Request]) -> None:
        """Assert that pools, promises, announcements and waste agree with the live requests."""
        self.pool.check([request.block_table.block_ids for request in requests] + self._fence)
        self.host.check(request.host_blocks for request in requests)
        assert self._promised == sum(request.promised_blocks for request in requests), "promises do not add up"
        assert 0 <= self._promised <= self.pool.num_free, "more blocks are promised than free"
        running = [request for request in requests if request.block_table.block_ids]
        if not self._in_flight:
            empty = sum(len(r.block_table) > self.blocks_for(r.num_computed_tokens) for r in running)
            assert not empty, f"{empty} sequences hold a block without a token"
        missing = sum(len(r.block_table) * self.block_size - r.num_computed_tokens for r in running)
        assert self._used_slots_missing == missing, "wasted slots do not add up"
        assert len(self._announced) == 0 or requests, "an announcement outlived its request"

    def forget_cached(self) -> int:
        return self.pool.forget_cached()

    def _promise(self, request: Request, blocks: int) -> None:
        self._promised += blocks - request.promised_blocks
        request.promised_blocks = blocks

    def _name_blocks(self) -> None:
        """Publish what decodes have filled since the last time."""
        for request in self._unnamed:
            self._publish(request, request.num_computed_tokens // self.block_size, ())
        self._unnamed.clear()
        self._steps_unnamed = 0

    def _publish(self, request: Request, num_blocks: int, drafts: Sequence[int]) -> None:
        """Let the prefix cache know the request's first `num_blocks` blocks. `drafts` follow its tokens."""
        table = request.block_table.block_ids
        names = self._names(request, num_blocks, drafts)
        for index in range(request.num_published_blocks, num_blocks):
            name = names[index]
            self.pool.cache(table[index], name)
            if index < request.num_announced_blocks:
                self._announced.withdraw(name, request)
        request.num_published_blocks = num_blocks

    def _forget_unseen(self, request: Request) -> None:
        """Let go of blocks that no coming token sees: the next one, at position p, sees p - window + 1 and later."""
        table = request.block_table.block_ids
        index = max(0, request.num_computed_tokens - self._window + 1) // self.block_size - 1
        unseen = []
        while index >= 0 and table[index] != NULL_BLOCK:
            unseen.append(table[index])
            table[index] = NULL_BLOCK
            index -= 1
        self.pool.free(unseen[::-1])

    def _names(self, request: Request, count: int, drafts: Sequence[int] = ()) -> list[bytes]:
        """The request's chain of block names, extended to `count` full blocks of its tokens and `drafts`."""
        names = request.block_hashes
        if len(names) < count:
            size = self.block_size
            parent = names[-1] if names else root_hash({"model": self._model_name, "salt": request.cache_salt})
            tokens = request.tokens(len(names) * size, count * size)
            if drafts:
                tokens = [*tokens, *drafts[: max(0, count * size - request.num_tokens)]]
            names += block_hashes(parent, tokens, size)
        return names
