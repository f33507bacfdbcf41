"""Weights into the panels of `matmul`, by the whole team: a start waits for it, and it is as fast as memory.

A panel takes `PANEL` rows of the weight and holds them word by word along in_features, so that packing is a
transposition of 32-bit words, whatever they hold. Each line of the cache that is read is used up before the next.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.matmul import PANEL
from pagemill.kernels.cpu.team import Team, run
from pagemill.kernels.cpu.views import vector

_PARTS = 4  # of the panels, for each thread
_WORD = np.uint32(0)


@helper
def _pack_panels(part: int, parts: int, weight: int, rows: int, depth: int, out: int) -> None:
    panels = (rows + PANEL - 1) // PANEL
    words, packed = vector(weight, rows * depth, _WORD), vector(out, panels * depth * PANEL, _WORD)
    for panel in range(panels * part // parts, panels * (part + 1) // parts):
        count = min(PANEL, rows - panel * PANEL)
        source = words[panel * PANEL * depth : (panel * PANEL + count) * depth]
        target = packed[panel * depth * PANEL : (panel + 1) * depth * PANEL]
        for word in range(depth):
            column = target[word * PANEL : (word + 1) * PANEL]
            for row in range(count):
                column[row] = source[row * depth + word]
            for row in range(count, PANEL):
                column[row] = _WORD


@kernel
def pack_panels(board: int, weight: int, rows: int, depth: int, out: int) -> None:
    """A weight of words [rows, depth] into panels [ceil(rows / PANEL), depth, PANEL], zeros behind it; by address."""
    run(board, _PARTS, _pack_panels, (weight, rows, depth, out))


def pack(weight: torch.Tensor, panels: npt.NDArray[Any], team: Team) -> None:
    """Rows of a weight [N, K], float32 or pairs of bfloat16, into panels of 32-bit words [ceil(N / PANEL), words of K,
    PANEL]."""
    rows = weight.contiguous()
    pack_panels(team.board(), rows.data_ptr(), len(rows), panels.shape[1], panels.ctypes.data)
