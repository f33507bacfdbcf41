"""What the first touch of memory costs after a while: `python -m bench.page_touches [--pages N] [--away MS ...]`

Pages of 4 KiB and the same amount in huge pages are touched once each, after the processor has computed in registers
for so many ms. `slow`: touches of over 20 us, which are those where a virtual machine's host had taken the mapping
away. As root it is also told in how many places of 2 MiB of the machine's memory the pages lie, and how many of the
slow touches were the first of their place: where nearly all are, it is by the place that one pays.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import struct
from pathlib import Path
from typing import Any

import numba
import numpy as np
from bench.python_cost import compute, rounds_a_ms

PAGE = 4096
HUGE_PAGE = 2 * 2**20
SLOW_NS = 20_000
ROUNDS = 5  # the last counts

_clock = ctypes.CDLL(None).clock_gettime
_clock.argtypes = [ctypes.c_int, ctypes.c_void_p]


@numba.njit(nogil=True)
def touch(memory: Any, order: Any, took: Any, now: Any, rounds: int) -> float:
    """Writes the ns of each touch to `took`."""
    away = compute(rounds)
    for place in order:
        _clock(1, now.ctypes)
        begun = now[0] * 1_000_000_000 + now[1]
        away += memory[place * PAGE]
        _clock(1, now.ctypes)
        took[place] = now[0] * 1_000_000_000 + now[1] - begun
    return away


def places(memory: Any, pages: int) -> Any:
    """The 2 MiB of the machine's memory that each page lies in. None for who may not know."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(memory.ctypes.data // PAGE * 8)
        entries = np.array(struct.unpack(f"<{pages}Q", pagemap.read(8 * pages)), np.uint64)
    frames = entries & np.uint64(2**55 - 1)
    return None if not frames.any() else frames // np.uint64(HUGE_PAGE // PAGE)


def row(pages: int, away: float, huge: bool, a_ms: float) -> str:
    raw = mmap.mmap(-1, pages * PAGE + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    raw.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    memory = np.frombuffer(raw, np.uint8)
    memory = memory[-memory.ctypes.data % HUGE_PAGE :][: pages * PAGE]
    memory[:] = 1
    order = np.random.default_rng(0).permutation(pages)
    took, now = np.zeros(pages, np.int64), np.zeros(2, np.int64)
    for _ in range(ROUNDS):
        touch(memory, order, took, now, int(away * a_ms))
    slow = took > SLOW_NS
    told = f"{'huge' if huge else '4 KiB':>6} {away:>6.0f} {took.mean() / 1e3:>8.2f} {np.median(took) / 1e3:>8.2f}"
    told += f" {slow.sum():>6} {took[slow].mean() / 1e3 if slow.any() else 0:>8.0f}"
    where = places(memory, pages)
    if where is not None:
        _, first = np.unique(where[order], return_index=True)
        told += f" {len(first):>7} {slow[order][first].sum():>6}"
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=8000)
    parser.add_argument("--away", type=float, nargs="+", default=[0.0, 10.0, 65.0, 300.0], help="ms")
    args = parser.parse_args()
    if args.pages < 1 or min(args.away) < 0:
        parser.error("--pages must be at least 1, --away at least 0")
    a_ms = rounds_a_ms()
    print(
        f"{args.pages} pages\n{'pages':>6} {'away':>6} {'us/page':>8} {'median':>8} {'slow':>6} {'us each':>8}", end=""
    )
    print(f" {'places':>7} {'first':>6}")
    for huge in (False, True):
        for away in args.away:
            print(row(args.pages, away, huge, a_ms), flush=True)


if __name__ == "__main__":
    main()
