"""Bookkeeping of the host pool: blocks of `swap_space` that hold the content of swapped-out sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class HostPool:
    """Host blocks are held by one sequence each, have no reference counts and no cache: a stack of free ids."""

    __slots__ = ("_free", "total")

    def __init__(self, num_blocks: int) -> None:
        self.total = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. The caller has looked at `num_free`."""
        assert count <= len(self._free), f"{count} host blocks asked for, {len(self._free)} free"
        return [self._free.pop() for _ in range(count)]

    def free(self, block_ids: Sequence[int]) -> None:
        self._free.extend(reversed(block_ids))

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that every host block is free or held once."""
        known = [*self._free, *(block_id for block_ids in holders for block_id in block_ids)]
        assert sorted(known) == list(range(self.total)), "host blocks were lost or are held twice"
