"""The work list for attention is the one that a naive twin makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagemill.kernels.cpu import plan_sharing
from pagemill.kernels.cpu.plan import (
    ITEM_END,
    ITEM_FIRST,
    ITEM_SEGMENT,
    ITEM_SEQUENCE,
    ITEM_TOKENS,
    ROW_PIECES,
    ROW_SLOT,
    attention_plan,
)
from pagemill.kernels.metadata import AttentionMetadata, HostMetadata
from tests.kernels import plan_twin

_LONGEST = 4000


def _step(rng: np.random.Generator, block_size: int) -> HostMetadata:
    """Decodes, drafts, chunks and sequences with nothing to compute, some of which begin alike."""
    count = int(rng.integers(1, 40))
    lengths = rng.integers(1, int(rng.choice([40, 300, 1500, _LONGEST])), count)
    queries = np.ones(count, np.int64) if rng.random() < 0.6 else rng.integers(0, 4, count)
    if rng.random() < 0.3:
        queries[rng.integers(0, count)] = rng.integers(0, 400)
    queries[0] = max(1, queries[0])
    lengths = np.maximum(lengths, queries)
    width = -(-_LONGEST // block_size)
    tables = np.arange(1, count * width + 1).reshape(count, width)
    for _ in range(int(rng.integers(0, 5))):
        members = np.flatnonzero(rng.random(count) < rng.random())
        if len(members):
            shared = int(rng.integers(0, width + 1))
            tables[members, :shared] = tables[members[0], :shared]
    return AttentionMetadata.build(
        query_start=np.concatenate([[0], np.cumsum(queries)]),
        seq_lens=lengths,
        block_tables=tables,
        slot_mapping=np.zeros(queries.sum()),
        positions=np.zeros(queries.sum()),
    ).host


def _items(plan: Any) -> list[Any]:
    """What each item computes, in no order; of those with the same blocks it does not matter whose table is read."""
    found = []
    for item in plan.items.tolist():
        tokens = plan.tokens[item[ITEM_FIRST] : item[ITEM_FIRST] + item[ITEM_TOKENS]]
        found.append((sorted(tokens.tolist()), item[ITEM_TOKENS + 1 :]))
    return sorted(found)


def _reads_what_is_meant(plan: Any, host: HostMetadata, block_size: int) -> bool:
    """Whether the table that an item reads is, where it does, that of each of its tokens' sequences."""
    owners = np.searchsorted(host.query_start, np.arange(len(plan.rows)), "right") - 1
    for item in plan.items:
        tokens = plan.tokens[item[ITEM_FIRST] : item[ITEM_FIRST] + item[ITEM_TOKENS]]
        longest = host.seq_lens[owners[tokens]].min()
        end = min(item[ITEM_END] * plan_sharing.SEGMENT, longest)
        blocks = slice(item[ITEM_SEGMENT] * plan_sharing.SEGMENT // block_size, -(-end // block_size))
        tables = host.block_tables[owners[tokens], blocks]
        if not (tables == host.block_tables[item[ITEM_SEQUENCE], blocks]).all():
            return False
    return True


@pytest.mark.parametrize("seed", range(6))
def test_plans_are_those_of_the_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sharing = 0
    for _ in range(60):
        block_size = int(rng.choice([8, 16, 32, 64, 128, 256]))
        host = _step(rng, block_size)
        settings = {
            "group": int(rng.integers(1, 13)),
            "num_kv_heads": int(rng.integers(1, 9)),
            "block_size": block_size,
            "threads": int(rng.integers(1, 5)),
            "window": int(rng.choice([0, 0, 0, 100, 700])),
        }
        made, expected = attention_plan(host, **settings), plan_twin.attention_plan(host, **settings)
        assert _items(made) == _items(expected)
        assert made.num_parts == expected.num_parts
        made.rows[:, ROW_SLOT] *= made.rows[:, ROW_PIECES] > 0
        expected.rows[:, ROW_SLOT] *= expected.rows[:, ROW_PIECES] > 0
        assert np.array_equal(made.rows, expected.rows)
        assert _reads_what_is_meant(made, host, block_size)
        sharing += len(made.tokens) > len(made.rows)
    assert sharing > 5


def test_sequences_whose_hashes_meet_by_chance_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as Python, with a hash that is the same for all."""
    monkeypatch.setattr(plan_sharing, "_PRIME", np.uint64(0))
    monkeypatch.setattr(plan_sharing, "_same", plan_sharing._same.py_func)
    tables = np.array([[1, 2], [3, 2], [1, 2], [4, 4]], np.int32)
    found, sizes = np.zeros(4, np.int32), np.zeros(4, np.int64)
    groups = plan_sharing._alike.py_func(tables, np.arange(4, dtype=np.int32), found, sizes)
    assert groups == 1
    assert found[: sizes[0]].tolist() == [0, 2]
