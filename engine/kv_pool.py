"""The KV pool: one tensor, seen layer by layer by the model and block by block by everything else."""

from __future__ import annotations

from collections.abc import Sequence
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
        """Make the moves one after the other, runs of one kind at once. Within a run all sources are read before a
        target is written, which no run of the scheduler's can tell from one after the other."""
        for kind, run in groupby(moves, key=lambda move: move.kind):
            pairs = torch.tensor([(move.source, move.target) for move in run], dtype=torch.int64)
            if kind == "copy":
                self._ops.copy_blocks(self._pool, pairs.to(self._pool.device))
            elif kind == "out":
                self._host[pairs[:, 1]] = self._pool[pairs[:, 0].to(self._pool.device)].to(self._host.device)
            else:
                self._pool[pairs[:, 1].to(self._pool.device)] = self._host[pairs[:, 0]].to(self._pool.device)

    def _host_memory(self, num_blocks: int) -> torch.Tensor:
        pinned = self._pool.device.type == "cuda" and num_blocks > 0
        return torch.empty((num_blocks, *self._pool.shape[1:]), dtype=self._pool.dtype, pin_memory=pinned)
