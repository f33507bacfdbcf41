"""What a linear layer costs by the form of its weights: bfloat16, int8, int4 and GGUF's, for few rows and for many.

Every call takes another weight, so that all come from memory as in a model; the forms take turns, so that a change of
the machine's speed meets all of them. Beside the times stands the bandwidth of reading memory, probed between them.

    python -m bench.linear_cost                      # every shape of SmolLM2-135M
    python -m bench.linear_cost --shapes gate_up --rows 1 8
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import numpy as np
import torch

from pagemill.kernels.cpu.ops import CpuOps
from pagemill.kernels.quantised_weight import QuantisedWeight, quantise

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
ROWS = (1, 2, 4, 8, 16, 32, 96, 512)
_DISTINCT_BYTES = 320 << 20  # of bfloat16: ten times what the largest cache here holds
_PROBE_BYTES = 256 << 20


FORMS = ("bfloat16", "int8", "int4", "Q4_0")


def prepared(form: str, ops: CpuOps, weight: torch.Tensor, count: int) -> list[Any]:
    """The weight in one of the forms, at so many places of memory."""
    if form == "bfloat16":
        rounded = weight.bfloat16()
        return [ops.prepare_linear(rounded) for _ in range(count)]
    made = quantise(weight.numpy(), 8 if form == "int8" else 4)
    if form == "Q4_0":
        made = QuantisedWeight(4, made.codes - np.int8(8), made.scale)
    return [ops.prepare_quantised(made, None, torch.bfloat16) for _ in range(count)]


def read_bandwidth(memory: torch.Tensor) -> float:
    """GB/s that the cores read together."""
    before = time.perf_counter()
    memory.sum()
    return memory.nbytes / (time.perf_counter() - before) / 1e9


def timed(ops: CpuOps, x: torch.Tensor, weights: list[Any]) -> float:
    """Seconds that multiplying x by each of the weights takes."""
    before = time.perf_counter()
    for weight in weights:
        ops.linear(x, weight)
    return time.perf_counter() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    ops = CpuOps()
    memory = torch.zeros(_PROBE_BYTES // 4)
    print(f"{ops.threads} threads; us per call, the time over that of {args.forms[0]} in brackets, GB/s of the probe")
    print(f"{'shape':<18}{'rows':>5}" + "".join(f"{form:>18}" for form in args.forms) + f"{'probe':>8}")
    for shape in args.shapes:
        features, width = SHAPES[shape]
        count = max(4, _DISTINCT_BYTES // (2 * features * width))
        weight = torch.randn(features, width) * 0.05
        linears = {form: prepared(form, ops, weight, count) for form in args.forms}
        for rows in args.rows:
            x = torch.randn(rows, width).bfloat16()
            used = max(1, min(count, count * 8 // max(8, rows)))
            times: dict[str, list[float]] = {form: [] for form in args.forms}
            probes = []
            for _ in range(args.repeat):
                torch.set_num_threads(ops.threads)
                probes.append(read_bandwidth(memory))
                torch.set_num_threads(1)
                # torch's own threads spin a while longer, which would be counted to whoever comes first.
                timed(ops, x, linears[args.forms[0]][:used])
                for form, weights in linears.items():
                    times[form].append(timed(ops, x, weights[:used]) / used)
            middle = {form: median(found) * 1e6 for form, found in times.items()}
            first = middle[args.forms[0]]
            cells = "".join(f"{middle[form]:>11.1f} ({middle[form] / first:.2f})" for form in args.forms)
            print(f"{f'{shape} {features}x{width}':<18}{rows:>5}{cells}{median(probes):>8.1f}", flush=True)


if __name__ == "__main__":
    main()
