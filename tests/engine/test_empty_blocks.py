"""Empty blocks in runs, against a set."""

from __future__ import annotations

import random

import pytest

from pagemill.engine.empty_blocks import ROOM, EmptyBlocks


def runs_of(blocks: set[int]) -> dict[int, int]:
    """First block and length of each run, counted the slow way."""
    runs = {}
    for first in (block for block in blocks if block - 1 not in blocks):
        length = 1
        while first + length in blocks:
            length += 1
        runs[first] = length
    return runs


def pieces(blocks: list[int]) -> int:
    return sum(index == 0 or block != blocks[index - 1] + 1 for index, block in enumerate(blocks))


@pytest.mark.parametrize("num_blocks", [2, 3, 17, 64, 300])
def test_runs_are_those_of_a_set_whatever_is_taken_and_put_back(num_blocks: int) -> None:
    rng = random.Random(num_blocks)
    empty, twin, held = EmptyBlocks(num_blocks), set(range(1, num_blocks)), list[int]()
    for _ in range(3_000):
        if twin and rng.random() < 0.4:
            count = rng.randint(1, min(len(twin), rng.choice((1, 4, 40))))
            after = rng.choice([0, *held])
            behind = min(count, runs_of(twin).get(after + 1, 0)) if after else 0
            taken = empty.take(count, after)
            assert len(taken) == len(set(taken)) == count
            assert twin.issuperset(taken)
            assert taken[:behind] == list(range(after + 1, after + 1 + behind))
            rest, longest = taken[behind:], max(runs_of(twin - set(taken[:behind])).values(), default=0)
            if rest and longest >= 2 * len(rest):
                assert pieces(rest) == 1, "there is a run for them"
            twin -= set(taken)
            held += taken
        elif held:
            block = held.pop(rng.randrange(len(held)))
            empty.add(block)
            twin.add(block)
        empty.check()
        assert dict(empty.runs()) == runs_of(twin)
        assert empty.count == len(twin)


def test_who_begins_leaves_room_and_shares_what_is_short() -> None:
    empty = EmptyBlocks(61)
    for block in empty.take(60, 0):
        empty.add(block)
    assert empty.take(4, 0) == [1, 2, 3, 4], "nobody lies before the first block"
    assert empty.take(4, 0) == [5 + ROOM + index for index in range(4)]
    assert empty.take(44 - ROOM, 16) == list(range(17, 61 - ROOM))
    assert dict(empty.runs()) == {5: ROOM, 61 - ROOM: ROOM}
    assert empty.take(2, 0) == [56, 57], "the middle of what is left"


def test_no_room_is_left_in_blocks_that_were_never_used() -> None:
    empty = EmptyBlocks(100)
    assert empty.take(4, 0) + empty.take(4, 0) == [1, 2, 3, 4, 5, 6, 7, 8]
    for block in (5, 6, 7, 8):
        empty.add(block)
    assert empty.take(4, 0) == [9, 10, 11, 12], "room of the four that were used"


@pytest.mark.parametrize(("count", "length"), [(2, 20), (12, 20), (13, 60), (50, 60), (60, 200), (150, 200)])
def test_long_runs_are_kept_for_those_who_need_them(count: int, length: int) -> None:
    empty = EmptyBlocks(400)
    empty.take(399, 0)
    first = {20: 10, 60: 50, 200: 150}
    for run, begin in first.items():
        for block in range(begin, begin + run):
            empty.add(block)
    taken = empty.take(count, 0)
    assert first[length] <= taken[0] <= taken[-1] < first[length] + length


def test_what_no_run_holds_comes_in_pieces_ascending() -> None:
    empty = EmptyBlocks(12)
    empty.take(11, 0)
    for block in (9, 2, 5, 10, 3):
        empty.add(block)
    assert empty.take(5, 0) == [2, 3, 5, 9, 10]
    assert empty.count == 0


def test_putting_back_twice_and_taking_too_much_are_caught() -> None:
    empty = EmptyBlocks(4)
    with pytest.raises(AssertionError, match="empty already"):
        empty.add(2)
    with pytest.raises(AssertionError):
        empty.take(4, 0)
