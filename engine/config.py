"""The engine's settings, with vLLM's names. The metadata of a field is its help text on the command line."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any, Literal

from pagemill.engine.errors import ConfigError
from pagemill.engine.reasoning import REASONING_PARSERS, ReasoningParserSetting
from pagemill.engine.tool_calls import PARSERS, ToolParserSetting
from pagemill.engine.values import as_integer, as_number, as_text, shown

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
PreemptionMode = Literal["auto", "recompute", "swap"]
Admission = Literal["optimistic", "reserve"]
SchedulingPolicy = Literal["fcfs", "priority", "fair"]
Quantization = Literal["auto", "none", "int8", "int4", "gguf"]

SPECULATIVE_TOKENS = 7  # with the token that comes in any case a row of eight, which kernels like
MAX_DRAFTS = 64
MAX_LOOKUP = 16


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
    quantization: Quantization = _setting(
        "auto",
        "weights on the CPU: int8, int4 (in groups of 32), gguf (as a .gguf file stores them) or none; "
        "auto is gguf for a .gguf file unless dtype is set, else none",
    )
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
    max_waiting_requests: int | None = _setting(None, "requests that may wait for the engine, in it and in the queue")
    max_waiting_prompt_tokens: int | None = _setting(
        None, "prompt tokens that may wait for the engine, in it and in the queue"
    )
    enable_prefix_caching: bool = _setting(True, "keep the blocks of finished requests and share common prefixes")
    num_speculative_tokens: int = _setting(
        SPECULATIVE_TOKENS, "tokens guessed by n-gram look-up and checked in one step, where that pays; 0 guesses none"
    )
    prompt_lookup_max: int = _setting(4, "longest run of last tokens that is looked up, 1 to 16")
    prompt_lookup_min: int = _setting(2, "shortest run of last tokens that is looked up")
    default_max_tokens: int = _setting(1024, "max_tokens of a request that does not say")
    tool_call_parser: ToolParserSetting = _setting(
        "auto",
        f"how the model writes calls of tools: {', '.join(PARSERS)}, none, or auto (by its chat template)",
    )
    reasoning_parser: ReasoningParserSetting = _setting(
        "auto",
        f"how the model writes its reasoning: {', '.join(REASONING_PARSERS)}, none, or auto (by its chat template)",
    )
    skip_tokenizer_init: bool = _setting(False, "serve token ids only, without a tokenizer")
    threads: int | None = _setting(None, "CPU threads of the model; default: the cores this process may use")
    cache_dir: str | None = _setting(None, "converted models and compiled kernels; default ~/.cache/pagemill")

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _one_of("quantization", self.quantization, ("auto", "none", "int8", "int4", "gguf"))
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        _one_of("preemption_mode", self.preemption_mode, ("auto", "recompute", "swap"))
        _one_of("scheduling_policy", self.scheduling_policy, ("fcfs", "priority", "fair"))
        _one_of("admission", self.admission, ("optimistic", "reserve"))
        _one_of("tool_call_parser", self.tool_call_parser, ("auto", "none", *PARSERS))
        _one_of("reasoning_parser", self.reasoning_parser, ("auto", "none", *REASONING_PARSERS))
        for name in ("model", "served_model_name", "cache_dir"):
            self._keep(name, _text(name, getattr(self, name)))
        for name in ("enable_prefix_caching", "skip_tokenizer_init"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {shown(getattr(self, name))}")
        self._keep("block_size", _within("block_size", self.block_size, 1, 256))
        self._keep("max_num_seqs", _within("max_num_seqs", self.max_num_seqs, 1, 65536))
        self._keep("default_max_tokens", _within("default_max_tokens", self.default_max_tokens, 1, 2**31 - 1))
        self._keep(
            "num_speculative_tokens", _within("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_DRAFTS)
        )
        self._keep("prompt_lookup_max", _within("prompt_lookup_max", self.prompt_lookup_max, 1, MAX_LOOKUP))
        self._keep("prompt_lookup_min", _within("prompt_lookup_min", self.prompt_lookup_min, 1, MAX_LOOKUP))
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min must be at most prompt_lookup_max, got {self.prompt_lookup_min} "
                f"and {self.prompt_lookup_max}"
            )
        for name, most in _SIZES.items():
            if getattr(self, name) is not None:
                self._keep(name, _within(name, getattr(self, name), 1, most))
        if self.swap_space is not None:
            self._keep("swap_space", _number("swap_space", self.swap_space, "[0, 1048576] GiB", 0.0, 2.0**20))
        share = _number("gpu_memory_utilization", self.gpu_memory_utilization, "(0, 1]", 5e-324, 1.0)
        self._keep("gpu_memory_utilization", share)
        if not self.model:
            raise ConfigError("model must not be empty")

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def max_sampled_rows(self) -> int:
        """Rows of logits that a step has at most: one a sequence, and drafts."""
        return self.max_num_seqs + self.num_speculative_tokens

    @property
    def model_name(self) -> str:
        """The name that requests may use."""
        return self.served_model_name or self.model

    def replace(self, **changes: Any) -> EngineConfig:
        return dataclasses.replace(self, **changes)


_SIZES = {
    "max_model_len": 2**62,
    "max_num_batched_tokens": 2**62,
    "num_blocks_override": 2**62,
    "kv_cache_memory_bytes": 2**62,
    "threads": 1024,  # past the cores of any machine; a team of many thousands takes the process's last thread
    "max_waiting_requests": 2**62,
    "max_waiting_prompt_tokens": 2**62,
}


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {shown(value)}")


def _within(name: str, value: object, low: int, high: int) -> int:
    integer = as_integer(value)
    if integer is None:
        raise ConfigError(f"{name} must be an integer, got {shown(value)}")
    if not low <= integer <= high:
        raise ConfigError(f"{name} must be in [{low}, {high}], got {shown(value)}")
    return integer


def _number(name: str, value: object, bounds: str, low: float, high: float) -> float:
    number = as_number(value)
    if number is None or not low <= number <= high:
        raise ConfigError(f"{name} must be a number in {bounds}, got {shown(value)}")
    return number


def _text(name: str, value: object) -> str | None:
    if isinstance(value, PathLike):
        value = fspath(value)
    if value is not None and as_text(value) is None:
        raise ConfigError(f"{name} must be text, valid in Unicode, got {shown(value)}")
    return as_text(value)
