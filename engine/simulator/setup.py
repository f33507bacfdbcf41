"""What a simulated engine is started with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pagemill.engine.config import Admission, PreemptionMode, SchedulingPolicy
from pagemill.engine.errors import ConfigError
from pagemill.engine.simulator.device import Device

Forecast = Literal["lengths", "none"]
Progress = Callable[[int, int], None]  # requests ended, requests in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What an engine in a simulation is started with. Sizes in tokens.

    max_tokens: what requests ask for, which admission and preemption plan with; a recorded output that is longer asks
    for its own length. None: every request asks for exactly what it will get. max_model_len: None for no limit.
    forecast: lengths, where optimistic admission keeps free what those who run are expected to grow by, as the engine
    does; none, where it keeps 1 % free and no deadline can be forecast.
    swap_tokens: host memory for the blocks of preempted requests; None: the device's. ttl_s: who has not ended so long
    after its arrival is aborted, as the queue's worker does; None: nobody. refuse_late: with a ttl, whoever could not
    start by then is refused on arrival. max_waiting_...: whoever would be more than that is refused on arrival.
    """

    device: Device
    block_size: int = 16
    pool_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    max_tokens: int | None = 1024
    enable_prefix_caching: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    admission: Admission = "optimistic"
    forecast: Forecast = "lengths"
    preemption_mode: PreemptionMode = "auto"
    swap_tokens: int | None = None
    ttl_s: float | None = None
    refuse_late: bool = True
    max_waiting_requests: int | None = None
    max_waiting_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.tokens < self.block_size:
            raise ConfigError(f"a pool of {self.tokens} tokens holds no block of {self.block_size}")
        if self.seats < 1 or self.budget < 1:
            raise ConfigError(f"{self.seats} sequences and a budget of {self.budget} tokens run nothing")
        for name in ("max_model_len", "max_tokens", "max_waiting_requests", "max_waiting_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.num_host_blocks < 0:
            raise ConfigError(f"swap_tokens must not be negative, got {self.swap_tokens}")
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ConfigError(f"ttl must be above 0 s, got {self.ttl_s}")

    @property
    def tokens(self) -> int:
        return self.device.pool_tokens if self.pool_tokens is None else self.pool_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks that sequences can hold, without the null block."""
        return self.tokens // self.block_size

    @property
    def num_host_blocks(self) -> int:
        return (self.device.swap_tokens if self.swap_tokens is None else self.swap_tokens) // self.block_size

    @property
    def seats(self) -> int:
        return self.device.max_num_seqs if self.max_num_seqs is None else self.max_num_seqs

    @property
    def budget(self) -> int:
        """Tokens of a step."""
        given = self.max_num_batched_tokens
        return self.device.max_num_batched_tokens if given is None else given

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device.name,
            "block_size": self.block_size,
            "pool_tokens": self.tokens,
            "num_blocks": self.num_blocks,
            "max_num_seqs": self.seats,
            "max_num_batched_tokens": self.budget,
            "max_model_len": self.max_model_len,
            "max_tokens": self.max_tokens,
            "prefix_caching": self.enable_prefix_caching,
            "scheduling_policy": self.scheduling_policy,
            "admission": self.admission,
            "forecast": self.forecast,
            "preemption_mode": self.preemption_mode,
            "num_host_blocks": self.num_host_blocks,
            "ttl_s": self.ttl_s,
            "refuse_late": self.refuse_late,
            "max_waiting_requests": self.max_waiting_requests,
            "max_waiting_prompt_tokens": self.max_waiting_prompt_tokens,
        }
