"""Compile the Triton kernels ahead of time, without a GPU, and read what the compiler made of them.

`python -m pagemill.kernels.build` compiles every kernel for common model shapes and three GPU generations through
the production path (the same argument binding and cache keys as a launch), prints registers, spills, shared memory and
memory access widths, and fails where a kernel would be slow for a reason that is visible in its machine code: registers
spilled to memory, or keys and values read in pieces narrower than a 32-bit word, which is what becomes of a pool whose
strides lost their alignment.

It is a program and not a function to call from an engine: it replaces Triton's driver for the whole process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from pagemill.kernels.layout import KVLayout
from pagemill.kernels.metadata import AttentionMetadata
from pagemill.kernels.ops import LogitEdits, SampleBatch
from pagemill.kernels.triton.configs import DeviceFacts
from pagemill.kernels.triton.ops import TritonOps

CAPABILITIES = (80, 90, 100)
NO_SPILLS = (90,)
"""Generations on which a spill is an error. Elsewhere the table shows it."""

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""Shared memory that one program may take (CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability")."""

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model the kernels are specialised by."""

    name: str
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    block_size: int = 16
    window: int = 0
    dtype: torch.dtype = torch.bfloat16


COMMON_SHAPES = (
    ModelShape("smollm2-135m", 9, 3, 64, 576, 1536, 49152),
    ModelShape("llama-3-8b", 32, 8, 128, 4096, 14336, 128256, block_size=64),
)
ALL_SHAPES = (
    *COMMON_SHAPES,
    ModelShape("smollm2-135m fp32", 9, 3, 64, 576, 1536, 49152, dtype=torch.float32),
    ModelShape("opt-125m", 12, 12, 64, 768, 3072, 50272, dtype=torch.float16),
    ModelShape("opt-2.7b", 32, 32, 80, 2560, 10240, 50272, dtype=torch.float16),
    ModelShape("phi-3-mini", 32, 32, 96, 3072, 8192, 32064),
    ModelShape("llama-3-8b", 32, 8, 128, 4096, 14336, 128256),
    ModelShape("qwen2-7b", 28, 4, 128, 3584, 18944, 152064),
    ModelShape("mistral-7b", 32, 8, 128, 4096, 14336, 32000, window=4096),
    ModelShape("gemma-7b", 16, 16, 256, 3072, 24576, 256000),
)


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One kernel's machine code, read. Sizes in bytes; loads and stores of global memory counted in the listing."""

    capability: int
    model: str
    kernel: str
    variant: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    wide_accesses: int
    narrow_accesses: int
    matrix_unit: str
    compile_s: float


class CompileOnlyOps(TritonOps):
    """`TritonOps` whose launches only compile. Tensors may lie on the CPU: their types, strides and alignment count."""

    def __init__(self, capability: int) -> None:
        super().__init__()
        self._capability = capability
        self.compiled: list[tuple[Any, dict[str, Any], float]] = []

    def _query_device(self, device: torch.device) -> DeviceFacts:
        return DeviceFacts(self._capability, multiprocessors=132)

    def _launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if 0 not in grid:
            begin = time.perf_counter()
            compiled = kernel.warmup(*args, grid=grid, **options, enable_fp_fusion=True)
            self.compiled.append((compiled, options, time.perf_counter() - begin))


class _DriverWithoutDevice:
    """As much of a Triton driver as compiling needs. The capability doubles as device index: kernels cache by it."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_kernels(capability: int, shapes: Sequence[ModelShape]) -> Iterator[CompiledKernel]:
    """Compile all kernels for the shapes and read each distinct binary once. Replaces the process's Triton driver."""
    seen: set[str] = set()
    for shape in shapes:
        calls = partial(call_all, shape=shape)
        yield from compile_calls(capability, f"{shape.name}, block {shape.block_size}", calls, seen)


def compile_calls(
    capability: int, name: str, calls: Callable[[TritonOps], None], seen: set[str]
) -> Iterator[CompiledKernel]:
    """Compile what `calls` launches and read each binary whose hash is not `seen` yet."""
    driver.set_active(_DriverWithoutDevice(capability))
    ops = CompileOnlyOps(capability)
    calls(ops)
    for compiled, options, seconds in ops.compiled:
        if compiled.hash not in seen:
            seen.add(compiled.hash)
            yield _read(compiled, options, capability, name, seconds)


def call_all(ops: TritonOps, shape: ModelShape) -> None:
    """Every operation once, with a step of one long decode and one prefill so that all attention variants are made."""
    layout = KVLayout(
        num_blocks=2,
        num_layers=2,
        block_size=shape.block_size,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        form=ops.kv_form,
    )
    pool = layout.allocate()
    kv = layout.layer(pool, 1)
    tokens = 201
    meta = AttentionMetadata.build(
        query_start=np.array([0, 1, tokens]),
        seq_lens=np.array([100_000, tokens - 1]),
        block_tables=np.zeros((2, 100_000 // shape.block_size + 16), np.int32),
        slot_mapping=np.zeros(tokens, np.int64),
        positions=np.zeros(tokens, np.int64),
    )
    heads, kv_heads, dim = shape.query_heads, shape.kv_heads, shape.head_dim
    qkv = torch.zeros((tokens, (heads + 2 * kv_heads) * dim), dtype=shape.dtype)
    query, key, value = torch.split(qkv.view(tokens, -1, dim), [heads, kv_heads, kv_heads], dim=1)
    ops.rotary_embedding(query, key, meta.positions, torch.zeros((tokens, dim)))
    ops.write_kv(key, value, kv, meta.slot_mapping)
    ops.paged_attention(query, kv, meta, scale=1.0, sliding_window=shape.window)
    x = torch.zeros((tokens, shape.hidden), dtype=shape.dtype)
    weight = torch.zeros(shape.hidden, dtype=shape.dtype)
    ops.rms_norm(x, weight, 1e-5)
    ops.add_rms_norm(x, x, weight, 1e-5)
    ops.silu_and_mul(torch.zeros((tokens, 2 * shape.intermediate), dtype=shape.dtype))
    ops.copy_blocks(pool, torch.tensor([[0, 1]]))
    logits = torch.zeros((2, shape.vocab))
    ops.edit_logits(logits, LogitEdits.one_of_each(shape.vocab))
    ops.logprobs(logits, torch.zeros(2, dtype=torch.int64), 5)
    batch = SampleBatch.greedy(2)
    ops.sample(logits, batch)
    ops.sample(logits, dataclasses.replace(batch, temperature=batch.temperature + 1, top_k=batch.top_k + 5))


def _read(compiled: Any, options: dict[str, Any], capability: int, name: str, seconds: float) -> CompiledKernel:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        listing = _tool("nvdisasm", "-c", file.name)
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if match is None:
        raise RuntimeError(f"cuobjdump says nothing about resources:\n{usage}")
    accesses = re.findall(r"\b(?:LDG|LDGSTS|STG)\.E[.\w]*", listing)
    matrix = [name for name in ("UTCHMMA", "HGMMA", "HMMA", "FFMA") if re.search(rf"\b{name}\b", listing)]
    block_m, tile = options.get("BLOCK_M"), options.get("TILE")
    return CompiledKernel(
        capability=capability,
        model=name,
        kernel=compiled.metadata.name.removesuffix("_kernel"),
        variant=f"{block_m}x{tile} rows x keys, {options['num_warps']} warps" if tile else "",
        registers=int(match[1]),
        spilled_bytes=int(match[2]) + int(match[3]),
        shared_bytes=compiled.metadata.shared,
        wide_accesses=sum(".128" in access for access in accesses),
        narrow_accesses=sum(bool(re.search(r"\.[US](8|16)\b", access)) for access in accesses),
        matrix_unit=matrix[0] if matrix else "",
        compile_s=seconds,
    )


def _tool(name: str, *arguments: str) -> str:
    result = subprocess.run([_TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    return result.stdout + result.stderr


def faults(kernel: CompiledKernel) -> list[str]:
    """What is wrong with a kernel, in words; empty where nothing is."""
    found = []
    if kernel.spilled_bytes and kernel.capability in NO_SPILLS:
        found.append(f"spills {kernel.spilled_bytes} bytes of registers")
    if kernel.shared_bytes > SHARED_KIB[kernel.capability] * 1024:
        found.append(f"takes {kernel.shared_bytes} of {SHARED_KIB[kernel.capability] * 1024} bytes of shared memory")
    if kernel.kernel in ("paged_attention", "write_kv") and kernel.narrow_accesses:
        found.append(f"{kernel.narrow_accesses} accesses narrower than 32 bits")
    if kernel.kernel == "paged_attention" and not kernel.wide_accesses:
        found.append("no 128-bit accesses")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 where a kernel has faults."""
    parser = argparse.ArgumentParser(prog="python -m pagemill.kernels.build", description=__doc__.split("\n\n")[0])
    parser.add_argument("--capability", type=int, nargs="+", default=CAPABILITIES, choices=SHARED_KIB,
                        metavar="N", help=f"GPU generations among {list(SHARED_KIB)} (default: 80 90 100)")  # fmt: skip
    parser.add_argument("--all", action="store_true", help="ten model shapes (minutes) instead of two")
    parser.add_argument("--model", help="only shapes of this name, for example llama-3-8b")
    parser.add_argument("--json", action="store_true", help="print one JSON object per kernel")
    options = parser.parse_args(arguments)
    shapes = [s for s in (ALL_SHAPES if options.all else COMMON_SHAPES) if options.model in (None, s.name)]
    if not shapes:
        parser.error(f"no shape is named {options.model}")
    if not options.json:
        print(_HEADER)
    faulty = 0
    for capability in options.capability:
        for kernel in compile_kernels(capability, shapes):
            found = faults(kernel)
            faulty += bool(found)
            if options.json:
                print(json.dumps(dataclasses.asdict(kernel) | {"faults": found}), flush=True)
            else:
                print(_line(kernel, found), flush=True)
    if faulty:
        print(f"{faulty} kernels have faults", file=sys.stderr)
    return 1 if faulty else 0


_HEADER = (
    f"{'sm':>4} {'kernel':16} {'model':29} {'variant':29} {'reg':>4} {'spill':>6} {'shared':>7} {'128-bit':>7}"
    f" {'narrow':>6} {'unit':8} {'s':>5}"
)


def _line(kernel: CompiledKernel, found: list[str]) -> str:
    line = (
        f"{kernel.capability:>4} {kernel.kernel:16} {kernel.model:29} {kernel.variant:29} {kernel.registers:>4}"
        f" {kernel.spilled_bytes:>6} {kernel.shared_bytes:>7} {kernel.wide_accesses:>7} {kernel.narrow_accesses:>6}"
        f" {kernel.matrix_unit:8} {kernel.compile_s:>5.1f}"
    )
    return line + (f"  <- {'; '.join(found)}" if found else "")


if __name__ == "__main__":
    sys.exit(main())
