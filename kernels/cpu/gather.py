"""Rows of a weight that lies in panels (see `matmul`): an embedding that is tied to the head."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.matmul import PANEL, RECORD_DEPTH, RECORD_PANELS, RECORD_WORDS
from pagemill.kernels.cpu.team import run
from pagemill.kernels.cpu.views import vector

_PARTS = 4  # of the ids, for each thread
_ZERO = np.float32(0.0)


def _make_gather(packed: bool) -> Any:
    like = np.uint16(0) if packed else _ZERO
    pack = 2 if packed else 1

    @helper
    def gather(part: int, parts: int, record_at: int, ids: Any, out: int) -> None:
        record = vector(record_at, RECORD_WORDS, np.int64(0))
        depth = record[RECORD_DEPTH]
        count = ids.shape[0]
        for index in range(count * part // parts, count * (part + 1) // parts):
            row = vector(out + index * depth * 4, depth * pack, like)
            token = ids[index]
            panel = record[RECORD_PANELS] + token // PANEL * depth * PANEL * 4
            stored = vector(panel, depth * PANEL * pack, like)[token % PANEL * pack :]
            for word in range(depth):
                for half in range(pack):
                    row[word * pack + half] = stored[word * PANEL * pack + half]

    return gather


_pairs, _floats = _make_gather(True), _make_gather(False)


@kernel
def gather_pairs(board: int, record: int, ids: int, count: int, out: int) -> None:
    """Rows ids int64 [count] of a weight of one section, to out [count, in_features]; all by address."""
    run(board, _PARTS, _pairs, (record, vector(ids, count, np.int64(0)), out))


@kernel
def gather_floats(board: int, record: int, ids: int, count: int, out: int) -> None:
    """As `gather_pairs`, of float32."""
    run(board, _PARTS, _floats, (record, vector(ids, count, np.int64(0)), out))
