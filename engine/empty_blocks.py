"""Free blocks without content, kept as runs of neighbouring ids so that sequences get blocks that lie in a row.

Attention reads neighbouring blocks faster than scattered ones (docs/architecture.md), and swaps move them at once. A
sequence that grows is given the blocks behind its last one as far as they are empty. Otherwise it begins anew in a run
that is long enough, the shortest that is found, and a few blocks in, since what lies before the run belongs to somebody
who may grow too. Where no run is as long as that, a long one is shared: it begins about in the middle. Where all are
shorter than what is wanted, several are used up. In blocks that nobody has used yet no room is left: their memory is
committed as they are first written, which costs more than a run is worth. Nobody is refused for want of a run: any
empty block serves any sequence, and runs are only a preference.

Every run knows its other end at both of its ends, and runs hang in lists by the bit length of their length, with one
word to tell which lists hold any (the segregated fit of Masmano et al., "TLSF", 2004, over ids instead of bytes). So
putting a block back, with its neighbours joined, takes constant time, and so does finding a run. A run from a list of
longer ones is long enough; of the list that may hold shorter ones only the first run is looked at.

Rejected: a buddy system, which rounds up to powers of two and so would hold blocks without a token; the exact best fit
in a sorted tree, O(log n) for runs that are no better to read.
"""

from __future__ import annotations

from collections.abc import Iterator

ROOM = 8
"""Blocks left empty before a run that begins, where there are as many: of 4, 8, 16 and 32 the one that made the longest
runs of chat traffic (`bench/block_runs.py`)."""


class EmptyBlocks:
    """Ids from 1 to `num_blocks` - 1. At first all are here."""

    __slots__ = ("_end", "_first", "_follows", "_here", "_lists", "_precedes", "_used", "count")

    def __init__(self, num_blocks: int) -> None:
        self.count = num_blocks - 1
        # Also of both ids beside those that can be here, which never are.
        self._here = bytearray(1) + bytearray(b"\1") * self.count + bytearray(1)
        self._end = [0] * num_blocks  # of the first and of the last block of a run: its other end
        self._first = [0] * (num_blocks.bit_length() + 1)  # by bit length of a run's length; 0: there is none
        self._follows = [0] * num_blocks  # the next and the previous run of the list, by first block
        self._precedes = [0] * num_blocks
        self._used = 0  # the largest id that was ever taken
        self._lists = 0  # bit n: list n holds a run
        if self.count:
            self._link(1, self.count)

    def add(self, block_id: int) -> None:
        """Put a block back that is not here."""
        assert not self._here[block_id], f"block {block_id} is empty already"
        first = last = block_id
        if self._here[block_id - 1]:
            first = self._end[block_id - 1]
            self._unlink(first)
        if self._here[block_id + 1]:
            last = self._end[block_id + 1]
            self._unlink(block_id + 1)
        self._here[block_id] = 1
        self.count += 1
        self._link(first, last)

    def take(self, count: int, after: int) -> list[int]:
        """Take `count` blocks, at most as many as are here: those behind block `after` first, which is not here, then
        some in as few runs as there are, ascending. `after` 0: there is none."""
        assert count <= self.count and not self._here[after]
        taken: list[int] = []
        if after and count and self._here[after + 1]:
            taken = self._cut(after + 1, after + 1, min(count, self._end[after + 1] - after))
        others: list[int] = []
        while left := count - len(taken) - len(others):
            first = self._long_enough(left + ROOM) or self._first[self._lists.bit_length() - 1]
            length = self._end[first] - first + 1
            wanted = min(left, length)
            room = min(ROOM, (length - wanted) // 2, max(0, self._used + 1 - first)) if first > 1 else 0
            others += self._cut(first, first + room, wanted)
        others.sort()
        return taken + others

    def runs(self) -> Iterator[tuple[int, int]]:
        """First block and length of every run. O(all blocks)."""
        first = 1
        while first < len(self._end):
            if self._here[first]:
                yield first, self._end[first] - first + 1
                first = self._end[first]
            first += 1

    def check(self) -> None:
        """Assert that runs are as long as they can be and that each is in its list. O(all blocks)."""
        listed = set()
        for length_bits, head in enumerate(self._first):
            assert (head != 0) == bool(self._lists >> length_bits & 1), "a list is marked wrongly"
            run, before = head, 0
            while run:
                assert self._precedes[run] == before and (self._end[run] - run + 1).bit_length() == length_bits
                listed.add(run)
                run, before = self._follows[run], run
        found = dict(self.runs())
        assert listed == set(found), "a run is in no list, or a list holds none"
        assert sum(found.values()) == self.count == sum(self._here), "empty blocks are miscounted"
        for first, length in found.items():
            assert all(self._here[first : first + length]) and self._end[first + length - 1] == first, "a run is torn"
            assert not self._here[first - 1] and not self._here[first + length], "two runs are one"

    def _long_enough(self, length: int) -> int:
        """The first block of a run of so many or more; 0 where none was found."""
        size = length.bit_length()
        if size >= len(self._first):
            return 0
        first = self._first[size]
        if first and self._end[first] - first >= length - 1:
            return first
        longer = self._lists >> (size + 1)
        return self._first[size + (longer & -longer).bit_length()] if longer else 0

    def _cut(self, first: int, begin: int, count: int) -> list[int]:
        """Take blocks out of the run from `first` on."""
        last, end = self._end[first], begin + count
        self._unlink(first)
        self._here[begin:end] = bytes(count)
        self.count -= count
        if first < begin:
            self._link(first, begin - 1)
        if end <= last:
            self._link(end, last)
        self._used = max(self._used, end - 1)
        return list(range(begin, end))

    def _link(self, first: int, last: int) -> None:
        self._end[first], self._end[last] = last, first
        size = (last - first + 1).bit_length()
        head = self._first[size]
        self._follows[first], self._precedes[first] = head, 0
        if head:
            self._precedes[head] = first
        self._first[size] = first
        self._lists |= 1 << size

    def _unlink(self, first: int) -> None:
        size = (self._end[first] - first + 1).bit_length()
        before, behind = self._precedes[first], self._follows[first]
        if behind:
            self._precedes[behind] = before
        if before:
            self._follows[before] = behind
        else:
            self._first[size] = behind
            if not behind:
                self._lists ^= 1 << size
