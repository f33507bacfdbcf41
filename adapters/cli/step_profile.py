"""`pagemill bench step`: where the time of a workload's steps goes, against what the machine can do."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagemill.adapters.cli.garbage import keep_what_is_there
from pagemill.adapters.cli.progress import progress_bar
from pagemill.adapters.cli.settings import Settings
from pagemill.engine.errors import ConfigError

if TYPE_CHECKING:
    from pagemill.engine.llm import LLM
    from pagemill.engine.profiler import Part, Profiler

_PROBE_BYTES = 256 << 20
_PROBE_SIZE = 1024  # rows and columns of the product that is probed
_PROBES = 6


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Run a workload as it is served and, where that is one call for all layers, again operation by operation."""
    from pagemill.adapters.cli.bench import read_workload
    from pagemill.engine.llm import LLM
    from pagemill.engine.profiler import LAYERS, WHOLE, Profiler

    rows = read_workload(Path(args.workload))
    config = settings.engine(device="cpu")
    if config.device != "cpu":
        raise ConfigError(f"device must be cpu for bench step, got {config.device}: use the profiler of the GPU")
    with progress_bar() as progress:
        llm = LLM(**{field: getattr(config, field) for field in config.__slots__}, progress=progress)
    keep_what_is_there()
    profiler = Profiler(llm._parts.core)
    threads = config.threads or _threads()
    tables = []
    for by_operation in (False, True):
        if by_operation and not profiler.parts.keys() & {LAYERS, WHOLE}:
            break  # they were computed so already
        with profiler.attached(by_operation=by_operation):  # what only this way of running needs is compiled now
            _generate(llm, [(rows[0][0], 2)], args.temperature)
        limits = probe(threads)
        llm.reset_prefix_cache()
        with profiler.attached(by_operation=by_operation):
            begun = time.perf_counter()
            tokens = _generate(llm, rows, args.temperature)
            wall = time.perf_counter() - begun
        table: dict[str, Any] = {
            "by_operation": by_operation,
            "wall_s": wall,
            "output_tokens": tokens,
            "tokens_per_s": tokens / wall,
        }
        table |= {"steps": profiler.steps, "python": profiler.python / profiler.seconds, "limits": limits}
        tables.append(table | {"parts": _rows(profiler)})
    print(json.dumps(tables) if args.json else "\n\n".join(shown(table) for table in tables), flush=True)
    return 0


def _threads() -> int:
    from pagemill.engine.machine import available_cores

    return available_cores()


def _generate(llm: LLM, rows: list[tuple[list[int], int]], temperature: float) -> int:
    from pagemill.engine.sampling_params import SamplingParams

    params = [SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True, seed=1) for _, count in rows]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in rows], params)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def probe(threads: int) -> dict[str, float]:
    """What so many threads reach right now: GB/s of reading memory, GFLOP/s of torch's bfloat16 product."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        memory = torch.ones(_PROBE_BYTES // 4)
        square = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=torch.bfloat16)
        reading = min(_timed(memory.sum) for _ in range(_PROBES))
        product = min(_timed(lambda: square @ square) for _ in range(_PROBES))
    finally:
        torch.set_num_threads(before)
    return {"read_gb_s": _PROBE_BYTES / reading / 1e9, "bfloat16_gflop_s": 2 * _PROBE_SIZE**3 / product / 1e9}


def _timed(call: Any) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _rows(profiler: Profiler) -> list[dict[str, Any]]:
    parts = sorted(profiler.parts.items(), key=lambda item: -item[1].seconds)
    return [_row(name, part, profiler) for name, part in parts]


def _row(name: str, part: Part, profiler: Profiler) -> dict[str, Any]:
    return {
        "part": name,
        "ms_per_step": part.seconds / profiler.steps * 1e3,
        "python_ms": (part.seconds - part.compiled) / profiler.steps * 1e3,
        "share": part.seconds / profiler.seconds,
        "us_per_call": part.seconds / part.calls * 1e6,
        "calls_per_step": part.calls / profiler.steps,
        "gb_s": part.bytes / part.seconds / 1e9,
        "gflop_s": part.flops / part.seconds / 1e9,
    }


def shown(table: dict[str, Any]) -> str:
    """A table as text."""
    limits = table["limits"]
    how = "operation by operation, each called from Python" if table["by_operation"] else "as it is served"
    lines = [
        f"{how}: {table['output_tokens']} tokens in {table['wall_s']:.2f} s = {table['tokens_per_s']:.1f} tokens/s, "
        f"{table['steps']} steps",
        f"probed before: memory is read at {limits['read_gb_s']:.1f} GB/s, bfloat16 multiplied at "
        f"{limits['bfloat16_gflop_s']:.0f} GFLOP/s",
        f"{'part':32} {'ms/step':>8} {'python':>7} {'share':>6} {'us/call':>9} {'calls':>6} {'GB/s':>6} {'GFLOP/s':>8} "
        "of limit",
    ]
    for row in table["parts"]:
        reached = max(row["gb_s"] / limits["read_gb_s"], row["gflop_s"] / limits["bfloat16_gflop_s"])
        counted = f"{row['gb_s']:>6.1f} {row['gflop_s']:>8.0f} {reached:>8.0%}" if row["gb_s"] else ""
        lines.append(
            f"{row['part']:32} {row['ms_per_step']:>8.3f} {row['python_ms']:>7.3f} {row['share']:>6.1%} "
            f"{row['us_per_call']:>9.1f} {row['calls_per_step']:>6.1f} {counted}".rstrip()
        )
    python = sum(row["python_ms"] for row in table["parts"])
    lines.append(f"{'Python, outside of kernels':32} {python:>8.3f} {python:>7.3f} {table['python']:>6.1%}")
    return "\n".join(lines)
