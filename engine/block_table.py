"""The page table of one sequence: which physical block holds each run of `block_size` tokens."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockTable:
    """Block ids in token order: the token at position p lies in block `block_ids[p // block_size]`."""

    block_ids: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.block_ids)

    def slot(self, position: int, block_size: int) -> int:
        """Where the token at `position` lies in the pool, counted in tokens from its start."""
        return self.block_ids[position // block_size] * block_size + position % block_size

    def fork(self) -> BlockTable:
        """A table of the same blocks; who counts their references adds one to each."""
        return BlockTable(list(self.block_ids))
