"""What numbers below 2^-126 cost a product and attention: times as a ratio to those without any, in turns.

python -m bench.tiny_numbers
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from tests.kernels.paged import make_case

from pagemill.kernels.cpu.ops import CpuOps

ROUNDS = 15
TINY = 1e-39


def ratios(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Of each call's median time to that of the first."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            before = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - before)
    first = median(next(iter(times.values())))
    return {name: median(found) / first for name, found in times.items()}


def product(cpu: CpuOps, dtype: torch.dtype, rows: int) -> dict[str, float]:
    """One in eight of the weight's rows, or of the activations' columns, is tiny."""
    weight, x = torch.randn(960, 576), torch.randn(rows, 576)
    tiny_weight, tiny_x = weight.clone(), x.clone()
    tiny_weight[::8] *= TINY
    tiny_x[:, ::8] *= TINY
    plain, tiny = cpu.prepare_linear(weight.to(dtype)), cpu.prepare_linear(tiny_weight.to(dtype))
    x, tiny_x = x.to(dtype), tiny_x.to(dtype)
    return ratios(
        {
            "none": lambda: cpu.linear(x, plain),
            "weights": lambda: cpu.linear(x, tiny),
            "activations": lambda: cpu.linear(tiny_x, plain),
        }
    )


def attention(cpu: CpuOps, dtype: torch.dtype) -> dict[str, float]:
    """Decodes of 512 tokens, the last of which has nearly all of the weight: the others' are e^-20, or e^-95."""
    case = make_case([512] * 8, [1] * 8, kv_heads=3, group=3, head_dim=64, dtype=dtype)
    for table in case.meta.host.block_tables[:, :32]:
        slots = (table[:, None].astype(np.int64) * 16 + np.arange(16)).reshape(-1)
        _, values = case.kv.gather(torch.from_numpy(table.astype(np.int64)))
        keys = torch.randn(512, 3, 64) * 0.01
        keys[:, :, 0] = 0
        keys[-1, :, 0] = 1
        case.kv.scatter(torch.from_numpy(slots), keys.to(dtype), values)

    def query(gap: float) -> torch.Tensor:
        made = torch.zeros_like(case.query)
        made[..., 0] = gap
        return made

    near, far = query(20.0), query(95.0)
    return ratios(
        {
            "none": lambda: cpu.paged_attention(near, case.kv, case.meta, scale=1.0),
            "tail": lambda: cpu.paged_attention(far, case.kv, case.meta, scale=1.0),
        }
    )


def main() -> None:
    cpu = CpuOps(threads=1)
    for dtype in (torch.float32, torch.bfloat16):
        found = {f"product, {rows} rows": product(cpu, dtype, rows) for rows in (1, 32)}
        found["attention"] = attention(cpu, dtype)
        for name, result in found.items():
            told = ", ".join(f"{where} {ratio:.2f}" for where, ratio in result.items() if where != "none")
            print(f"{str(dtype).removeprefix('torch.')}, {name}: {told}", flush=True)


if __name__ == "__main__":
    main()
