"""The interpreter's own memory, in huge pages.

Between two steps of Python kernels run for 10 to 100 ms, and then a step's objects are somewhere in 200 MiB of heap:
hundreds of pages of 4 KiB, each somewhere else in the machine's memory. A virtual machine pays for that twice. Its host
takes mappings away behind its back, whole 2 MiB at a time (measured: every one once in two seconds), and the next touch
of such 2 MiB costs 130 us. It also walks two page tables where hardware walks one. Hundreds of places are hundreds of
chances to pay, so a step costs by the places that it touches and not by its instructions. Memory in huge pages is a
few dozen places, and a start takes a fifth of the page faults.

Linux gives huge pages to who asks before the memory is first touched. Nobody does for an interpreter:

* The C library's heap grows here by 384 MiB of addresses at once, which are asked for as a whole. Addresses cost
  nothing.
* CPython's arenas of small objects come from a region of their own (`kernels/cpu/python_arenas.py`).

The price: what has once been taken is kept for what is next, as a heap does anyway.

Rejected: MADV_COLLAPSE afterwards (half of the arenas lie across boundaries, and the page faults have been paid);
GLIBC_TUNABLES (needs a second exec, and arenas do not come from malloc); one heap for the blocks of all threads
(M_ARENA_MAX: no gain beyond this was seen); copying libpython's code to huge pages, as Node.js can do (no gain
in turns, and tools that look into a process no longer find it).

To be called by a process that is Pagemill's own, before it imports what is large: these are settings of the process.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from pathlib import Path

_HUGE_PAGE = 2 * 2**20
_RESERVED = 384 * 2**20  # bytes of addresses; a start takes 140 MiB of them
_FIRST = 4 * 2**20  # bytes: more than the heap of a process that begins has free at its end
_BEYOND = 64 * 2**20  # the heap's further steps, without huge pages
_MAPPED_ALONE = 32 * 2**20  # bytes from which a block is a mapping of its own: otherwise glibc gets there by itself

# <malloc.h>, <sys/mman.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MADV_HUGEPAGE = 14

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def gather() -> bool:
    """Ask for huge pages for what this process will allocate. False, and little or nothing changed, where the system or
    the C library has no such thing."""
    if not _system_has_huge_pages():
        return False
    if not _grow_heap(ctypes.CDLL(None)):
        return False
    try:
        from pagemill.kernels.cpu.python_arenas import gather_arenas
    except ImportError:  # no numba, no LLVM
        return True
    with suppress(MemoryError):  # a limit on addresses
        gather_arenas()
    return True


def _system_has_huge_pages() -> bool:
    try:
        return sys.platform == "linux" and "[never]" not in _SETTING.read_text()
    except OSError:
        return False


def _grow_heap(libc: ctypes.CDLL) -> bool:
    """False where it is not glibc's or cannot grow."""
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.sbrk.argtypes = [ctypes.c_ssize_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_ALONE)
    libc.mallopt(_M_TRIM_THRESHOLD, 2 * _RESERVED)
    libc.mallopt(_M_TOP_PAD, _RESERVED)
    begin = libc.malloc(_FIRST)
    end = libc.sbrk(0)
    libc.free(begin)
    libc.mallopt(_M_TOP_PAD, _BEYOND)
    if begin is None or not _RESERVED <= end - begin <= 2 * _RESERVED:
        return False  # another allocator, or a limit on data
    first = -(-begin // _HUGE_PAGE) * _HUGE_PAGE
    return not libc.madvise(first, end // _HUGE_PAGE * _HUGE_PAGE - first, _MADV_HUGEPAGE)
