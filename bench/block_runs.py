"""How much of a sequence lies in neighbouring blocks while chat traffic comes and goes.

    python -m bench.block_runs [--hours 1] [--seed N]

An hour of invented conversations through the engine's own scheduler and block pool, on the simulator's CPU: a common
system prompt, one to six turns each, messages and answers of log-normal lengths, sessions coming at random. Every
second of it the tables of the sequences in the step are looked at. A run is a stretch of ascending neighbours: its mean
length is blocks over runs. `early` is the time until the pool gives up its first cached block, `late` the second half.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from itertools import pairwise

from pagemill.engine.scheduler_output import SchedulerOutput, StepResult
from pagemill.engine.simulator.arrivals import Arrivals
from pagemill.engine.simulator.device import DEVICES
from pagemill.engine.simulator.setup import Setup
from pagemill.engine.simulator.simulation import Simulation
from pagemill.engine.simulator.trace import Trace, TraceRequest

BLOCK, SYSTEM_TOKENS, SEATS = 16, 40, 96
CASES = (  # prefix cache, blocks of the pool, sessions a second
    (False, 2_875, 1.2),
    (False, 2_875, 1.7),
    (True, 2_875, 1.7),
    (True, 27_000, 1.7),
)


@dataclass(slots=True)
class Seen:
    tables: int = 0
    blocks: int = 0
    runs: int = 0

    def look(self, table: list[int]) -> None:
        self.tables += 1
        self.blocks += len(table)
        self.runs += 1 + sum(behind != block + 1 for block, behind in pairwise(table))

    def __str__(self) -> str:
        if not self.tables:
            return f"{'-':>10}{'-':>8}"
        return f"{self.blocks / self.tables:10.1f}{self.blocks / self.runs:8.2f}"


class Watched(Simulation):
    """A simulation whose tables are looked at once a second."""

    def __init__(self, trace: Trace, setup: Setup, half_s: float) -> None:
        super().__init__(trace, setup, Arrivals(mode="trace"))
        self.early, self.late = Seen(), Seen()
        self.sequences: list[int] = []
        self._half_s, self._look_at = half_s, 0.0

    def execute(self, output: SchedulerOutput) -> StepResult:
        if self.now >= self._look_at:
            self._look_at = self.now + 1
            evicted = self.core.scheduler.statistics().cache.pool.evicted
            late = self._half_s <= self.now < 2 * self._half_s
            for item in output.scheduled:
                if not evicted:
                    self.early.look(item.block_ids)
                if late:
                    self.late.look(item.block_ids)
            if late:
                self.sequences.append(len(output.scheduled))
        return super().execute(output)


def conversations(rate: float, seconds: float, seed: int) -> Trace:
    """Sessions at `rate` a second. A turn's prompt is all that was said before and a new message."""
    draw = random.Random(seed)
    used = 1

    def text(count: int) -> tuple[int, int]:
        nonlocal used
        used += count
        return used - count, count

    system, calls, start = text(SYSTEM_TOKENS), [], 0.0
    while (start := start + draw.expovariate(rate)) < seconds:
        at, said = start, (system,)
        for _ in range(1 + min(5, int(draw.expovariate(0.7)))):
            said = (*said, text(max(4, int(draw.lognormvariate(3.5, 0.9)))))
            answer = text(min(600, max(5, int(draw.lognormvariate(4.6, 0.7)))))
            prompt_tokens = sum(count for _, count in said)
            calls.append(TraceRequest(said, (answer,), prompt_tokens, answer[1], arrival_s=at))
            said = (*said, answer)
            at += draw.expovariate(1 / 30) + answer[1] * 0.06
    return Trace("chat", tuple(sorted(calls, key=lambda call: call.arrival_s or 0.0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{'':34}{'early':>18}{'late':>30}{'prefix':>9}")
    header = f"{'cache':6}{'blocks':>8}{'sessions/s':>12}{'requests':>9}{'blocks/seq':>10}{'run':>8}"
    print(f"{header}{'sequences':>12}{'blocks/seq':>10}{'run':>8}{'hits':>9}")
    seconds = 3600 * options.hours
    for caching, blocks, rate in CASES:
        trace = conversations(rate, seconds, options.seed)
        setup = Setup(
            device=DEVICES["cpu"],
            block_size=BLOCK,
            pool_tokens=blocks * BLOCK,
            max_num_seqs=SEATS,
            enable_prefix_caching=caching,
        )
        watched = Watched(trace, setup, seconds / 2)
        watched.run()
        cache = watched.core.scheduler.statistics().cache
        sequences = sum(watched.sequences) / max(1, len(watched.sequences))
        hits = f"{cache.hit_tokens / cache.queried_tokens:9.1%}" if caching else f"{'':9}"
        print(
            f"{'on' if caching else 'off':6}{blocks:8}{rate:12}{len(trace.requests):9}{watched.early}{sequences:12.1f}"
            f"{watched.late}{hits}",
            flush=True,
        )


if __name__ == "__main__":
    main()
