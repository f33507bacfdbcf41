"""The watchdog of the kernel threads beside a process that keeps one core busy: `python -m bench.neighbour`

One engine runs the same requests with and without its watchdog, in turns, first alone and then beside a neighbour. One
JSON object for each workload and neighbour: tokens/s of both and the ratio of neighbouring runs, median and range.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from bench.workloads import workloads

from pagemill.engine.llm import LLM
from pagemill.engine.machine import available_cores
from pagemill.engine.sampling_params import SamplingParams
from pagemill.kernels.cpu.watchdog import Watchdog


@contextlib.contextmanager
def neighbour(present: bool) -> Iterator[None]:
    if not present:
        yield
        return
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.5)
        yield
    finally:
        burner.kill()
        burner.wait()


def rate(llm: LLM, rows: list[tuple[list[int], int]]) -> float:
    """Tokens/s of a run that finds nothing in the prefix cache."""
    llm.reset_prefix_cache()
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in rows]
    prompts: Any = [{"prompt_token_ids": ids} for ids, _ in rows]
    begun = time.perf_counter()
    llm.generate(prompts, params)
    return sum(count for _, count in rows) / (time.perf_counter() - begun)


def spread(values: list[float]) -> list[float]:
    return [round(value, 3) for value in (statistics.median(values), min(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=available_cores(), metavar="N")
    parser.add_argument("--rounds", type=int, default=4, metavar="N")
    options = parser.parse_args()
    llm = LLM(
        options.model,
        dtype="bfloat16",
        threads=options.threads,
        kv_cache_memory_bytes=256 << 20,
        num_speculative_tokens=0,
        skip_tokenizer_init=True,
    )
    ops: Any = llm._parts.core._runner.ops  # type: ignore[attr-defined]
    made = workloads()
    work = {"single": made["single"], "chat": [(ids, min(count, 32)) for ids, count in made["chat"][:32]]}
    for name, rows in work.items():
        rate(llm, rows)
        for present in (False, True):
            watching, rates, used = Watchdog(options.threads), ([], []), []  # type: ignore[var-annotated]
            with neighbour(present):
                for _ in range(options.rounds):
                    for arm, watchdog in enumerate(
                        (Watchdog(1), watching)
                    ):  # one that knows of one thread does nothing
                        ops._watchdog = watchdog
                        ops._team.use(watching.threads if arm else options.threads)
                        rates[arm].append(rate(llm, rows))
                    used.append(watching.settled)
            print(
                json.dumps(
                    {
                        "workload": name,
                        "neighbour": present,
                        "without": spread(rates[0]),
                        "with": spread(rates[1]),
                        "ratio": spread([mine / other for other, mine in zip(*rates, strict=True)]),
                        "threads": used,
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
