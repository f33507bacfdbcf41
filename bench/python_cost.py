"""What Python costs in a step: steady decodes of the bundled model, with every compiled kernel replaced by nothing.

    python -m bench.python_cost [--sequences N ...] [--steps N] [--away MS ...] [--profile]

Everything else is there: scheduler, batch, plans, tokenizer, text. Processor milliseconds of this thread a step; the
least is the figure that other work on the machine disturbs least. With 0 away it is what Python takes with its own code
and data in the processor's caches. In a real step they are not, since kernels have run meanwhile: with `away`, the
processor computes for so many ms instead of them, in registers alone, which is enough. `pages`: how many pages of
memory a step touches (Linux; a huge one counts once), the median; what a step costs then is these, and not its
instructions.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import pstats
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import bench.as_served  # noqa: F401
import numba
from bench.touched_pages import TouchedPages

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
COUNTED = 10  # steps whose pages are counted
FIRST = 100  # prompts begin at different tokens, so that no two share a block


class NoKernels:
    """What is called instead of compiled kernels. `seconds`: of this thread, in the last step's; `around`: called
    before and after, where it is set."""

    def __init__(self) -> None:
        self.rounds = 0
        self.seconds = 0.0
        self.around: tuple[Callable[[], object], Callable[[], object]] | None = None

    def instead(self, name: str) -> Any:
        return self._draw if name == "run_step" else lambda *args: 0

    def _draw(self, board: int, step: int, like: Any) -> bool:
        """The same token for every row."""
        if self.around is not None:
            self.around[0]()
        begun = time.thread_time()
        compute(self.rounds)
        at = (ctypes.c_int64 * words.WORDS).from_address(step)
        drawn = (ctypes.c_int64 * at[words.WANTED]).from_address(at[words.DRAWN])
        drawn[:] = [TOKEN] * len(drawn)
        self.seconds = time.thread_time() - begun
        if self.around is not None:
            self.around[1]()
        return True


@numba.njit(nogil=True)
def compute(rounds: int) -> float:
    value = 1.0
    for _ in range(rounds):
        value = value * 1.0000001 + 1e-9
    return value


def rounds_a_ms() -> float:
    compute(10)
    begun = time.perf_counter()
    compute(10_000_000)
    return 1e4 / (time.perf_counter() - begun)


def run(
    core: EngineCore, kernels: NoKernels, sequences: int, steps: int, profile: cProfile.Profile | None
) -> list[float]:
    """Seconds of each step, without what stands for its kernels."""
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
        seconds.append(time.thread_time() - begun - kernels.seconds)
    if profile is not None:
        profile.disable()
    assert core.scheduler.num_running == sequences, "not all of them ran at once"
    for number in range(sequences):
        core.abort(f"r{number}")
    return seconds[WARM_UP:]


def pages(core: EngineCore, kernels: NoKernels, sequences: int) -> int | None:
    """Pages that a step touches outside of kernels. None where the system does not say."""
    try:
        touched = TouchedPages()
    except OSError:
        return None
    said: list[list[bytes]] = []
    kernels.around = lambda: said.append(touched.end()), touched.begin
    run(core, kernels, sequences, COUNTED, None)
    kernels.around = None
    return int(statistics.median(touched.pages(each) for each in said[-COUNTED:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 96])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--away", type=float, nargs="+", default=[0.0, 12.0, 60.0], help="ms of each step")
    parser.add_argument("--profile", action="store_true", help="also where the time goes")
    args = parser.parse_args()
    if min(*args.sequences, args.steps) < 1 or min(args.away) < 0:
        parser.error("--sequences and --steps must be at least 1, --away at least 0")
    config = EngineConfig(
        model="smollm2-135m", dtype="bfloat16", num_blocks_override=4000, num_speculative_tokens=0, threads=1
    )
    core = build(config).core
    kernels, a_ms = NoKernels(), rounds_a_ms()
    print(f"processor ms a step, {args.steps} steps")
    print(f"{'sequences':>9} {'pages':>6} {'away':>6} {'least':>8} {'median':>8}")
    with ExitStack() as stack:
        for module, name in entry_points():
            stack.enter_context(replaced(module, name, kernels.instead(name)))
        for sequences in args.sequences:
            kernels.rounds = 0
            touched = pages(core, kernels, sequences)
            for away in args.away:
                profile = cProfile.Profile() if args.profile else None
                kernels.rounds = int(away * a_ms)
                seconds = run(core, kernels, sequences, args.steps, profile)
                counted = "" if touched is None else str(touched)
                least, median = 1e3 * min(seconds), 1e3 * statistics.median(seconds)
                print(f"{sequences:>9} {counted:>6} {away:>6.0f} {least:>8.3f} {median:>8.3f}", flush=True)
                if profile is not None:
                    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
