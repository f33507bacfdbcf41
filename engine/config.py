"""The engine's settings, with vLLM's names. The metadata of a field is its help text on the command line."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from pagemill.engine.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
PreemptionMode = Literal["auto", "recompute", "swap"]
Admission = Literal["optimistic", "reserve"]
SchedulingPolicy = Literal["fcfs", "priority", "fair"]


def _setting(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is started with. Raises `ConfigError`, naming the setting, on a value out of range.

    Sizes are tokens, except where the name says bytes. `None` means: found out from the model or the machine.
    """

    model: str = _setting("smollm2-135m", "model folder, .gguf file, cached Hugging Face name, or smollm2-135m")
    served_model_name: str | None = _setting(None, "name that requests use for the model; default: the model setting")
    dtype: DType = _setting("auto", "weights and KV cache: auto, float32, bfloat16 or float16")
    device: Device = _setting("auto", "auto, cpu or cuda")
    block_size: int = _setting(16, "tokens in one KV block, 1 to 256")
    gpu_memory_utilization: float = _setting(
        0.85, "share of the device's memory (on the CPU: of the memory this process may use) for model and KV pool"
    )
    kv_cache_memory_bytes: int | None = _setting(None, "size of the KV pool in bytes, instead of profiling")
    num_blocks_override: int | None = _setting(None, "size of the KV pool in blocks, instead of profiling")
    max_model_len: int | None = _setting(None, "longest prompt + output in tokens; default: the model's own")
    max_num_seqs: int = _setting(128, "sequences that run at once at most")
    max_num_batched_tokens: int | None = _setting(None, "token budget of a step; default 512 on the CPU, 4096 on CUDA")
    swap_space: float | None = _setting(
        None, "host memory in GiB for the blocks of preempted requests; default 4 on CUDA, none on the CPU"
    )
    preemption_mode: PreemptionMode = _setting(
        "auto", "what happens to a preempted request's blocks: recompute, swap, or auto (whichever costs less)"
    )
    admission: Admission = _setting(
        "optimistic",
        "optimistic: a request starts when its prompt fits; reserve: when all it may need does (no preemption)",
    )
    scheduling_policy: SchedulingPolicy = _setting(
        "fcfs", "who starts next: fcfs, by arrival; priority, by class with ageing; fair, equal service for each tenant"
    )
    max_waiting_requests: int | None = _setting(None, "requests that may wait in the engine; more are refused")
    max_waiting_prompt_tokens: int | None = _setting(None, "prompt tokens that may wait in the engine")
    enable_prefix_caching: bool = _setting(True, "keep the blocks of finished requests and share common prefixes")
    default_max_tokens: int = _setting(1024, "max_tokens of a request that does not say")
    skip_tokenizer_init: bool = _setting(False, "serve token ids only, without a tokenizer")
    threads: int | None = _setting(None, "CPU threads of the model; default: the cores this process may use")
    cache_dir: str | None = _setting(None, "converted models and compiled kernels; default ~/.cache/pagemill")

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        _one_of("preemption_mode", self.preemption_mode, ("auto", "recompute", "swap"))
        _one_of("scheduling_policy", self.scheduling_policy, ("fcfs", "priority", "fair"))
        _one_of("admission", self.admission, ("optimistic", "reserve"))
        if self.swap_space is not None and not 0 <= self.swap_space <= 2**20:
            raise ConfigError(f"swap_space must be in [0, {2**20}] GiB, got {self.swap_space}")
        _within("block_size", self.block_size, 1, 256)
        _within("max_num_seqs", self.max_num_seqs, 1, 65536)
        _within("default_max_tokens", self.default_max_tokens, 1, 2**31 - 1)
        sizes = (
            "max_model_len",
            "max_num_batched_tokens",
            "num_blocks_override",
            "kv_cache_memory_bytes",
            "threads",
            "max_waiting_requests",
            "max_waiting_prompt_tokens",
        )
        for name in sizes:
            if getattr(self, name) is not None:
                _within(name, getattr(self, name), 1, 2**62)
        if isinstance(self.gpu_memory_utilization, bool) or not isinstance(self.gpu_memory_utilization, int | float):
            raise ConfigError("gpu_memory_utilization must be a number")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if not self.model:
            raise ConfigError("model must not be empty")

    @property
    def model_name(self) -> str:
        """The name that requests may use."""
        return self.served_model_name or self.model

    def replace(self, **changes: Any) -> EngineConfig:
        return dataclasses.replace(self, **changes)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _within(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{name} must be in [{low}, {high}], got {value}")
