"""What each setting is worth here: `python -m bench.settings [SETTING...]`

For every value an engine of its own is made beside one with the defaults, and the two run the same short workloads in
turns. One JSON object for each value and workload: tokens/s of the defaults, and the ratio of neighbouring runs as
median, lowest and highest. Tokens are drawn, not greedy: what a model repeats for ever would flatter guessed tokens.

    one      1 request of 128 tokens, 48 out
    chat     32 requests of a chat's lengths, 24 out each
    prompts  4 requests of 768 tokens, 2 out
    prefix   12 requests behind the same 640 tokens, 4 out
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

import bench.as_served  # noqa: F401
from bench.workloads import lengths, tokens

from pagemill.engine.llm import LLM
from pagemill.engine.machine import available_cores
from pagemill.engine.sampling_params import SamplingParams

DEFAULTS: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_memory_bytes": 300 << 20, "skip_tokenizer_init": True}
VALUES: dict[str, tuple[Any, ...]] = {
    "threads": tuple(sorted({1, available_cores(), 2 * available_cores()} - {available_cores()})),
    "dtype": ("float32",),
    "quantization": ("int8", "int4"),
    "block_size": (8, 32, 64, 128, 256),
    "max_num_batched_tokens": (64, 128, 256, 1024, 2048),
    "max_num_seqs": (4, 8, 16),
    "num_speculative_tokens": (0,),
    "enable_prefix_caching": (False,),
}


def workloads() -> dict[str, list[tuple[list[int], int]]]:
    rng = random.Random(1)
    system = tokens(rng, 640)
    return {
        "one": [(tokens(rng, 128), 48)],
        "chat": [(tokens(rng, lengths(rng, 30, 1.2, 4, 256)), 24) for _ in range(32)],
        "prompts": [(tokens(rng, 768), 2) for _ in range(4)],
        "prefix": [(system + tokens(rng, 40), 4) for _ in range(12)],
    }


def rate(llm: LLM, rows: list[tuple[list[int], int]]) -> float:
    """Tokens/s, in and out, of a run that finds nothing in the prefix cache of runs before it."""
    llm.reset_prefix_cache()
    params = [SamplingParams(seed=place, max_tokens=count, ignore_eos=True) for place, (_, count) in enumerate(rows)]
    prompts: Any = [{"prompt_token_ids": ids} for ids, _ in rows]
    begun = time.perf_counter()
    llm.generate(prompts, params)
    return sum(len(ids) + count for ids, count in rows) / (time.perf_counter() - begun)


def spread(values: list[float]) -> list[float]:
    return [round(value, 3) for value in (statistics.median(values), min(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=f"default: all of {', '.join(VALUES)}")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    options = parser.parse_args()
    if unknown := set(options.settings) - set(VALUES):
        parser.error(f"no such setting: {', '.join(sorted(unknown))}")
    usual = LLM(options.model, **DEFAULTS)
    work = workloads()
    for rows in work.values():
        rate(usual, rows)
    for setting in options.settings or VALUES:
        for value in VALUES[setting]:
            other = LLM(options.model, **{**DEFAULTS, setting: value})
            for name, rows in work.items():
                rate(other, rows)
                pairs = [(rate(usual, rows), rate(other, rows)) for _ in range(options.rounds)]
                told = {"setting": setting, "value": value, "workload": name}
                told |= {"tokens_per_s": spread([one for one, _ in pairs])}
                told |= {"ratio": spread([mine / one for one, mine in pairs])}
                print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
