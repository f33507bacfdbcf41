"""An engine's lease on what it has taken: heartbeats that say that it lives and how it is.

The lease covers all that an engine holds, so renewing it is one call, however much runs. It is renewed only while the
step loop gets on: a device that hangs keeps the process, its event loop and its connections alive, and must lose its
requests all the same. A step may last as long as `heartbeat_timeout_s`, and as `STEP_SLACK` times the longest that
this engine has got through: one whose steps are long by nature (large prompts, few cores) is slow and not dead. One
with more tokens than any before may take longer in proportion, and of the very first nothing is known: taken for a
hang, it would be lost on one engine after the other.

The others learn from the same heartbeat what this engine can do; `submit` and `accept` refuse by it.
"""

from __future__ import annotations

import asyncio
import math
import time
from importlib import metadata
from typing import Any

import orjson
import structlog
from redis.exceptions import RedisError

from pagemill.engine.async_engine import AsyncEngine, Pace
from pagemill.engine.forecast import Outlook
from pagemill.ingest import scripts
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.keys import QueueKeys
from pagemill.ingest.placement import HeldPrefixes
from pagemill.ingest.redis import may_pass
from pagemill.ingest.rounds import Rounds

BEAT_S = 1.0  # what is told of the engine is never older
MAP_CELLS = 96  # of the picture of the pool
STEP_SLACK = 4.0
MAX_SLACK = 20.0  # no step is given more than so many heartbeat timeouts
OUTLOOK_STRIDE = 4  # of its points, so many to one are told

_log = structlog.get_logger(__name__)


class Lease:
    """The lease of engine `owner` on every shard. `held`: what it tells the others that it has computed, until it is
    `stopping`."""

    def __init__(
        self,
        engine: AsyncEngine,
        config: QueueConfig,
        rounds: Rounds,
        owner: str,
        stopping: asyncio.Event,
        held: HeldPrefixes | None = None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._rounds = rounds
        self._owner = owner
        self._stopping = stopping
        self._held = held
        self._keys = QueueKeys(config.key_prefix, config.queue, config.shards)
        self._renewed_at = float("-inf")
        self._reap_from = float("-inf")
        self._version = metadata.version("pagemill")  # reads files, which is much for every heartbeat
        self._pulse = -1
        self._moved_at = time.monotonic()
        self._is_late = False

    @property
    def is_fresh(self) -> bool:
        """Whether it was renewed lately enough to take something new."""
        return self._renewed_at + self._config.heartbeat_timeout_s / 2 >= time.monotonic()

    @property
    def may_reap(self) -> bool:
        """Whether an old heartbeat of another engine means that it is dead. Not after Redis was away or its clock was
        set: then those of the living are old too, and they need time to renew them."""
        return time.monotonic() >= self._reap_from

    @property
    def was_renewed(self) -> bool:
        """Whether it was ever renewed."""
        return self._renewed_at > float("-inf")

    async def run(self) -> None:
        """Renew until cancelled, whatever happens to Redis; also when the engine begins to leave: until that is told,
        requests are accepted because it would start them."""
        beat_s = min(BEAT_S, self._config.heartbeat_timeout_s / 4)
        leaving = asyncio.create_task(self._stopping.wait())
        try:
            while True:
                if leaving.done():
                    await self._rounds.wait(beat_s)
                else:
                    await asyncio.wait({leaving}, timeout=self._rounds.left(beat_s))
                try:
                    await self.renew()
                except (RedisError, OSError) as error:
                    if not may_pass(error):
                        raise
                    _log.debug("heartbeat failed", reason=str(error))
        finally:
            leaving.cancel()

    async def renew(self) -> None:
        """Renew now, unless the step loop hangs. Raises redis-py's errors."""
        if not self._gets_on():
            if not self._is_late and not self.is_fresh:
                self._is_late = True
                _log.warning("a step takes long, the lease runs out: is the device hung?", owner=self._owner)
            return
        started = time.monotonic()
        description = orjson.dumps(self._description())
        names = [] if self._held is None or self._stopping.is_set() else self._held.names()
        calls = [scripts.renew(shard, self._owner, description, names) for shard in self._keys.shards]
        in_time = self.is_fresh
        for now, before in await asyncio.gather(*map(self._rounds.ask, calls)):
            # By the server's clock too, which may have been set, or have gone on while this machine slept.
            in_time &= before != b"" and 0 <= now - float(before) <= self._config.heartbeat_timeout_s * 500
        if self.was_renewed and not in_time:
            self._reap_from = started + self._config.heartbeat_timeout_s
        self._is_late = False
        self._renewed_at = started

    def _gets_on(self) -> bool:
        """Whether the step loop has got on since the last time, or is in a step that may last longer."""
        pulse, idle = self._engine.pulse
        now = time.monotonic()
        if pulse == self._pulse and not idle:
            return now - self._moved_at <= most_s(self._engine.pace, self._config.heartbeat_timeout_s)
        self._pulse, self._moved_at = pulse, now
        return True

    def _description(self) -> dict[str, Any]:
        engine, statistics, backlog = self._engine, self._engine.statistics(), self._engine.backlog
        caps = dict(
            zip(
                ("requests", "prompt_tokens", "tenant_requests", "tenant_prompt_tokens"), self._config.caps, strict=True
            )
        )
        places = {
            "places": engine.config.max_waiting_requests,
            "token_places": engine.config.max_waiting_prompt_tokens,
        }
        cache = statistics.cache
        return {
            "model": engine.info.model_name,
            "dtype": engine.info.dtype,
            "quantization": engine.info.quantization,
            "weight_bytes": sum(engine.info.weight_bytes.values()),
            "num_blocks": engine.info.num_blocks,
            "free_blocks": cache.pool.free,
            "shared_blocks": cache.pool.shared,
            "cached_blocks": cache.pool.cached,
            "block_size": cache.block_size,
            "pool_map": engine.pool_map(MAP_CELLS),
            "waste_percent": round(cache.waste_percent, 2),
            "queried_tokens": cache.queried_tokens,
            "hit_tokens": cache.hit_tokens,
            "output_tokens": engine.output_tokens,
            "threads": engine.threads,
            "running": statistics.running,
            "waiting": statistics.waiting,
            "preemptions": statistics.preemptions,
            "swap_preemptions": statistics.swap_preemptions,
            "recomputed_tokens": statistics.recomputed_tokens,
            "swapped_blocks": statistics.swapped_blocks,
            "version": self._version,
            "room": engine.has_room() and not self._stopping.is_set(),
            "leaving": self._stopping.is_set(),
            "prefill_tokens_s": statistics.prefill_tokens_s,
            "decode_tokens_s": statistics.decode_tokens_s,
            "waiting_requests": backlog.requests,
            "waiting_tokens": backlog.tokens,
            "outlook": _told(engine.outlook(), statistics.prefill_tokens_s if engine.num_live else None),
            "caps": {**caps, **places},
        }


def most_s(pace: Pace, heartbeat_timeout_s: float) -> float:
    """For how many seconds the step under way may last without being taken for a hang."""
    limit = MAX_SLACK * heartbeat_timeout_s
    if pace.tokens <= pace.largest:
        return min(STEP_SLACK * pace.longest_s, limit)
    if pace.largest == 0:
        return limit
    return min(STEP_SLACK * pace.longest_s * pace.tokens / pace.largest, limit)


def _told(outlook: Outlook | None, prefill_tokens_s: float | None) -> dict[str, Any] | None:
    """An outlook as the scripts read it. Where there is none (nobody forecasts under `admission=reserve`) prompts can
    still start no faster than they are computed."""
    if outlook is not None and not all(map(math.isfinite, (*outlook.times, *outlook.admitted))):
        return None  # what is no number in JSON would be none for the scripts either
    if outlook is not None:
        kept = range(len(outlook.times) - 1, -1, -OUTLOOK_STRIDE)
        times = [round(float(outlook.times[index]), 4) for index in reversed(kept)]
        admitted = [round(float(outlook.admitted[index]), 2) for index in reversed(kept)]
        return {"times": times, "admitted": admitted, "mean_tokens": round(float(outlook.mean_tokens), 1)}
    if prefill_tokens_s is None:
        return None
    return {"times": [0, 1], "admitted": [0, round(prefill_tokens_s, 1)], "mean_tokens": 1}
