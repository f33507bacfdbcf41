"""A request's tokens depend on nothing that happens beside it: drawn ones with a seed no less than greedy ones."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from pagemill.engine.assembly import EngineParts, build
from pagemill.engine.config import EngineConfig
from pagemill.engine.prompt import TokenIds, make_request
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.tiny_models import CONFIGS, VOCAB, save_model

Job = tuple[list[int], SamplingParams]
Tokens = dict[tuple[str, int], list[int]]


def jobs(seed: int) -> dict[str, Job]:
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(20)]
    made: dict[str, Job] = {}
    for index in range(32):
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0, 1.5]),
            top_k=rng.choice([0, 0, 5, 40]),
            top_p=rng.choice([1.0, 1.0, 0.8]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            seed=rng.choice([7, rng.randrange(2**64)]),
            n=rng.choice([1, 1, 1, 2, 3]),
            presence_penalty=rng.choice([0.0, 0.0, 0.8]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            logit_bias=rng.choice([{}, {}, {5: 2.0, 9: -3.0}]),
            logprobs=rng.choice([None, None, 2]),
            max_tokens=rng.randint(1, 40),
            ignore_eos=True,
        )
        made[f"r{index}"] = (shared + own if rng.random() < 0.5 else own, params)
    return made


def engine(path: Path, **settings: Any) -> EngineParts:
    fields: dict[str, Any] = {
        "model": str(path),
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "skip_tokenizer_init": True,
        "block_size": 4,
        "num_blocks_override": 2000,
    }
    parts = build(EngineConfig(**(fields | settings)))
    parts.core.scheduler.promises.forecast = None  # admit without foresight, so that a small pool preempts
    return parts


def run(parts: EngineParts, batch: dict[str, Job]) -> Tokens:
    tokens: Tokens = {}
    for name, (prompt, params) in batch.items():
        parts.core.add(make_request(name, TokenIds(prompt), params, parts.limits, None))
    while parts.core.has_requests:
        for output in parts.core.step():
            tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    parts.core.check()
    assert parts.core.scheduler.statistics().cache.pool.used == 0
    return tokens


@pytest.mark.parametrize("model", ["llama-gqa", "opt-norm-before"])
def test_alone_together_recomputed_swapped_cached_or_not(model: str, tmp_path: Path) -> None:
    path = save_model(CONFIGS[model](), tmp_path)
    batch = jobs(len(model))
    lonely = engine(path, enable_prefix_caching=False)
    alone: Tokens = {}
    for name, job in batch.items():
        alone |= run(lonely, {name: job})

    assert run(engine(path, enable_prefix_caching=False), batch) == alone
    cached = engine(path)
    assert run(cached, batch) == alone
    assert run(cached, batch) == alone
    assert cached.core.scheduler.statistics().cache.hit_tokens > 0
    for mode in ("recompute", "swap"):
        pressure = {"num_blocks_override": 60, "max_num_batched_tokens": 48, "num_speculative_tokens": 0}
        small = engine(path, preemption_mode=mode, swap_space=0.01, **pressure)
        assert run(small, batch) == alone, mode
        statistics = small.core.scheduler.statistics()
        assert statistics.preemptions > 3
        assert (statistics.swap_preemptions > 3) == (mode == "swap")
    careful = engine(path, num_blocks_override=60, admission="reserve")
    assert run(careful, batch) == alone
    assert careful.core.scheduler.statistics().preemptions == 0


def test_different_seeds_and_choices_differ(tmp_path: Path) -> None:
    path = save_model(CONFIGS["llama-gqa"](), tmp_path)
    parts = engine(path)
    batch = {
        f"s{seed}": ([1, 2, 3], SamplingParams(seed=seed, n=3, max_tokens=12, ignore_eos=True)) for seed in range(4)
    }
    texts = list(map(tuple, run(parts, batch).values()))
    assert len(texts) == len(set(texts)) == 12
