"""This engine and others on the same work: `python -m bench.compare [--workload FILE.jsonl...] [--peer KIND=WHERE...]`

The engines take turns, each run in a process of its own, so that what else the machine does meets all of them. Beside
each figure stand the memory bandwidth probed right before it and what other processes took of the cores meanwhile:
where the latter is not near 0, or the probes of two runs differ much, a ratio says little. Ratios are taken between
neighbouring runs; shown are their median and their range.

Peers:

    transformers            in this environment: generate, or generate_batch for several requests
    transformers=PYTHON     in another one, by its interpreter
    vllm=PYTHON             an environment with vLLM for the CPU
    llama.cpp=SERVER,MODEL  llama.cpp's server program and a .gguf file of the same model
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from bench.workloads import workloads

from pagemill.engine.loader import resolve_model
from pagemill.engine.machine import available_cores

_HERE = Path(__file__).parent
_PROBE = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
memory = torch.ones(64 << 20)
def once():
    begun = time.perf_counter()
    memory.sum()
    return time.perf_counter() - begun
print(memory.nbytes / min(once() for _ in range(12)) / 1e9)
"""


@dataclass(frozen=True, slots=True)
class Engine:
    """Something that runs workload files: prints one JSON object for each, with `tokens_per_s` and `load_s`."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Run:
    engine: str
    tokens_per_s: float
    load_s: float
    probe_gb_s: float
    others_share: float
    """Of all cores, what processes other than the run took."""


def engines(options: argparse.Namespace) -> list[Engine]:
    """Ours first. Raises `ValueError` on a peer that cannot be understood."""
    folder = str(resolve_model(options.model).path)
    ours = (sys.executable, "-m", "pagemill", "bench", "offline", "--json", "--model", options.model)
    ours = (*ours, "--dtype", "bfloat16", f"--threads={options.threads}", *options.set, "--workload")
    found = [Engine("pagemill", ours)]
    for peer in options.peer:
        kind, _, where = peer.partition("=")
        if kind == "transformers":
            script = (where or sys.executable, str(_HERE / "transformers_batch.py"), folder, "bfloat16")
        elif kind == "vllm" and where:
            script = (where, str(_HERE / "vllm_batch.py"), folder, "bfloat16")
        elif kind == "llama.cpp" and "," in where:
            server, _, model = where.partition(",")
            script = (sys.executable, str(_HERE / "llamacpp_batch.py"), server, model, str(options.threads))
        else:
            raise ValueError(f"--peer must be transformers, vllm=PYTHON or llama.cpp=SERVER,MODEL, got {peer!r}")
        found.append(Engine(kind, script))
    return found


def run(engine: Engine, workload: Path, threads: int) -> Run:
    """One run in a process of its own. Raises `RuntimeError` with the last it said where it fails."""
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE, str(threads)], capture_output=True, text=True, check=True
    ).stdout
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    before, spent, begun = _busy(), _spent(), time.perf_counter()
    done = subprocess.run([*engine.command, str(workload)], capture_output=True, text=True, env=environment)
    wall = time.perf_counter() - begun
    others = _busy() - before - (_spent() - spent)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{engine.name} failed on {workload.stem}:\n{done.stderr[-2000:]}")
    told = json.loads(lines[-1])
    share = max(0.0, others) / (wall * (os.cpu_count() or 1))
    return Run(engine.name, told["tokens_per_s"], told["load_s"], float(probe), share)


def _busy() -> float:
    """Seconds that the cores have worked since the machine started."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _spent() -> float:
    """Of them, this process's and its ended children's."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def summary(workload: str, runs: Sequence[Run]) -> list[str]:
    """A line for each engine, and the ratio of ours to each peer of the same round."""
    by_engine: dict[str, list[Run]] = {}
    for item in runs:
        by_engine.setdefault(item.engine, []).append(item)
    lines = []
    ours = by_engine["pagemill"]
    for name, mine in by_engine.items():
        rates = [item.tokens_per_s for item in mine]
        line = f"| {workload} | {name} | {_spread(rates, '.1f')} | {statistics.median(r.load_s for r in mine):.1f} | "
        line += f"{_spread([r.probe_gb_s for r in mine], '.0f')} | {max(r.others_share for r in mine):.1%} | "
        if name != "pagemill":
            line += _spread([own.tokens_per_s / peer.tokens_per_s for own, peer in zip(ours, mine, strict=True)], ".2f")
        lines.append(line + " |")
    return lines


def _spread(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} - {max(values):{form}})"


_HEAD = (
    "| workload | engine | tokens/s | load s | probe GB/s | other processes | ours over it |",
    "|---|---|---|---|---|---|---|",
)


def _slices(options: argparse.Namespace, folder: Path) -> list[Path]:
    """The workload files, cut to their first requests."""
    contents: dict[str, list[str]] = {}
    for name in options.workload:
        contents[Path(name).stem] = Path(name).read_text(encoding="utf-8").splitlines()
    if not contents:
        made = workloads()
        for name in ("single", "chat"):
            contents[name] = [json.dumps({"prompt_token_ids": ids, "max_tokens": n}) for ids, n in made[name]]
    paths = []
    for name, lines in contents.items():
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text("\n".join(lines[: options.requests]) + "\n", encoding="utf-8")
    return paths


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", action="append", default=[], metavar="FILE.jsonl", help="default: single, chat")
    parser.add_argument("--peer", action="append", default=[], metavar="KIND=WHERE", help="may be given several times")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N of each file")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each engine (3)")
    parser.add_argument("--threads", type=int, default=available_cores(), metavar="N", help="default: all cores")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FLAG", help="a flag of ours, --set=--block-size=64"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a run instead of the table")
    options = parser.parse_args(arguments)
    try:
        chosen = engines(options)
    except ValueError as error:
        parser.error(str(error))
    if not options.json:
        print("\n".join(_HEAD), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for workload in _slices(options, Path(folder)):
            runs = []
            for _ in range(options.rounds):
                for engine in chosen:
                    runs.append(run(engine, workload, options.threads))
                    if options.json:
                        told: dict[str, Any] = {name: getattr(runs[-1], name) for name in Run.__slots__}
                        print(json.dumps({"workload": workload.stem, **told}), flush=True)
            if not options.json:
                print("\n".join(summary(workload.stem, runs)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
