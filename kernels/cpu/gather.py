"""Rows of a weight that is prepared for products (see `matmul`): an embedding that is tied to the head.

Each kind of weight has a worker for it, called by address with a task: int64 words `GATHER_*`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.matmul import PANEL, RECORD_DEPTH, RECORD_PANELS, RECORD_WORDS
from pagemill.kernels.cpu.team import address_of, run_at
from pagemill.kernels.cpu.views import vector

if TYPE_CHECKING:
    from pagemill.kernels.cpu.linear import TaskLinear

GATHER_RECORD, GATHER_IDS, GATHER_COUNT, GATHER_OUT = range(4)
"""Words of a task: address of the weight's record, of ids int64 and their number, of the rows."""
GATHER_WORDS = 4
GATHER_PARTS = 4
"""Of the ids, for each thread."""

_ZERO = np.float32(0.0)


def _make_gather(packed: bool) -> Any:
    like = np.uint16(0) if packed else _ZERO
    pack = 2 if packed else 1

    @helper
    def gather(part: int, parts: int, task_at: int) -> None:
        task = vector(task_at, GATHER_WORDS, np.int64(0))
        record = vector(task[GATHER_RECORD], RECORD_WORDS, np.int64(0))
        count, out, depth = task[GATHER_COUNT], task[GATHER_OUT], record[RECORD_DEPTH]
        ids = vector(task[GATHER_IDS], count, np.int64(0))
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
def pair_gatherer() -> int:
    """The address of the worker for a weight of one section, bfloat16."""
    address: int = address_of(_pairs)
    return address


@kernel
def float_gatherer() -> int:
    """The same for float32."""
    address: int = address_of(_floats)
    return address


@helper
def ids_fit(ids: Any, limit: int) -> bool:
    fit = True
    for token in ids:
        fit = fit and 0 <= token < limit
    return fit


@kernel
def gather_rows(board: int, worker: int, task_at: int, limit: int) -> bool:
    """Run a task; returns False, and does nothing, where an id is not below `limit`."""
    task = vector(task_at, GATHER_WORDS, np.int64(0))
    if not ids_fit(vector(task[GATHER_IDS], task[GATHER_COUNT], np.int64(0)), limit):
        return False
    run_at(board, GATHER_PARTS, worker, task_at)
    return True


def gather(linear: TaskLinear, token_ids: torch.Tensor, board: int) -> torch.Tensor:
    """Rows token_ids int64 [T] of the weight, dequantised: [T, in_features]."""
    ids = token_ids.contiguous()
    out = torch.empty((len(ids), linear.in_features), dtype=linear.dtype)
    task = np.array([linear.record.ctypes.data, ids.data_ptr(), len(ids), out.data_ptr()], np.int64)
    if not gather_rows(board, linear.gatherer(), task.ctypes.data, linear.out_features):
        raise unknown_ids(ids, linear)
    return out


def unknown_ids(ids: torch.Tensor, linear: TaskLinear) -> IndexError:
    return IndexError(f"ids must lie in 0 .. {linear.out_features - 1}, got {int(ids.min())} .. {int(ids.max())}")
