"""Check the Triton kernels on a real GPU against the reference, then time them. One command, a few minutes:

    python bench/gpu_check.py [--json results.json]

Correctness first: every operation on poisoned memory, twice, with equal bits. Then ceilings (what this device copies
and multiplies per second), then the kernels as a share of the floor that those ceilings allow. Work that the time
budget does not cover is named, not silently dropped. `--interpret` runs the whole script in Triton's interpreter on a
CPU, with few checks, tiny shapes and no figures: it shows that the script itself works.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pagemill.kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class Timing:
    """Median seconds of a call in two independent runs, and the floor by bytes moved and products made."""

    name: str
    seconds: tuple[float, float]
    floor_s: float
    bytes_moved: float
    flops: float


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device was measured to do: bytes per second copied, floating-point operations per second multiplied."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class AttentionLoad:
    """`sequences` equal ones with `queries` new tokens each and `context` tokens in all."""

    sequences: int
    queries: int
    context: int
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def name(self) -> str:
        shape = f"{self.query_heads}/{self.kv_heads}/{self.head_dim} block {self.block_size}"
        if self.queries == 1:
            return f"decode {self.sequences} x {self.context}, {shape}"
        return f"prefill {self.sequences} x {self.queries} of {self.context}, {shape}"


ATTENTION_LOADS = (
    *(AttentionLoad(count, 1, context) for count in (1, 16, 64, 256) for context in (1024, 4096)),
    AttentionLoad(1, 1, 32768),
    AttentionLoad(16, 1, 32768),
    AttentionLoad(64, 1, 4096, block_size=64),
    AttentionLoad(64, 1, 4096, query_heads=9, kv_heads=3, head_dim=64),
    AttentionLoad(64, 1, 4096, query_heads=32, kv_heads=32, head_dim=80),
    AttentionLoad(64, 1, 4096, query_heads=28, kv_heads=4),
    AttentionLoad(1, 512, 512),
    AttentionLoad(1, 4096, 4096),
    AttentionLoad(1, 2048, 32768),
    AttentionLoad(1, 4096, 4096, block_size=64),
)
DRY_LOADS = (AttentionLoad(2, 1, 40, 4, 2, 64), AttentionLoad(1, 20, 40, 4, 2, 64))


def check_kernels(ops: Ops, device: str, out_of_time: Callable[[], bool], *, dry: bool) -> list[dict[str, Any]]:
    """Every check twice; a check is bad if its error is too large or its two results differ in a bit."""
    import torch

    from pagemill.kernels.triton.checks import all_checks, poisoned_scratch

    results: list[dict[str, Any]] = []
    checks = all_checks()[:: 9 if dry else 1]
    for number, check in enumerate(checks):
        if out_of_time():
            print(f"out of time: {len(checks) - number} checks left out, from {check.name!r} on")
            break
        begin = time.perf_counter()
        try:
            with poisoned_scratch():
                outcome, again = check.run(ops, device), check.run(ops, device)
            repeatable = torch.equal(outcome.result.nan_to_num(), again.result.nan_to_num())
            result = {"error": outcome.error, "tolerance": outcome.tolerance, "repeatable": repeatable,
                      "bad": not (outcome.passed and repeatable)}  # fmt: skip
        except (RuntimeError, ValueError) as error:
            result = {"exception": repr(error), "bad": True}
        results.append({"check": check.name, "seconds": time.perf_counter() - begin, **result})
        if result["bad"]:
            print(f"BAD  {check.name}: {result}")
    bad = sum(result["bad"] for result in results)
    print(f"correctness: {bad} of {len(results)} checks bad")
    return results


def measure_ceilings(device: str) -> Ceilings:
    import torch

    megabytes = 1024
    source = torch.empty(megabytes * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = graph_seconds([lambda: target.copy_(source)])
    size = 8192
    left, right = (torch.randn((size, size), device=device, dtype=torch.bfloat16) for _ in range(2))
    product_s = graph_seconds([lambda: left @ right])
    return Ceilings(2 * source.numel() / copy_s, 2 * size**3 / product_s)


def graph_seconds(calls: Sequence[Callable[[], object]], *, repeats: int = 15) -> float:
    """Median seconds of one call, the calls recorded in one CUDA graph so that the host's launches do not count.

    The calls should use inputs that together exceed the device's cache, as the layers of a model do.
    """
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    samples = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return sorted(samples)[len(samples) // 2]


def eager_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds of one call with the host's share: for calls that a graph cannot hold, and for the dry run."""
    import torch

    for call in calls:
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for call in calls:
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / len(calls)


@dataclass(frozen=True, slots=True)
class Workload:
    """Calls on rotating inputs, what one call moves and multiplies, and whether a CUDA graph can hold it."""

    name: str
    calls: list[Callable[[], object]]
    bytes_moved: float
    flops: float = 0.0
    capturable: bool = True


def attention_workload(ops: Ops, device: str, load: AttentionLoad) -> list[Workload]:
    import numpy as np
    import torch

    from pagemill.kernels.layout import KVLayout
    from pagemill.kernels.metadata import AttentionMetadata

    dtype = torch.bfloat16
    blocks = -(-load.context // load.block_size)
    layout = KVLayout(
        num_blocks=1 + load.sequences * blocks,
        num_layers=3,
        block_size=load.block_size,
        num_kv_heads=load.kv_heads,
        head_dim=load.head_dim,
        dtype=dtype,
        device=device,
        form=ops.kv_form,
    )
    pool = layout.allocate().normal_()
    order = np.random.default_rng(0).permutation(np.arange(1, layout.num_blocks))
    past = load.context - load.queries
    tokens = load.sequences * load.queries
    meta = AttentionMetadata.build(
        query_start=np.arange(load.sequences + 1) * load.queries,
        seq_lens=np.full(load.sequences, load.context),
        block_tables=order.reshape(load.sequences, blocks),
        slot_mapping=np.full(tokens, -1),
        positions=np.tile(np.arange(past, load.context), load.sequences),
        device=device,
    )
    query = torch.randn((tokens, load.query_heads, load.head_dim), device=device).to(dtype)

    def call(layer: int) -> Callable[[], object]:
        kv = layout.layer(pool, layer)
        return lambda: ops.paged_attention(query, kv, meta, scale=load.head_dim**-0.5)

    kv_bytes = 2 * load.sequences * load.context * load.kv_heads * load.head_dim * dtype.itemsize
    pairs = load.sequences * load.queries * (past + (load.queries + 1) / 2)
    return [
        Workload(
            load.name,
            [call(layer) for layer in range(layout.num_layers)],
            kv_bytes + 2 * query.numel() * dtype.itemsize,
            4.0 * pairs * load.query_heads * load.head_dim,
        )
    ]


def companion_workloads(ops: Ops, device: str, tokens: int, hidden: int, vocab: int) -> list[Workload]:
    """The operations beside attention, at a step of `tokens`, on four rotating inputs."""
    import numpy as np
    import torch

    from pagemill.kernels.layout import KVLayout
    from pagemill.kernels.ops import SampleBatch

    dtype, heads, kv_heads, dim = torch.bfloat16, hidden // 64, max(hidden // 256, 1), 64
    size = dtype.itemsize
    layout = KVLayout(num_blocks=tokens // 16 + 10, num_layers=1, block_size=16, num_kv_heads=kv_heads, head_dim=dim,
                      dtype=dtype, device=device, form=ops.kv_form)  # fmt: skip
    pool = layout.allocate()
    kv = layout.layer(pool, 0)
    slots = torch.from_numpy(np.random.default_rng(1).permutation(tokens) + 16).to(device)
    positions = torch.arange(tokens, device=device)
    cos_sin = torch.randn((tokens, dim), device=device)
    weight = torch.ones(hidden, dtype=dtype, device=device)
    xs = [torch.randn((tokens, hidden), device=device).to(dtype) for _ in range(4)]
    gates = [torch.randn((tokens, 8 * hidden), device=device).to(dtype) for _ in range(4)]
    qkvs = [torch.randn((tokens, heads + 2 * kv_heads, dim), device=device).to(dtype) for _ in range(4)]
    logits = [torch.randn((min(tokens, 64), vocab), device=device) for _ in range(2)]
    rows = logits[0].shape[0]

    def drawn(top_p: float) -> SampleBatch:
        greedy = SampleBatch.greedy(rows)
        return dataclasses.replace(
            greedy, temperature=np.ones(rows, np.float32), top_p=np.full(rows, top_p, np.float32)
        )

    def rotate(qkv: torch.Tensor) -> Callable[[], object]:
        return lambda: ops.rotary_embedding(qkv[:, :heads], qkv[:, heads:-kv_heads], positions, cos_sin)

    def write(qkv: torch.Tensor) -> Callable[[], object]:
        return lambda: ops.write_kv(qkv[:, heads:-kv_heads], qkv[:, -kv_heads:], kv, slots)

    def sample(batch: SampleBatch) -> list[Callable[[], object]]:
        return [partial(ops.sample, row, batch) for row in logits]

    row_bytes = tokens * hidden * size
    logit_bytes = 4 * logits[0].numel()
    at = f"{tokens} tokens, hidden {hidden}"
    return [
        Workload(f"rms_norm, {at}", [partial(ops.rms_norm, x, weight, 1e-5) for x in xs], 2 * row_bytes),
        Workload(f"add_rms_norm, {at}", [partial(ops.add_rms_norm, x, x, weight, 1e-5) for x in xs], 3 * row_bytes),
        Workload(f"silu_and_mul, {at}", [partial(ops.silu_and_mul, gate) for gate in gates], 12 * row_bytes),
        Workload(f"rotary, {at}", [rotate(qkv) for qkv in qkvs], 2 * tokens * (heads + kv_heads) * dim * size),
        Workload(f"write_kv, {at}", [write(qkv) for qkv in qkvs], 4 * tokens * kv_heads * dim * size),
        Workload(f"sample greedy, {rows} x {vocab}", sample(SampleBatch.greedy(rows)), logit_bytes, capturable=False),
        Workload(f"sample, {rows} x {vocab}", sample(drawn(1.0)), logit_bytes, capturable=False),
        Workload(f"sample top_p, {rows} x {vocab}", sample(drawn(0.9)), logit_bytes, capturable=False),
    ]


def time_workload(workload: Workload, ceilings: Ceilings, *, dry: bool) -> Timing:
    measure = eager_seconds if dry or not workload.capturable else graph_seconds
    calls = workload.calls[:1] if dry else workload.calls  # no figures: one shows that it runs
    seconds = (measure(calls), measure(calls))
    floor = max(workload.bytes_moved / ceilings.bytes_per_s, workload.flops / ceilings.flops_per_s)
    return Timing(workload.name, seconds, floor, workload.bytes_moved, workload.flops)


def time_kernels(ops: Ops, device: str, out_of_time: Callable[[], bool], *, dry: bool) -> dict[str, Any]:
    """Ceilings and timings; prints a row per workload."""
    ceilings = Ceilings(1.0, 1.0) if dry else measure_ceilings(device)
    makers: list[Callable[[], list[Workload]]] = [
        partial(attention_workload, ops, device, load) for load in (DRY_LOADS if dry else ATTENTION_LOADS)
    ]
    for sizes in ((4, 256, 300),) if dry else ((64, 4096, 128256), (4096, 4096, 128256)):
        makers.append(partial(companion_workloads, ops, device, *sizes))
    if not dry:
        print(f"ceilings: {ceilings.bytes_per_s / 1e9:.0f} GB/s copied, {ceilings.flops_per_s / 1e12:.0f} TFLOP/s bf16")
        print(
            f"{'workload':52} {'us':>9} {'us again':>9} {'floor us':>9} {'% of floor':>10} {'GB/s':>7} {'TFLOP/s':>8}"
        )
    timings: list[Timing] = []
    for number, make in enumerate(makers):
        if out_of_time():
            print(f"out of time: {len(makers) - number} groups of timings left out")
            break
        for workload in make():
            timing = time_workload(workload, ceilings, dry=dry)
            timings.append(timing)
            if not dry:
                print(_row(timing), flush=True)
    return {"ceilings": dataclasses.asdict(ceilings), "timings": [dataclasses.asdict(timing) for timing in timings]}


def _row(timing: Timing) -> str:
    best = min(timing.seconds)
    return (
        f"{timing.name:52} {timing.seconds[0] * 1e6:>9.1f} {timing.seconds[1] * 1e6:>9.1f} {timing.floor_s * 1e6:>9.1f}"
        f" {100 * timing.floor_s / best:>10.0f} {timing.bytes_moved / best / 1e9:>7.0f}"
        f" {timing.flops / best / 1e12:>8.1f}"
    )


def main() -> int:
    """Returns 0, or 1 where a check was bad, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--interpret", action="store_true", help="dry run in Triton's interpreter, without a GPU")
    parser.add_argument("--budget-s", type=float, default=420.0, help="stop starting new work after this (default 420)")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    options = parser.parse_args()
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which is why imports are inside functions

    import torch
    import triton

    from pagemill.kernels.ops import select_ops

    if not options.interpret and not torch.cuda.is_available():
        print("no CUDA device here; `--interpret` runs this script dry", file=sys.stderr)
        return 2
    device = "cpu" if options.interpret else "cuda"
    begin = time.perf_counter()

    def out_of_time() -> bool:
        return time.perf_counter() - begin > options.budget_s

    environment = {
        "device": "Triton's interpreter" if options.interpret else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    print("  ".join(f"{name} {value}" for name, value in environment.items()))
    ops = select_ops(device, override="interpret" if options.interpret else "triton")
    checks = check_kernels(ops, device, out_of_time, dry=options.interpret)
    timings = time_kernels(ops, device, out_of_time, dry=options.interpret)
    if options.interpret:
        print(f"timing code ran for {len(timings['timings'])} workloads; no figures without a GPU")
        timings = {}
    if options.json:
        options.json.write_text(json.dumps({"environment": environment, "checks": checks, **timings}, indent=1))
    print(f"{time.perf_counter() - begin:.0f} s")
    return 1 if any(check["bad"] for check in checks) else 0


if __name__ == "__main__":
    sys.exit(main())
