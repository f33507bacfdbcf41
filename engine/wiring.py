"""A scheduler over a pool of blocks, put together once for every engine: the one with a model and the simulated one."""

from __future__ import annotations

import time
from collections.abc import Callable

from pagemill.engine.config import Admission, PreemptionMode, SchedulingPolicy
from pagemill.engine.forecast import GrowthForecast
from pagemill.engine.kv_cache_manager import KVCacheManager
from pagemill.engine.lengths import OutputLengths
from pagemill.engine.policy import make_queue
from pagemill.engine.preemption import PreemptionCost
from pagemill.engine.scheduler import Scheduler
from pagemill.engine.speculation import Speculation


def make_scheduler(
    *,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_host_blocks: int = 0,
    sliding_window: int = 0,
    enable_prefix_caching: bool = True,
    model_name: str = "",
    admission: Admission = "optimistic",
    preemption_mode: PreemptionMode = "auto",
    scheduling_policy: SchedulingPolicy = "fcfs",
    forecasts_growth: bool = True,
    block_move_s: float | None = None,
    speculation: Speculation | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Scheduler:
    """A scheduler with its pool, queue and forecast, under the settings' names.

    `num_blocks` counts the null block. `sliding_window`: tokens that the model sees, 0: all. `forecasts_growth`:
    whether optimistic admission keeps free what those who run are expected to grow by, or only 1 % of the pool (the
    simulator's contrast). `block_move_s`: measured seconds to move a block to the host, None: not known. `clock`:
    seconds.
    """
    cache = KVCacheManager(
        num_blocks,
        block_size,
        enable_prefix_caching=enable_prefix_caching,
        model_name=model_name,
        num_host_blocks=num_host_blocks,
        sliding_window=sliding_window,
    )
    forecast = GrowthForecast(
        OutputLengths(), num_blocks=cache.num_usable, block_size=block_size, sliding_window=sliding_window
    )
    return Scheduler(
        cache,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        reserve=admission == "reserve",
        preemption_mode=preemption_mode,
        cost=PreemptionCost(block_s=block_move_s),
        queue=make_queue(scheduling_policy, clock),
        forecast=forecast if forecasts_growth else None,
        speculation=speculation,
        clock=clock,
    )
