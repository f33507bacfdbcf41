"""Entries of tenants that run as many requests as they may: they wait here for one of theirs to end.

The entries were delivered to this engine and are not begun. Only their names are kept, so that a tenant who sends
thousands costs little; nobody else could begin them, since the cap counts on all engines. Each tenant's keep their
order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from pagemill.ingest.entries import Entry


class TenantLines:
    """A line of entries for each tenant that waits. `tenant in lines`: it has one."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Entry]] = {}
        self._changed = asyncio.Event()

    def __contains__(self, tenant: object) -> bool:
        return tenant in self._lines

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._lines))

    def add(self, tenant: str, entry: Entry) -> None:
        """Put an entry in its place: by priority, then by age. Those that come together may come in any order."""
        line = self._lines.setdefault(tenant, deque())
        place = len(line)
        while place and _rank(line[place - 1]) > _rank(entry):
            place -= 1
        line.insert(place, replace(entry, fields={}))
        self._changed.set()

    def first(self, tenant: str) -> Entry | None:
        """The tenant's first entry, without its fields."""
        line = self._lines.get(tenant)
        return line[0] if line else None

    def remove(self, tenant: str, entry: Entry) -> None:
        line = self._lines[tenant]
        line.remove(entry)
        if not line:
            del self._lines[tenant]

    def notice(self) -> None:
        """A request has ended, perhaps one of a tenant that waits."""
        self._changed.set()

    async def wait(self, timeout_s: float) -> None:
        """Return after `notice`, and while somebody is in line after `timeout_s`: requests end on other engines too."""
        try:
            async with asyncio.timeout(timeout_s if self._lines else None):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()


def _rank(entry: Entry) -> tuple[int, int, int]:
    ms, _, number = entry.entry_id.partition(b"-")
    return entry.stream, int(ms), int(number)
