"""What choosing the tokens of a step costs, by sampling parameters: 256 rows over a vocabulary of 150,000.

    python bench/sampler_cost.py [--device cuda] [--rows N] [--vocab N] [--repeat N] [--only NAME] [--json]

The logits of "peaked" rows are normal with deviation 2.5 and a few likely tokens, as a trained model's are; those of
"flat" rows have deviation 0.3, so that a top_p of 0.95 keeps most of the vocabulary: the worst case of a sampler.
Penalties are over 1,000 distinct tokens a row; a grammar's mask allows half of the tokens, or (`narrow`) 20 of them.
Every run gets fresh logits, copied outside the time taken. Milliseconds a step, medians: by the clock, and in brackets
those that this process had a core, over all of its threads, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from pagemill.kernels.ops import LogitEdits, Ops, SampleBatch, select_ops

HISTORY = 1000
Step = Callable[[torch.Tensor], object]


def logits_of(kind: str, rows: int, vocab: int, device: str) -> torch.Tensor:
    """float32 [rows, vocab]; drawn for 8 rows and turned by a token a row, since drawing all takes a minute."""
    generator = torch.Generator().manual_seed(1)
    if kind == "flat":
        base = torch.randn((8, vocab), generator=generator) * 0.3
    else:
        base = torch.randn((8, vocab), generator=generator) * 2.5
        likely = torch.randint(vocab, (8, 5), generator=generator)
        base.scatter_add_(1, likely, torch.tensor([[17.0, 16.0, 15.0, 14.0, 13.0]]).expand(8, 5))
    return torch.stack([base[row % 8].roll(row) for row in range(rows)]).to(device)


def sampled(rows: int, **fields: float) -> SampleBatch:
    changed = {name: np.full(rows, value, getattr(SampleBatch.greedy(0), name).dtype) for name, value in fields.items()}
    numbers = np.arange(rows)
    return dataclasses.replace(
        SampleBatch.greedy(rows), seed=numbers.astype(np.uint64), position=numbers.astype(np.int64), **changed
    )


def masked(rows: int, vocab: int, share: float) -> LogitEdits:
    rng = np.random.default_rng(2)
    allowed = rng.random((rows, -(-vocab // 32) * 32)) < share
    masks = np.packbits(allowed, axis=1, bitorder="little").view("<u4")
    return LogitEdits(mask_rows=np.arange(rows, dtype=np.int32), masks=masks)


def penalised(rows: int, vocab: int, history: int) -> LogitEdits:
    rng = np.random.default_rng(3)
    ids = np.concatenate([rng.choice(vocab, history, replace=False) for _ in range(rows)]).astype(np.int32)
    return LogitEdits(
        penalty_rows=np.arange(rows, dtype=np.int32),
        repetition=np.full(rows, 1.1, np.float32),
        presence=np.full(rows, 0.2, np.float32),
        frequency=np.full(rows, 0.1, np.float32),
        starts=np.arange(0, rows * history + 1, history, dtype=np.int32),
        ids=ids,
        counts=rng.integers(0, 4, ids.size).astype(np.int32),
    )


def cases(ops: Ops, rows: int, vocab: int) -> Iterator[tuple[str, Step]]:
    def sample(**fields: float) -> Step:
        batch = sampled(rows, **fields)
        return lambda logits: ops.sample(logits, batch)

    def edit(edits: LogitEdits, then: Step | None = None) -> Step:
        def step(logits: torch.Tensor) -> None:
            ops.edit_logits(logits, edits)
            if then is not None:
                then(logits)

        return step

    def logprobs(top: int) -> Step:
        def step(logits: torch.Tensor) -> None:
            ops.logprobs(logits, torch.zeros(rows, dtype=torch.int64, device=logits.device), top)

        return step

    everything: dict[str, float] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02}
    penalties = penalised(rows, vocab, min(HISTORY, vocab))
    yield "greedy", sample()
    yield "temperature 1", sample(temperature=1.0)
    yield "top_k 50", sample(temperature=1.0, top_k=50)
    yield "top_k 5000", sample(temperature=1.0, top_k=5000)
    yield "top_p 0.95", sample(temperature=1.0, top_p=0.95)
    yield "min_p 0.05", sample(temperature=1.0, min_p=0.05)
    yield "top_k, top_p, min_p", sample(**everything)
    yield "penalties alone", edit(penalties)
    yield "all with penalties", edit(penalties, sample(**everything))
    yield "grammar mask alone", edit(masked(rows, vocab, 0.5))
    yield "narrow mask alone", edit(masked(rows, vocab, 20 / vocab))
    yield "narrow mask, greedy", edit(masked(rows, vocab, 20 / vocab), sample())
    yield "logprobs 0", logprobs(0)
    yield "logprobs 5", logprobs(5)
    yield "logprobs 20", logprobs(20)


def timed(step: Step, logits: torch.Tensor, repeat: int) -> tuple[float, float]:
    """Median milliseconds by the clock and of processor time, of `repeat` runs after one that warms up."""
    work = logits.clone()
    taken = []
    for _ in range(repeat + 1):
        work.copy_(logits)
        if logits.is_cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter(), time.process_time()
        step(work)
        if logits.is_cuda:
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
    clock, cores = zip(*taken[1:], strict=True)
    return statistics.median(clock) * 1000, statistics.median(cores) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernels", help="another back end than the device's own: reference, interpret")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=150_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    ops = select_ops(options.device, override=options.kernels, threads=options.threads)
    if not options.json:
        print(f"{ops.name}, {options.rows} rows x {options.vocab} tokens, ms a step: by the clock (of all cores)")
        print(f"{'':24}{'peaked':>20}{'flat':>20}")
    figures: dict[str, dict[str, Any]] = {}
    for kind in ("peaked", "flat"):
        logits = logits_of(kind, options.rows, options.vocab, options.device)
        for name, step in cases(ops, options.rows, options.vocab):
            if options.only in name:
                figures.setdefault(name, {})[kind] = timed(step, logits, options.repeat)
    for name, by_kind in figures.items():
        if options.json:
            print(json.dumps({"case": name, "rows": options.rows, "vocab": options.vocab, "ms": by_kind}))
        else:
            print(f"{name:24}" + "".join(f"{f'{clock:.1f} ({cores:.1f})':>20}" for clock, cores in by_kind.values()))


if __name__ == "__main__":
    main()
