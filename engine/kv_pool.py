"""The KV pool: one tensor, seen layer by layer by the model and block by block by everything else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagemill.kernels.layout import KVLayout, LayerKV
from pagemill.kernels.ops import Ops


class KVPool:
    """Memory for `layout.num_blocks` blocks, the null block included. Memory of unused blocks is not touched."""

    def __init__(self, layout: KVLayout, ops: Ops) -> None:
        self.layout = layout
        self._ops = ops
        self._pool = layout.allocate()
        self.layers: list[LayerKV] = [layout.layer(self._pool, index) for index in range(layout.num_layers)]

    def commit(self) -> None:
        """Write all of it, so that its memory is held from now on."""
        self._pool.zero_()

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), all layers at once."""
        pairs = torch.tensor(copies, dtype=torch.int64, device=self._pool.device)
        self._ops.copy_blocks(self._pool, pairs)
