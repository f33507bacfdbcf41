"""The work list for attention is kept from step to step where it would be made again."""

from __future__ import annotations

import numpy as np
import pytest

from pagemill.kernels.cpu.plan import PlanKeeper, attention_plan
from pagemill.kernels.metadata import AttentionMetadata


@pytest.mark.parametrize("seed", range(10))
def test_a_kept_plan_is_the_one_that_would_be_made(seed: int) -> None:
    """Over steps of mostly the same sequences, which cross segments, share them, come, go and have chunks."""
    rng = np.random.default_rng(seed)
    shape = {"group": int(rng.integers(1, 12)), "num_kv_heads": 3, "block_size": 16}
    keeper = PlanKeeper()
    longest = int(rng.choice([250, 600]))
    lengths = rng.integers(1, longest, int(rng.integers(1, 5)))
    kept = 0
    last = None
    for _ in range(300):
        lengths = lengths + 1
        if rng.random() < 0.02:
            lengths = rng.integers(1, longest, int(rng.integers(1, 5)))
        queries = np.ones_like(lengths)
        if rng.random() < 0.1:
            queries[-1] = rng.integers(0, lengths[-1])
        if rng.random() < 0.05 and len(lengths) > 1:
            queries[:2] = (0, min(2, lengths[1]))
        tables = np.arange(len(lengths) * 80).reshape(-1, 80)
        tables[:, : int(rng.integers(0, 2)) * 40] = 0  # what two have in common
        host = AttentionMetadata.build(
            query_start=np.concatenate([[0], np.cumsum(queries)]),
            seq_lens=lengths,
            block_tables=tables,
            slot_mapping=np.zeros(queries.sum()),
            positions=np.zeros(queries.sum()),
        ).host
        settings = shape | {"threads": int(rng.integers(1, 3)) if rng.random() < 0.1 else 2}
        settings["window"] = 100 if rng.random() < 0.05 else 0
        plan, made = keeper.plan(host, **settings), attention_plan(host, **settings)
        for one, other in zip(plan[:3], made[:3], strict=True):
            assert np.array_equal(one, other)
        assert plan.num_parts == made.num_parts
        kept += plan is last
        last = plan
    assert kept > 100 or longest > 250
