"""The interpreter's own memory, in huge pages.

Between two steps of Python kernels run for 10 to 100 ms, and then a step's objects are somewhere in 200 MiB of heap:
hundreds of pages of 4 KiB, each somewhere else in the machine's memory. A virtual machine pays for that twice. Its host
takes mappings away behind its back, whole 2 MiB at a time (measured: every one once in two seconds), and the next touch
of such 2 MiB costs 130 us. It also walks two page tables where hardware walks one. Hundreds of places are hundreds of
chances to pay, so a step costs by the places that it touches and not by its instructions. Memory in huge pages is a
few dozen places, and a start takes a fifth of the page faults.

Linux gives huge pages to who asks before the memory is first touched. Nobody does for an interpreter:

* The C library's heap grows here by 384 MiB of addresses at once, which are asked for as a whole. Addresses cost
  nothing. Blocks of less than 4 MiB come from there, those of all threads (one arena); larger ones are mapped on their
  own as ever, and NumPy asks for theirs.
* CPython maps arenas of 1 MiB for objects of up to 512 bytes. From here on it takes them from that heap
  (`kernels/cpu/python_arenas.py`), through the documented `PyObject_SetArenaAllocator`.

Rejected: MADV_COLLAPSE afterwards (half of the arenas lie across boundaries, and the page faults have been paid);
GLIBC_TUNABLES (needs a second exec, and arenas do not come from malloc); copying libpython's code to huge pages, as
Node.js can do (tools that look into a process no longer find it). The price: what the heap has once been is kept, and
blocks of any size come from the heap while what is left of its addresses is larger.

To be called by a process that is Pagemill's own, before it imports what is large: these are settings of the process.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_HUGE_PAGE = 2 * 2**20
_RESERVED = 384 * 2**20  # bytes of addresses; a start takes 230 MiB of them
_MAPPED_ALONE = 4 * 2**20  # bytes from which a block of malloc's is a mapping of its own, as NumPy has it
_BEYOND = 64 * 2**20  # the heap's further steps, without huge pages
_NEVER = 2**31 - 1

# <malloc.h>, <sys/mman.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_MADV_HUGEPAGE = 14

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def gather() -> bool:
    """Ask for huge pages for what this process will allocate. False, and little or nothing changed, where the system or
    the C library has no such thing."""
    if not _system_has_huge_pages():
        return False
    heap = _grow_heap(ctypes.CDLL(None))
    if heap is None:
        return False
    try:
        from pagemill.kernels.cpu.python_arenas import take_arenas_from
    except ImportError:  # no numba, no LLVM
        return True
    take_arenas_from(heap)
    return True


def _system_has_huge_pages() -> bool:
    try:
        return sys.platform == "linux" and "[never]" not in _SETTING.read_text()
    except OSError:
        return False


def _grow_heap(libc: ctypes.CDLL) -> range | None:
    """Addresses of a heap that has been grown in one step. None where it is not glibc's or cannot grow."""
    if not hasattr(libc, "gnu_get_libc_version"):
        return None
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.sbrk.argtypes = [ctypes.c_ssize_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_ALONE)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    libc.mallopt(_M_ARENA_MAX, 1)
    libc.mallopt(_M_TOP_PAD, _RESERVED)
    begin = libc.malloc(_MAPPED_ALONE - 2**16)  # more than the heap has free at its end
    end = libc.sbrk(0)
    libc.free(begin)
    libc.mallopt(_M_TOP_PAD, _BEYOND)
    if begin is None or not 0 <= end - begin - _RESERVED <= _RESERVED:
        return None  # another allocator, or a limit on data
    first = -(-begin // _HUGE_PAGE) * _HUGE_PAGE
    if libc.madvise(first, end // _HUGE_PAGE * _HUGE_PAGE - first, _MADV_HUGEPAGE):
        return None
    return range(begin, end)
