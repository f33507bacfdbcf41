"""`pagemill bench offline`: throughput of workload files, without a queue. The other kinds have modules of their own.

Several files run in processes of their own, one after the other: each starts cold and has its own peak of memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pagemill.adapters.cli.garbage import keep_what_is_there
from pagemill.adapters.cli.parser import given_settings
from pagemill.adapters.cli.progress import progress_bar, waiting
from pagemill.adapters.cli.settings import Settings
from pagemill.engine.errors import ConfigError


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Print one JSON object for each file (or, without --json, a line for each). All requests of a file at once,
    greedy, end-of-sequence ignored."""
    if args.bench == "simulate":
        from pagemill.adapters.cli import simulate

        return simulate.run(args, settings)
    if args.bench == "step":
        from pagemill.adapters.cli import step_profile

        return step_profile.run(args, settings)
    paths = [Path(name) for name in args.workload]
    loads = [read_workload(path) for path in paths]
    if len(paths) > 1:
        return max(_in_own_process(args, path) for path in paths)
    result = measure(paths[0].stem, loads[0], settings)
    print(json.dumps(result) if args.json else _line(result), flush=True)
    return 0


def read_workload(path: Path) -> list[tuple[list[int], int]]:
    """Prompts and their max_tokens. Raises `ConfigError` naming the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read workload {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"workload {path} is not UTF-8: byte {error.start} cannot be read") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.append((list(row["prompt_token_ids"]), int(row["max_tokens"])))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f'{path}:{number} is not {{"prompt_token_ids": [...], "max_tokens": n}}: {error!r}'
            ) from error
    if not rows:
        raise ConfigError(f"workload {path} is empty")
    return rows


def measure(name: str, rows: list[tuple[list[int], int]], settings: Settings) -> dict[str, Any]:
    """Load an engine, run the workload once, and say how it went. Times in seconds, memory in MB (1e6 bytes)."""
    begun = time.perf_counter()
    from pagemill.engine.llm import LLM
    from pagemill.engine.sampling_params import SamplingParams

    config = settings.engine()
    fields = {field: getattr(config, field) for field in config.__slots__}
    with progress_bar() as progress:
        llm = LLM(**fields, progress=progress)
    loaded = time.perf_counter()
    keep_what_is_there()
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in rows]
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for _, count in rows]
    with waiting(f"{name}: {len(rows)} requests, {sum(len(prompt) for prompt, _ in rows)} prompt tokens"):
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        wall = time.perf_counter() - start
    statistics = llm.statistics()
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "engine": "pagemill",
        "workload": name,
        "requests": len(rows),
        "prompt_tokens": sum(len(prompt) for prompt, _ in rows),
        "output_tokens": tokens,
        "wall_s": round(wall, 3),
        "tokens_per_s": round(tokens / wall, 1),
        "load_s": round(loaded - begun, 3),
        "peak_rss_mb": round(peak_rss_bytes() / 1e6, 1),
        "preemptions": statistics.preemptions,
        "prefix_hit_tokens": statistics.cache.hit_tokens,
        "waste_percent": round(statistics.cache.waste_percent, 2),
        "steps": statistics.steps,
        "peak_running": statistics.peak_running,
        "dtype": llm.info.dtype,
        "quantization": llm.info.quantization,
        "weight_mb": round(sum(llm.info.weight_bytes.values()) / 1e6, 1),
        "device": llm.info.device,
        "num_blocks": llm.info.num_blocks,
        "block_size": llm.info.block_size,
    }


def peak_rss_bytes() -> int:
    """The most memory this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _in_own_process(args: argparse.Namespace, path: Path) -> int:
    command = [sys.executable, "-m", "pagemill", "bench", "offline", "--workload", str(path)]
    command += ["--json"] if args.json else []
    command += ["--settings", args.settings] if hasattr(args, "settings") else []
    command += ["--debug"] if getattr(args, "debug", False) else []
    for name, text in given_settings(args).items():
        command.append(f"--{name.replace('_', '-')}={text}")
    return subprocess.run(command, check=False).returncode


def _line(result: dict[str, Any]) -> str:
    return (
        f"{result['workload']}: {result['output_tokens']} tokens in {result['wall_s']} s = {result['tokens_per_s']} "
        f"tokens/s; loaded in {result['load_s']} s, peak memory {result['peak_rss_mb']} MB, "
        f"{result['preemptions']} preemptions, {result['prefix_hit_tokens']} prefix-hit tokens, "
        f"{result['waste_percent']}% KV waste"
    )
