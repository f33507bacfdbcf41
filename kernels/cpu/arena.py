"""Memory for weights and activations, in huge pages.

In pages of 4 KiB the processor's own prefetching stops at every page: measured with one row, 26 GB/s instead of 42.
Blocks of the KV pool are read in any order, which is hard on what keeps the translations of addresses.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

_CHUNK = 64 * 2**20
_HUGE_PAGE = 2 * 2**20
_ALIGNMENT = 64  # bytes: a cache line


class Arena:
    """Hands out arrays that lie one behind the other. A chunk of it is freed when none of its arrays is left."""

    def __init__(self) -> None:
        self._chunk: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
        """An array at the start of a cache line, its content whatever was there."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if self._used + size > len(self._chunk):
            self._chunk = huge_pages(max(_CHUNK, size))
            self._used = 0
        array: npt.NDArray[Any] = self._chunk[self._used : self._used + size].view(dtype).reshape(shape)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return array


def huge_pages(size: int) -> npt.NDArray[np.uint8]:
    """So many bytes, zero, from the start of a huge page on. Memory is committed as it is first touched, and given back
    when the array is gone. It is not the C library's, whose heap would keep it. Raises `MemoryError`."""
    try:
        memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the system refused {size} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % _HUGE_PAGE
    return raw[start : start + size]
