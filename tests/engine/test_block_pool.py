"""The block pool by hand, and 10,000 random operations against a dictionary."""

from __future__ import annotations

import random

import pytest

from pagemill.engine.block_pool import BlockPool


def test_allocates_every_block_but_the_null_block_once() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    with pytest.raises(AssertionError, match="1 blocks asked for, 0 free"):
        pool.allocate(1)


def test_a_pool_without_a_usable_block_is_refused() -> None:
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)


def test_shared_block_is_freed_by_the_last_holder() -> None:
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    pool.touch([block])
    assert pool.statistics().shared == 1
    pool.free([block])
    assert pool.num_free == 1
    pool.free([block])
    assert pool.num_free == 2
    pool.check([])


def test_freeing_what_nobody_holds_is_caught() -> None:
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    pool.free([block])
    with pytest.raises(AssertionError, match="freed without being held"):
        pool.free([block])


def test_blocks_without_content_go_first_then_the_oldest_sequence_tail_first() -> None:
    pool = BlockPool(6)
    old, young, empty = pool.allocate(2), pool.allocate(2), pool.allocate(1)
    for block in old + young:
        pool.cache(block, bytes([block]))
    pool.free(old)
    pool.free(young)
    pool.free(empty)
    assert pool.allocate(5) == [*empty, old[1], old[0], young[1], young[0]]
    assert pool.statistics().evicted == 4


def test_a_cached_block_comes_back_from_the_free_list_until_it_is_reused() -> None:
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    assert pool.cache(block, b"name")
    pool.free([block])
    assert pool.statistics().cached == 1
    assert pool.lookup(b"name") == block
    pool.touch([block])
    assert pool.num_free == 1
    pool.free([block])
    pool.allocate(2)
    assert pool.lookup(b"name") is None


def test_the_first_block_with_a_content_stays_the_one_that_is_found() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    assert pool.cache(first, b"name")
    assert not pool.cache(second, b"name")
    assert pool.lookup(b"name") == first
    pool.check([[first, second]])


def test_check_sees_a_leak_and_a_double_hold_and_passes_over_null_blocks() -> None:
    pool = BlockPool(4)
    held = pool.allocate(2)
    pool.check([held])
    pool.check([[0, 0, *held]])
    for wrong in ([], [held, held], [held[:1]]):
        with pytest.raises(AssertionError):
            pool.check(wrong)


def test_ten_thousand_random_operations() -> None:
    rng = random.Random(5)
    pool = BlockPool(40)
    tables: list[list[int]] = []
    names = 0
    for _ in range(10_000):
        action = rng.randrange(5)
        if action == 0 and pool.num_free:
            tables.append(pool.allocate(rng.randint(1, min(6, pool.num_free))))
        elif action == 1 and tables:
            pool.free(tables.pop(rng.randrange(len(tables))))
        elif action == 2 and tables:
            shared = list(rng.choice(tables))
            pool.touch(shared)
            tables.append(shared)
        elif action == 3 and tables:
            names += rng.randrange(2)
            pool.cache(rng.choice(rng.choice(tables)), names.to_bytes(4, "little"))
        elif action == 4 and names:
            block = pool.lookup(rng.randint(0, names).to_bytes(4, "little"))
            if block is not None:
                pool.touch([block])
                tables.append([block])
        pool.check(tables)
    for table in tables:
        pool.free(table)
    pool.check([])
    assert pool.num_free == 39
