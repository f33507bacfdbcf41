"""Memory of a large result, used again for the next one.

The logits of a step are tens of MiB. In fresh pages, which the system hands out and zeroes as they are first touched,
writing them costs as much again as computing a quarter of them.
"""

from __future__ import annotations

import sys
import threading

import numpy as np
import numpy.typing as npt
import torch

_UNUSED = 2  # references to an array that only its owner holds: the owner's, and that of who counts


class ReusedMemory:
    """Makes float32 arrays. One takes the memory of the last once nobody holds that, or a view of it, any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: npt.NDArray[np.float32] = np.empty(0, np.float32)
        self._address = self._size = 0

    def lend(self, size: int) -> tuple[npt.NDArray[np.float32], int]:
        """An array of so many elements or more, whatever they are, and its address."""
        with self._lock:
            if self._size < size or sys.getrefcount(self._memory) > _UNUSED:
                self._memory = np.empty(size, np.float32)
                self._address, self._size = self._memory.ctypes.data, size
            return self._memory, self._address

    def empty(self, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns], its content whatever was there."""
        memory, _ = self.lend(rows * columns)
        return torch.from_numpy(memory[: rows * columns].reshape(rows, columns))
