"""What scheduling and block work cost per step at 1,000 running requests, for pools of 1,000 to 1,000,000 blocks.

    python bench/scheduler_cost.py [--requests N] [--steps N] [--blocks N ...] [--profile]

The model is invented: it answers at once with the same token. "steady": every request decodes, nothing comes or goes;
each has one large block, so that 1,000 of them fit 1,000 (and 50) blocks. "turnover": blocks of 16, prompts of 256
tokens and outputs of 200, so that in every step five of 1,000 requests end, five arrive, and every 16th fills a block.

CPU milliseconds of this thread. `schedule` and `commit` are the scheduler's, `whole step` is all that the core does for
a step beside the device. `longest` shows pauses, of the garbage collector say, that a median hides.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

from pagemill.engine.core import EngineCore
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduler_output import Sampled, SchedulerOutput, StepResult
from pagemill.engine.wiring import make_scheduler

TOKEN = 7
WARM_UP = 20


class InstantModel:
    """Answers every sequence with the same token, in no time."""

    def execute(self, output: SchedulerOutput) -> StepResult:
        count = sum(item.samples for item in output.scheduled)
        return StepResult([Sampled([TOKEN]) for _ in range(count)])


class Timed:
    """A function that remembers the CPU seconds of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds: list[float] = []

    def __call__(self, *arguments: Any) -> Any:
        begun = time.thread_time()
        result = self._function(*arguments)
        self.seconds.append(time.thread_time() - begun)
        return result


class Case:
    """An engine core with so many requests running. `turnover`: ended requests are replaced."""

    def __init__(
        self, requests: int, blocks: int, *, block_size: int, prompt: int, output: int, turnover: bool
    ) -> None:
        self._prompt, self._output, self._turnover, self._made = prompt, output, turnover, 0
        self.scheduler = make_scheduler(
            num_blocks=blocks + 1,
            block_size=block_size,
            max_num_seqs=requests,
            max_num_batched_tokens=max(8192, requests * 2),
        )
        self.core = EngineCore(self.scheduler, InstantModel(), None, [0])
        for number in range(requests):
            # Outputs of all lengths at first, so that later on the ends are spread evenly.
            self._add(output if not turnover else 1 + number * output // requests)
        while self.scheduler.num_waiting:
            self._step()

    def _add(self, output: int) -> None:
        self._made += 1
        prompt = list(range(self._made * 10_000, self._made * 10_000 + self._prompt))
        params = SamplingParams(max_tokens=output, temperature=0.0)
        self.core.add(Request(f"r{self._made}", prompt, params, seed=0, max_tokens=output))

    def _step(self) -> None:
        ended = sum(output.finish_reason is not None for output in self.core.step())
        for _ in range(ended if self._turnover else 0):
            self._add(self._output)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def measure(self, steps: int) -> dict[str, float]:
        """Median and longest CPU milliseconds of a step and its parts."""
        timed = {"schedule": Timed(self.scheduler.schedule), "commit": Timed(self.scheduler.commit)}
        step = Timed(self.core.step)
        scheduler, core = vars(self.scheduler), vars(self.core)
        scheduler.update(timed)
        core["step"] = step
        self.run(WARM_UP + steps)
        for name in timed:
            del scheduler[name]
        del core["step"]
        together = [sum(parts) for parts in zip(*(part.seconds[-steps:] for part in timed.values()), strict=True)]
        return {
            "running": self.scheduler.num_running,
            "schedule": 1000 * statistics.median(timed["schedule"].seconds[-steps:]),
            "commit": 1000 * statistics.median(timed["commit"].seconds[-steps:]),
            "both": 1000 * statistics.median(together),
            "longest": 1000 * max(together),
            "step": 1000 * statistics.median(step.seconds[-steps:]),
        }


def steady(requests: int, blocks: int, steps: int) -> Case | None:
    output = 2 * (WARM_UP + steps) + requests
    if blocks < requests:
        return None
    # A block each and a few more: some always stay free at admissions.
    blocks = max(blocks, requests + requests // 20)
    return Case(requests, blocks, block_size=2 * output, prompt=8, output=output, turnover=False)


def turnover(requests: int, blocks: int, steps: int) -> Case | None:
    del steps
    if blocks * 16 < requests * 520:
        return None
    return Case(requests, blocks, block_size=16, prompt=256, output=200, turnover=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--profile", action="store_true", help="also where the time goes, for each kind of load")
    args = parser.parse_args()
    print(f"{args.requests} running requests, {args.steps} steps, CPU ms a step")
    print(f"{'load':10}{'blocks':>11}{'schedule':>10}{'commit':>9}{'both':>9}{'longest':>9}{'whole step':>12}")
    for name, make in (("steady", steady), ("turnover", turnover)):
        for blocks in args.blocks:
            case = make(args.requests, blocks, args.steps)
            if case is None:
                print(f"{name:10}{blocks:>11,}  too few blocks for {args.requests} of these requests")
                continue
            found = case.measure(args.steps)
            if found["running"] < 0.97 * args.requests:
                print(f"{name:10}{blocks:>11,}  only {found['running']:.0f} run at once")
                continue
            print(
                f"{name:10}{blocks:>11,}{found['schedule']:>10.3f}{found['commit']:>9.3f}{found['both']:>9.3f}"
                f"{found['longest']:>9.3f}{found['step']:>12.3f}",
                flush=True,
            )
            del case
    if args.profile:
        for name, make in (("steady", steady), ("turnover", turnover)):
            case = make(args.requests, 100_000, args.steps)
            if case is not None:
                print(f"\n{name}, 100,000 blocks: {args.steps} steps under cProfile, which makes small calls dearer")
                profile = cProfile.Profile()
                profile.runcall(case.run, args.steps)
                pstats.Stats(profile).sort_stats("tottime").print_stats(18)


if __name__ == "__main__":
    main()
