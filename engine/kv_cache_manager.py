"""Blocks for requests: prefix hits, growth, promises, and giving everything back.

Beside the pool this keeps two accounts. *Promises*: blocks that a running request will need for certain (the rest of
its prompt; all of it when it is protected) are kept back for it, so that two half-loaded prompts cannot lock each
other out. *The step fence*: blocks let go while a step is in flight may still be written by it, so they are handed out
only after `end_step`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagemill.engine.block_pool import BlockPool, PoolStatistics
from pagemill.engine.prefix_cache import AnnouncedBlocks, block_hash, root_hash
from pagemill.engine.request import Request


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Leading blocks of a request that exist already. `waits`: the next one is about to be computed by another."""

    block_ids: list[int] = field(default_factory=list)
    num_published: int = 0
    waits: bool = False


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """The pool's state and the prefix cache's record so far.

    `queried_tokens`, `hit_tokens`: prompt tokens of admitted requests, and those found in the cache. `wasted_slots`:
    allocated slots that hold no token now. `waste_percent`: share of allocated slots that were empty, mean over steps.
    """

    pool: PoolStatistics
    block_size: int
    promised_blocks: int
    wasted_slots: int
    waste_percent: float
    queried_tokens: int
    hit_tokens: int


class KVCacheManager:
    """Owner of the block pool. All sizes in tokens unless the name says blocks."""

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, model_name: str = ""
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._caching = enable_prefix_caching
        self._model_name = model_name
        self._announced = AnnouncedBlocks()
        self._promised = 0
        self._in_flight = False
        self._fence: list[list[int]] = []
        self._used_slots_missing = 0  # allocated and not computed, over all tables
        self._waste_sum = 0
        self._allocated_sum = 0
        self._queried = 0
        self._hit = 0

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

    # -- a request's life ----------------------------------------------------------------------------------------

    def match(self, request: Request) -> PrefixMatch:
        """Blocks that hold a prefix of the request already. At least its last token is left to compute, since a step
        without a query token has no logits."""
        if not self._caching:
            return PrefixMatch()
        limit = (request.num_tokens - 1) // self.block_size
        names = self._names(request, limit)
        found: list[int] = []
        published = 0
        for name in names[:limit]:
            block_id = self.pool.lookup(name)
            if block_id is not None:
                published += published == len(found)
            else:
                announcement = self._announced.get(name)
                if announcement is None:
                    break
                if announcement.block_id is None:
                    return PrefixMatch(found, published, waits=True)
                block_id = announcement.block_id
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
        request.promised_blocks = max(0, promise_blocks - len(match.block_ids))
        self._promised += request.promised_blocks
        if self._caching:
            request.num_announced_blocks = request.num_tokens // self.block_size
            names = self._names(request, request.num_announced_blocks)
            for name in names[len(match.block_ids) : request.num_announced_blocks]:
                self._announced.announce(name, request)

    def count_hit(self, request: Request) -> None:
        """Enter the request's first admission into the prefix cache's record."""
        self._queried += request.num_tokens
        self._hit += request.num_computed_tokens

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make the table cover `num_tokens`, out of the promise first. False, and nothing changed, if it cannot."""
        table = request.block_table.block_ids
        need = self.blocks_for(num_tokens) - len(table)
        if need <= 0:
            return True
        promised = min(need, request.promised_blocks)
        if need - promised > self.num_available:
            return False
        table.extend(self.pool.allocate(need))
        request.promised_blocks -= promised
        self._promised -= promised
        self._used_slots_missing += need * self.block_size
        return True

    def schedule(self, request: Request, num_tokens: int) -> None:
        """The blocks that `num_tokens` fill are part of the coming step: others may share them from now on."""
        if not self._caching:
            return
        table = request.block_table.block_ids
        last = min(num_tokens // self.block_size, request.num_announced_blocks)
        for index in range(request.num_computed_tokens // self.block_size, last):
            self._announced.schedule(request.block_hashes[index], request, table[index])

    def commit(self, request: Request, num_tokens: int) -> None:
        """`num_tokens` more are computed: publish the blocks that became full."""
        request.num_computed_tokens += num_tokens
        self._used_slots_missing -= num_tokens
        if not self._caching:
            return
        full = request.num_computed_tokens // self.block_size
        if full == request.num_published_blocks:
            return
        table = request.block_table.block_ids
        names = self._names(request, full)
        for index in range(request.num_published_blocks, full):
            self.pool.cache(table[index], names[index])
            self._announced.withdraw(names[index], request)
        request.num_published_blocks = full

    def free(self, request: Request) -> None:
        """Give back all blocks and promises; the request has nothing computed afterwards. No-op without blocks."""
        table = request.block_table.block_ids
        for name in request.block_hashes[request.num_published_blocks : request.num_announced_blocks]:
            self._announced.withdraw(name, request)
        self._used_slots_missing -= len(table) * self.block_size - request.num_computed_tokens
        self._promised -= request.promised_blocks
        if self._in_flight:
            self._fence.append(table)
        else:
            self.pool.free(table)
        request.block_table.block_ids = []
        request.promised_blocks = request.num_computed_tokens = 0
        request.num_published_blocks = request.num_announced_blocks = 0

    # -- the step fence ------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._in_flight = True

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
        )

    def check(self, requests: list[Request]) -> None:
        """Assert that pool, promises, announcements and waste agree with the live requests."""
        self.pool.check([request.block_table.block_ids for request in requests] + self._fence)
        assert self._promised == sum(request.promised_blocks for request in requests), "promises do not add up"
        assert 0 <= self._promised <= self.pool.num_free, "more blocks are promised than free"
        missing = sum(len(r.block_table) * self.block_size - r.num_computed_tokens for r in requests)
        assert self._used_slots_missing == missing, "wasted slots do not add up"
        assert len(self._announced) == 0 or requests, "an announcement outlived its request"

    def forget_cached(self) -> int:
        return self.pool.forget_cached()

    def _names(self, request: Request, count: int) -> list[bytes]:
        """The request's chain of block names, extended to `count` full blocks."""
        names = request.block_hashes
        if len(names) < count:
            size = self.block_size
            parent = names[-1] if names else root_hash({"model": self._model_name, "salt": request.cache_salt})
            for index in range(len(names), count):
                parent = block_hash(parent, request.tokens(index * size, (index + 1) * size))
                names.append(parent)
        return names
