"""The pool of KV blocks: who holds which block, and which block is handed out next.

The idea. The KV cache is cut into equal blocks, so any free block serves any sequence and nothing is ever lost to
fragmentation between blocks; a sequence wastes at most its last, partly filled block. Blocks are counted references:
a block that two sequences share has count 2 and returns to the free list when the last of them lets go.

A free block keeps its content until it is handed out again. If that content is a full block of tokens, its hash stays
findable and a later request with the same prefix takes the block back from the middle of the list of such blocks, which
is the cache's LRU order. What is handed out first:

  1. blocks without reusable content, by where they lie: behind the sequence's last one, or else in a row
     (`empty_blocks`);
  2. the cached block that was let go longest ago, wherever it lies. Several at once are handed out by ascending id.

The second comes before every wish for neighbours: blocks in a row save some of attention's time, a lost prefix is
computed again. So a pool without a prefix cache keeps its sequences in runs for good, and one with a cache as long as
there are blocks that never held anything; once all hold prefixes, a block's place is a matter of age.

Invariants, asserted by `check`:
  * free blocks + referenced blocks = total - 1 (block 0 is the null block: never handed out, a target for padding);
  * the reference count of a block = the number of times the block tables (and the step fence) hold it;
  * a block is in the LRU list or among the empty ones, by whether it has a hash, exactly when its count is 0;
  * the hash map and the blocks' hashes are the same relation.

Rejected: a radix tree of tokens (no block boundaries to lose hits to, but splits, merges and leaf eviction on every
step); a heap or a clock for eviction (LRU over an intrusive list is O(1) and exact); moving blocks to compact them
(block tables make that pointless).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pagemill.engine.empty_blocks import EmptyBlocks

NULL_BLOCK = 0


class KVCacheBlock:
    """What is known of a block with content. Made once for each when the pool is made; `prev` and `next` link the LRU
    list."""

    __slots__ = ("block_hash", "block_id", "next", "prev")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.block_hash: bytes | None = None
        self.prev: KVCacheBlock | None = None
        self.next: KVCacheBlock | None = None


class CachedBlockQueue:
    """Free blocks with content, in the order in which they are given up: a doubly linked list threaded through the
    blocks themselves, O(1) at both ends and from the middle."""

    __slots__ = ("_head", "_tail", "count")

    def __init__(self) -> None:
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next, self._tail.prev = self._tail, self._head
        self.count = 0

    def append(self, block: KVCacheBlock) -> None:
        """Give this block up last."""
        previous = self._tail.prev
        assert previous is not None and block.prev is None and block.next is None
        previous.next, block.prev = block, previous
        block.next, self._tail.prev = self._tail, block
        self.count += 1

    def remove(self, block: KVCacheBlock) -> None:
        previous, following = block.prev, block.next
        assert previous is not None and following is not None, f"block {block.block_id} is not in the list"
        previous.next, following.prev = following, previous
        block.prev = block.next = None
        self.count -= 1

    def pop_left(self, count: int) -> list[KVCacheBlock]:
        """Take the next `count` blocks."""
        taken: list[KVCacheBlock] = []
        block = self._head.next
        for _ in range(count):
            assert block is not None and block is not self._tail, "the list is empty"
            taken.append(block)
            following = block.next
            block.prev = block.next = None
            block = following
        assert block is not None
        self._head.next, block.prev = block, self._head
        self.count -= count
        return taken

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Counts of blocks. `cached`: free blocks whose content can still be reused. `evicted`: contents lost so far."""

    total: int
    free: int
    used: int
    shared: int
    cached: int
    evicted: int


class BlockPool:
    """All KV blocks of one engine. `num_blocks` counts the null block, so `num_blocks - 1` can be handed out."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, got {num_blocks} blocks")
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        # Of all blocks side by side, since they are looked at in every step, and all of them for a picture: how many
        # hold each, and whether its content can be found.
        self._references = [0] * num_blocks
        self._is_known = bytearray(num_blocks)
        self._cached = CachedBlockQueue()
        self._empty = EmptyBlocks(num_blocks)
        self._by_hash: dict[bytes, KVCacheBlock] = {}
        self._shared = 0
        self._cached_in_use = 0
        self._evicted = 0

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can ever hold."""
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        return self._cached.count + self._empty.count

    @property
    def num_used(self) -> int:
        return len(self.blocks) - 1 - self.num_free

    def allocate(self, count: int, after: int = NULL_BLOCK) -> list[int]:
        """Take `count` blocks, each with one reference. The caller has looked at `num_free`. `after`: the last block of
        the sequence that they are for, which is held."""
        assert count <= self.num_free, f"{count} blocks asked for, {self.num_free} free"
        taken = self._empty.take(min(count, self._empty.count), after)
        if len(taken) < count:
            evicted = self._cached.pop_left(count - len(taken))
            for block in evicted:
                assert block.block_hash is not None
                del self._by_hash[block.block_hash]
                block.block_hash = None
                self._is_known[block.block_id] = 0
            self._evicted += len(evicted)
            taken += sorted(block.block_id for block in evicted)
        for block_id in taken:
            self._references[block_id] = 1
        return taken

    def touch(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each block; a cached free block comes back into use."""
        for block_id in block_ids:
            held = self._references[block_id]
            if held == 0:
                self._cached.remove(self.blocks[block_id])
                self._cached_in_use += 1
            elif held == 1:
                self._shared += 1
            self._references[block_id] = held + 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block, given in token order; null blocks are passed over. Of one sequence the tail
        is evicted first, since a prefix serves more requests than what follows it."""
        references = self._references
        for block_id in reversed(block_ids):
            if block_id == NULL_BLOCK:
                continue
            held = references[block_id] - 1
            assert held >= 0, f"block {block_id} freed without being held"
            references[block_id] = held
            if held == 1:
                self._shared -= 1
            elif held == 0:
                if self._is_known[block_id]:
                    self._cached_in_use -= 1
                    self._cached.append(self.blocks[block_id])
                else:
                    self._empty.add(block_id)

    def cache(self, block_id: int, block_hash: bytes) -> bool:
        """Make a held, full and computed block findable by its hash. False where another block already is."""
        assert self._references[block_id] > 0, f"block {block_id} cached without being held"
        if block_hash in self._by_hash or self._is_known[block_id]:
            return False
        block = self.blocks[block_id]
        block.block_hash = block_hash
        self._is_known[block_id] = 1
        self._by_hash[block_hash] = block
        self._cached_in_use += 1
        return True

    def lookup(self, block_hash: bytes) -> int | None:
        """The block with this content, held or free; `touch` it before anything else is allocated."""
        block = self._by_hash.get(block_hash)
        return None if block is None else block.block_id

    def is_free(self, block_id: int) -> bool:
        return self._references[block_id] == 0

    def is_shared(self, block_id: int) -> bool:
        return self._references[block_id] > 1

    def forget_cached(self) -> int:
        """Drop every cached content; held blocks stay held. Returns how many hashes were forgotten."""
        forgotten = len(self._by_hash)
        for block in self._cached.pop_left(self._cached.count):
            self._empty.add(block.block_id)
        for block in self._by_hash.values():
            block.block_hash = None
            self._is_known[block.block_id] = 0
        self._by_hash.clear()
        self._cached_in_use = 0
        return forgotten

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(
            total=self.num_usable,
            free=self.num_free,
            used=self.num_used,
            shared=self._shared,
            cached=len(self._by_hash) - self._cached_in_use,
            evicted=self._evicted,
        )

    def map(self, cells: int) -> tuple[str, str]:
        """The pool as a picture: for each of up to `cells` runs of blocks a digit from 0, none of it is held, to 9, all
        of it; and in a second text the same for blocks whose content can be found. Beside the thread that owns the pool
        it may be called for a picture of a moment that never quite was.
        """
        width = -(-self.num_usable // cells)
        held: list[str] = []
        known: list[str] = []
        for first in range(1, len(self.blocks), width):
            run = self._references[first : first + width]
            held.append(str(-(-9 * (len(run) - run.count(0)) // len(run))))
            known.append(str(-(-9 * self._is_known.count(1, first, first + len(run)) // len(run))))
        return "".join(held), "".join(known)

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert the pool's invariants, given every list of block ids that holds references (null blocks aside).
        O(total blocks)."""
        held = Counter(block_id for block_ids in holders for block_id in block_ids)
        del held[NULL_BLOCK]
        for block, count, is_known in zip(self.blocks, self._references, self._is_known, strict=True):
            assert count == held[block.block_id], (
                f"block {block.block_id} has {count} references but is held {held[block.block_id]} times"
            )
            assert is_known == (block.block_hash is not None)
            if block.block_hash is not None:
                assert self._by_hash.get(block.block_hash) is block, f"block {block.block_id} is not findable"
        self._empty.check()
        cached = {block.block_id for block in self._cached}
        assert len(cached) == self._cached.count, "the LRU list holds a block twice or miscounts"
        references = self._references
        hashed = [block for block in self.blocks if block.block_hash is not None]
        known = {block.block_id for block in hashed if references[block.block_id] == 0}
        assert cached == known, "the LRU list and the counts disagree"
        free = cached | {block_id for first, length in self._empty.runs() for block_id in range(first, first + length)}
        unheld = {block_id for block_id, count in enumerate(references) if count == 0 and block_id != NULL_BLOCK}
        assert free == unheld, "free blocks and counts disagree"
        assert len(free) + sum(count > 0 for count in references) == self.num_usable, "blocks were lost"
        assert len(hashed) == len(self._by_hash), "the hash map holds a stale block"
        assert self._shared == sum(count > 1 for count in references), "shared blocks are miscounted"
        in_use = sum(references[block.block_id] > 0 for block in hashed)
        assert self._cached_in_use == in_use, "cached blocks are miscounted"
