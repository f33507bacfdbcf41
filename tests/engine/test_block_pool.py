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
    assert [pool.allocate(1)[0] for _ in range(5)] == [*empty, old[1], old[0], young[1], young[0]]
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


def test_a_sequence_gets_the_blocks_behind_its_last_and_leaves_others_room() -> None:
    pool = BlockPool(100)
    pool.free(pool.allocate(99))
    first, second = pool.allocate(3), pool.allocate(3)
    assert first == [1, 2, 3]
    assert second == [12, 13, 14], "eight blocks are left for the first to grow"
    for _ in range(8):
        first += pool.allocate(1, first[-1])
    assert first == list(range(1, 12))
    assert pool.allocate(2, second[-1]) == [15, 16]
    pool.check([first, second, [15, 16]])


def test_a_cached_block_is_no_neighbour_to_have_before_its_time() -> None:
    pool = BlockPool(8)
    first, old, young = pool.allocate(1), pool.allocate(1, 1), pool.allocate(5)
    assert (first, old) == ([1], [2])
    for block in (old[0], young[0]):
        pool.cache(block, bytes([block]))
    pool.free(young[:1])
    pool.free(old)
    assert pool.allocate(1, first[-1]) == young[:1], "the older prefix goes, though block 2 lies right behind"
    assert pool.lookup(bytes([2])) == 2


def test_forgotten_blocks_are_empty_ones() -> None:
    pool = BlockPool(9)
    table = pool.allocate(8)
    for block in table[:5]:
        pool.cache(block, bytes([block]))
    pool.free(table)
    assert pool.forget_cached() == 5
    pool.check([])
    assert pool.allocate(8) == table
    assert pool.statistics().evicted == 0


@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_random_operations(seed: int) -> None:
    """The twin keeps lists: blocks without content, and names of cached blocks by when they were let go."""
    rng = random.Random(seed)
    pool = BlockPool(40)
    tables: list[list[int]] = []
    empty, aged = set(range(1, 40)), list[int]()  # the twin's
    names = 0

    def held(block: int) -> int:
        return sum(table.count(block) for table in tables)

    for _ in range(2_500):
        action = rng.randrange(5)
        if action == 0 and pool.num_free:
            count = rng.randint(1, min(6, pool.num_free))
            after = rng.choice(tables)[-1] if tables and rng.random() < 0.5 else 0
            hashes = [pool.blocks[block].block_hash for block in aged[: max(0, count - len(empty))]]
            taken = pool.allocate(count, after)
            assert not any(held(block) for block in taken)
            assert after + 1 not in empty or not after or taken[0] == after + 1
            evicted = aged[: max(0, count - len(empty))]
            assert set(taken) - empty == set(evicted), "prefixes leave by age, and only for want of empty blocks"
            assert all(name is not None and pool.lookup(name) is None for name in hashes)
            del aged[: len(evicted)]
            empty -= set(taken)
            tables.append(taken)
        elif action == 1 and tables:
            table = tables.pop(rng.randrange(len(tables)))
            pool.free(table)
            for block in reversed(table):
                if not held(block):
                    if pool.blocks[block].block_hash is None:
                        empty.add(block)
                    else:
                        aged.append(block)
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
                aged = [other for other in aged if other != block]
        pool.check(tables)
        assert pool.num_free == len(empty) + len(aged)
    for table in tables:
        pool.free(table)
    pool.check([])
    assert pool.num_free == 39
