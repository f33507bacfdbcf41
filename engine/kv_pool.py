"""The KV pool: one tensor, seen layer by layer by the model and block by block by everything else.

A host pool beside it has the same form. Between two pools in the host's memory neighbouring blocks move at once, layer
by layer, as long copies; between a device and the host all blocks of a run are gathered first, since there each copy
costs a launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from pagemill.engine.scheduler_output import BlockMove
from pagemill.kernels.layout import KVLayout, LayerKV
from pagemill.kernels.ops import Ops


class KVPool:
    """Memory for `layout.num_blocks` blocks, the null block included, and for `num_host_blocks` in the host's memory.

    Memory of unused blocks is not touched.
    """

    def __init__(self, layout: KVLayout, ops: Ops, num_host_blocks: int = 0) -> None:
        self.layout = layout
        self._ops = ops
        self._pool = layout.allocate()
        self._host = self._host_memory(num_host_blocks)
        self.layers: list[LayerKV] = [layout.layer(self._pool, index) for index in range(layout.num_layers)]

    def commit(self) -> None:
        """Write all of it, so that its memory is held from now on."""
        self._pool.zero_()

    def move_blocks(self, moves: Sequence[BlockMove]) -> None:
        """Make the moves one after the other, runs of one kind at once. Copies of a run are all read before one is
        written, which no run of the scheduler's can tell from one after the other."""
        for kind, run in groupby(moves, key=lambda move: move.kind):
            pairs = [(move.source, move.target) for move in run]
            if kind == "copy":
                self._ops.copy_blocks(self._pool, torch.tensor(pairs, dtype=torch.int64, device=self._pool.device))
            elif kind == "out":
                _move(self._pool, self._host, pairs)
            else:
                _move(self._host, self._pool, pairs)

    def _host_memory(self, num_blocks: int) -> torch.Tensor:
        layers, _, piece = self._pool.shape
        pinned = self._pool.device.type == "cuda" and num_blocks > 0
        return torch.empty((layers, num_blocks, piece), dtype=self._pool.dtype, pin_memory=pinned)


def _move(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    if source.device == target.device:
        for start, end, count in _runs(pairs):
            target[:, end : end + count] = source[:, start : start + count]
    else:
        starts, ends = torch.tensor(pairs, dtype=torch.int64).unbind(1)
        moved = source[:, starts.to(source.device)].to(target.device)
        target[:, ends.to(target.device)] = moved


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Pairs of neighbours as (first source, first target, how many), in the order of the pairs."""
    start, end, count = *pairs[0], 1
    for source, target in pairs[1:]:
        if source == start + count and target == end + count:
            count += 1
        else:
            yield start, end, count
            start, end, count = source, target, 1
    yield start, end, count
