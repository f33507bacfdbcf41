"""How many KV blocks the memory allows: what this process may use, less the weights, less the largest step.

The peak of a step is measured by running one, not estimated. The pool is sized once, at start; on the CPU its memory is
committed by the operating system as blocks are first written.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError
from pagemill.engine.machine import memory_limit, process_memory

__all__ = ["BudgetTable", "CpuMemory", "CudaMemory", "MemoryMeter", "memory_limit", "size_pool"]

MIB = 1 << 20
_NULL_BLOCKS = 1


class MemoryMeter(Protocol):
    """Measures the memory that model and pool live in. All in bytes."""

    def limit(self) -> int:
        """What the fraction `gpu_memory_utilization` is taken of."""
        ...

    def held(self) -> int:
        """What is taken of it at this moment."""
        ...

    def peak(self, run: Callable[[], object]) -> int:
        """What `run` takes at its highest, beyond what is held before."""
        ...


class CpuMemory:
    """Memory of this process, within the limits of machine and control groups."""

    def limit(self) -> int:
        return memory_limit()

    def held(self) -> int:
        return process_memory()

    def peak(self, run: Callable[[], object]) -> int:
        with contextlib.suppress(
            OSError
        ):  # without it the peak counts from the process's start: too high, never too low
            Path("/proc/self/clear_refs").write_text("5")
        before = self.held()
        mapped = _resident() - before
        run()
        return max(0, _highest() - mapped - before)


class CudaMemory:
    """Memory of one CUDA device; what other processes hold on it counts as taken."""

    def __init__(self, device: str) -> None:
        self._device = device

    def limit(self) -> int:
        import torch

        return int(torch.cuda.mem_get_info(self._device)[1])

    def held(self) -> int:
        import torch

        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def peak(self, run: Callable[[], object]) -> int:
        import torch

        self.held()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_reserved(self._device)) - int(before)


def _status(name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return 0


def _resident() -> int:
    return _status("VmRSS")


def _highest() -> int:
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetTable:
    """Where the memory goes, in bytes; logged when an engine starts.

    `weights` and `other` (interpreter, libraries, compiled kernels, other users of the device) are held already,
    `activations` is the peak of the largest step. `quantization` is that of the weights, `source` the setting that
    sized the pool. `num_blocks` counts the null block.
    """

    device: str
    limit: int
    fraction: float
    weights: int
    quantization: str
    other: int
    activations: int
    pool: int
    num_blocks: int
    block_size: int
    bytes_per_block: int
    source: str

    def to_dict(self) -> dict[str, Any]:
        """Flat, with sizes in MiB: fit for a structured log."""
        sizes = ("limit", "weights", "other", "activations", "pool")
        return {
            "device": self.device,
            **{f"{name}_mib": round(getattr(self, name) / MIB, 1) for name in sizes},
            "quantization": self.quantization,
            "fraction": self.fraction,
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "kv_tokens": (self.num_blocks - _NULL_BLOCKS) * self.block_size,
            "source": self.source,
        }

    def __str__(self) -> str:
        rows = [
            (f"{self.device}: memory that may be used", self.limit),
            (f"x {self.fraction:g} (gpu_memory_utilization)", int(self.limit * self.fraction)),
            ("- weights" if self.quantization == "none" else f"- weights ({self.quantization})", self.weights),
            ("- other, held already", self.other),
            ("- activations of the largest step", self.activations),
            (f"KV pool, {self.num_blocks} blocks of {self.block_size} tokens, by {self.source}", self.pool),
        ]
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}} {size / MIB:>10,.1f} MiB" for label, size in rows)


def size_pool(
    config: EngineConfig,
    *,
    device: str,
    max_model_len: int,
    bytes_per_block: int,
    limit: int,
    weights: int,
    held: int,
    activations: int,
    quantization: str = "none",
) -> BudgetTable:
    """Decide the number of blocks, the null block included.

    `held`: bytes taken before the pool is made, `weights` among them. `num_blocks_override` (usable blocks) and then
    `kv_cache_memory_bytes` win over the fraction. Never more than max_num_seqs sequences of max_model_len can fill,
    unless overridden. Raises `ConfigError`, with the numbers, where not even a sequence of two blocks fits or where
    the pool asked for is larger than the memory.
    """
    longest = -(-max_model_len // config.block_size)
    most = config.max_num_seqs * longest + _NULL_BLOCKS
    if config.num_blocks_override is not None:
        source, blocks = "num_blocks_override", config.num_blocks_override + _NULL_BLOCKS
    elif config.kv_cache_memory_bytes is not None:
        source, blocks = "kv_cache_memory_bytes", min(most, config.kv_cache_memory_bytes // bytes_per_block)
    else:
        source = "gpu_memory_utilization"
        blocks = min(most, (int(limit * config.gpu_memory_utilization) - held - activations) // bytes_per_block)
    blocks = max(0, blocks)
    table = BudgetTable(
        device=device,
        limit=limit,
        fraction=config.gpu_memory_utilization,
        weights=weights,
        quantization=quantization,
        other=max(0, held - weights),
        activations=activations,
        pool=blocks * bytes_per_block,
        num_blocks=blocks,
        block_size=config.block_size,
        bytes_per_block=bytes_per_block,
        source=source,
    )
    _check(table, need=min(2, longest) + _NULL_BLOCKS, room=limit - held - activations)
    return table


def _check(table: BudgetTable, *, need: int, room: int) -> None:
    if table.num_blocks < need:
        raise ConfigError(
            f"the KV pool has room for {max(0, table.num_blocks - _NULL_BLOCKS)} blocks of {table.block_size} tokens, "
            f"and not even one short sequence fits: at least {need} blocks with the null block, "
            f"{need * table.bytes_per_block / MIB:.1f} MiB, are needed. Raise {table.source}, free memory, or lower "
            f"max_num_batched_tokens, max_num_seqs or block_size.\n{table}"
        )
    if table.pool > room:
        raise ConfigError(
            f"{table.source} asks for a KV pool of {table.pool / MIB:.1f} MiB, but only {max(0, room) / MIB:.1f} MiB "
            f"are left of the memory that may be used; lower it.\n{table}"
        )
