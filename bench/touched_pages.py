"""How many pages of memory a piece of code touches, as Linux counts them for this process; a huge page is one.

What runs once in 50 ms costs by the page rather than by the instruction (`pagemill.engine.interpreter_memory` says
why). The count is the same from run to run, which its time is not.
"""

from __future__ import annotations

import os

_HUGE_PAGE = 2 * 2**20


class TouchedPages:
    """`begin`, then the code, then `end`: what was touched between, this object's own way of asking left out."""

    def __init__(self) -> None:
        self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY)
        self._smaps = os.open("/proc/self/smaps", os.O_RDONLY)
        self._own = 0
        for _ in range(3):
            self.begin()
            self._own = self._count(self.end())

    def begin(self) -> None:
        os.write(self._clear, b"1")

    def end(self) -> list[bytes]:
        """What the system says now, to be counted by `pages` when nothing is measured."""
        os.lseek(self._smaps, 0, os.SEEK_SET)
        said = []
        while part := os.read(self._smaps, 1 << 20):
            said.append(part)
        return said

    def pages(self, said: list[bytes]) -> int:
        return self._count(said) - self._own

    def _count(self, said: list[bytes]) -> int:
        page = os.sysconf("SC_PAGE_SIZE")
        count = referenced = 0
        for line in b"".join(said).splitlines():
            if line.startswith(b"Referenced:"):
                referenced = int(line.split()[1]) * 1024
            elif line.startswith(b"AnonHugePages:"):  # the same mapping's, further down
                huge, rest = divmod(referenced, _HUGE_PAGE) if int(line.split()[1]) else (0, referenced)
                count += huge + rest // page
        return count
