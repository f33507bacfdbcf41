"""What sequences are promised of the pool, and what an admission leaves free for those who run.

A request starts only when all tokens that it has, and the next, fit: they are promised to it, so that what it lacks of
its prompt cannot be taken by another half-loaded prompt. A *reserved* request is promised its whole need and never
gives way. Beside the promise an admission leaves free what the running ones are expected to grow by.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pagemill.engine.forecast import GrowthForecast
from pagemill.engine.kv_cache_manager import KVCacheManager, PrefixMatch
from pagemill.engine.request import Request
from pagemill.engine.scheduler_output import BlockMove

WATERMARK = 0.01  # share of the pool that an admission leaves free while others run, for their next tokens


class Promises:
    """The account of one pool. `forecast`: how much the running ones will grow; None: a small share. `reserve`:
    everybody is reserved. `watermark`: blocks that stay free at least while others run."""

    def __init__(self, cache: KVCacheManager, forecast: GrowthForecast | None, *, reserve: bool) -> None:
        self._cache = cache
        self.forecast = forecast
        self._reserve = reserve
        self.watermark = max(1, int(cache.num_usable * WATERMARK))

    @property
    def num_committed(self) -> int:
        """Blocks used or promised."""
        return self._cache.num_usable - self._cache.num_available

    def enter(self, request: Request) -> None:
        """The request is new here."""
        request.is_reserved = request.is_reserved or self._reserve

    def refresh(self, step: int, running: Collection[Request]) -> None:
        """Bring the forecast up to date, if it is time. Call before a step's first `start`."""
        if self.forecast is not None:
            self.forecast.refresh(step, running, self.num_committed)

    def start(self, request: Request, match: PrefixMatch, moves: list[BlockMove], *, alone: bool) -> bool:
        """Give a queued request its promise, the blocks of `match`, and those that it was swapped out with.

        `alone`: nobody runs beside it. False, and nothing changed, where promise and watermark do not fit.
        """
        cache = self._cache
        promise = self._wanted(request)
        if not cache.can_start(match, promise, 0 if alone else self._watermark_for(request)):
            return False
        committed = self.num_committed
        if request.host_blocks:
            cache.swap_in(request, promise, moves)
        else:
            cache.start(request, match, promise)
        if request.started_at is None:
            cache.count_hit(request)
        if self.forecast is not None:
            self.forecast.admit(request, self.num_committed - committed)
        return True

    def for_fork(self, request: Request, sharers: int) -> int:
        """Blocks for a sequence that shares its last block: a copy of that; when reserved, all it may need, or where
        the pool has less, its share of that: of so many that share it none is to end long before the others."""
        if not request.is_reserved:
            return min(1, request.promised_blocks)
        whole = self._cache.blocks_for(request.max_slots) - len(request.block_table) + 1
        return min(whole, (self._cache.num_available + request.promised_blocks) // sharers)

    def borrow(self, beam: Request, running: Iterable[Request]) -> bool:
        """Set a block free that another beam of the same search was promised. False: there is none. Shares of a promise
        are rounded down, and who of those that hold one block pays for a copy is known only when they write: one beam
        without a block would end the search in front of all that the others keep back."""
        for other in running:
            if other.promised_blocks and other.request_id == beam.request_id:
                self._cache.promise(other, other.promised_blocks - 1)
                return True
        return False

    def _wanted(self, request: Request) -> int:
        """Blocks for all of its tokens and the next, and a copy of the last block for each other seat; or for its whole
        need when it is reserved."""
        blocks_for = self._cache.blocks_for
        if not request.is_reserved:
            wanted = blocks_for(min(request.num_tokens + 1, request.max_slots)) + request.seats - 1
            return min(wanted, self._cache.num_usable)
        whole = blocks_for(request.max_slots)
        if request.seats > 1:
            now = blocks_for(request.num_tokens)
            whole = now + request.seats * (whole - now + 1)
        return min(whole, self._cache.num_usable)

    def _watermark_for(self, request: Request) -> int:
        """Blocks that must stay free if the request is admitted beside others."""
        if self._reserve:
            return 0  # all that anybody may need is promised
        if self.forecast is None:
            return self.watermark
        return max(self.watermark, self.forecast.watermark(request, self.num_committed))
