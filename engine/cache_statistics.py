"""What the KV cache says of itself: a snapshot."""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.engine.block_pool import PoolStatistics


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """The pool's state and the prefix cache's record so far.

    `queried_tokens`, `hit_tokens`: prompt tokens of admitted requests, and those found in the cache. The rest missed,
    by cause: `missed_new`, never seen (or under another salt); `missed_evicted`, known once and evicted since;
    `missed_partial`, in the last block, which is never shared. `wasted_slots`: allocated slots that hold no token now.
    `waste_percent`: share of allocated slots that were empty, mean over steps. `copied_blocks`: copies on write.
    """

    pool: PoolStatistics
    block_size: int
    promised_blocks: int
    wasted_slots: int
    waste_percent: float
    queried_tokens: int
    hit_tokens: int
    missed_new: int
    missed_evicted: int
    missed_partial: int
    copied_blocks: int
    host_blocks: int
    host_blocks_used: int
    peak_used: int
