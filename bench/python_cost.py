"""What Python costs in a step: steady decodes of the bundled model, with every compiled kernel replaced by nothing.

    python bench/python_cost.py [--sequences N ...] [--steps N] [--profile]

Everything else is there: scheduler, batch, plans, tokenizer, text. Processor milliseconds of this thread a step; the
least is the figure that other work on the machine disturbs least. It is what Python takes with its own code and data in
the processor's caches. After the kernels of a real step have read all weights they are not, and it takes longer:
`pagemill bench step` says how long.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import pstats
import statistics
import time
from contextlib import ExitStack
from typing import Any

from pagemill.engine.assembly import build
from pagemill.engine.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.profiler import entry_points, replaced
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.kernels.cpu import step_words as words

TOKEN = 40
PROMPT = 60
WARM_UP = 40
FIRST = 100  # prompts begin at different tokens, so that no two share a block


def _instead(name: str) -> Any:
    return _draw if name == "run_step" else lambda *args: 0


def _draw(board: int, step: int, like: Any) -> bool:
    """The same token for every row."""
    at = (ctypes.c_int64 * words.WORDS).from_address(step)
    drawn = (ctypes.c_int64 * at[words.WANTED]).from_address(at[words.DRAWN])
    drawn[:] = [TOKEN] * len(drawn)
    return True


def run(core: EngineCore, sequences: int, steps: int, profile: cProfile.Profile | None) -> list[float]:
    """Seconds of each step."""
    total = WARM_UP + steps + 1
    for number in range(sequences):
        params = SamplingParams(temperature=0.8, max_tokens=total, ignore_eos=True)
        prompt = list(range(FIRST + number, FIRST + number + PROMPT))
        core.add(Request(f"r{number}", prompt, params, seed=number, max_tokens=total))
    seconds = []
    for step in range(WARM_UP + steps):
        if step == WARM_UP and profile is not None:
            profile.enable()
        begun = time.thread_time()
        core.step()
        seconds.append(time.thread_time() - begun)
    if profile is not None:
        profile.disable()
    assert core.scheduler.num_running == sequences, "not all of them ran at once"
    for number in range(sequences):
        core.abort(f"r{number}")
    return seconds[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 96])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="also where the time goes")
    args = parser.parse_args()
    config = EngineConfig(
        model="smollm2-135m", dtype="bfloat16", num_blocks_override=4000, num_speculative_tokens=0, threads=1
    )
    core = build(config).core
    print(f"{'sequences':>9} {'least':>8} {'median':>8}  processor ms a step, {args.steps} steps")
    with ExitStack() as stack:
        for module, name in entry_points():
            stack.enter_context(replaced(module, name, _instead(name)))
        for sequences in args.sequences:
            profile = cProfile.Profile() if args.profile else None
            seconds = run(core, sequences, args.steps, profile)
            print(f"{sequences:>9} {1e3 * min(seconds):>8.3f} {1e3 * statistics.median(seconds):>8.3f}", flush=True)
            if profile is not None:
                pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
