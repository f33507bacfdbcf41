"""Running what may have ended an engine by itself, so that the next death has one name on it.

`begin` says "suspect" of a request that had no token when its engine died. Suspects run one after the other, each
with nothing beside it, until it has a token (or, if it was there at several deaths, until its end); meanwhile nothing
else is begun. Who turns out to be healthy costs the others the wait for its first token; who is not kills an engine in
which nobody else runs, and is given up after `max_attempts`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import structlog

from pagemill.ingest.entries import Entry
from pagemill.ingest.intake import Postponed

LOOK_S = 1.0

_log = structlog.get_logger(__name__)


class Quarantine:
    """Keeps suspects apart. `take(entry)` ends one that is not to run any more, or postpones it again; `is_empty()`:
    nothing runs now; `run_alone(entry)` returns once the suspect is cleared."""

    def __init__(
        self,
        take: Callable[[Entry], Awaitable[object]],
        *,
        is_empty: Callable[[], bool],
        run_alone: Callable[[Entry], Awaitable[None]],
    ) -> None:
        self._take = take
        self._is_empty = is_empty
        self._run_alone = run_alone
        self._suspects: deque[Entry] = deque()
        self._passing = 0
        self._clear = asyncio.Event()
        self._clear.set()
        self._changed = asyncio.Event()

    @property
    def is_clear(self) -> bool:
        """Whether there is no suspect, so that anything may be begun."""
        return self._clear.is_set()

    def add(self, entry: Entry) -> None:
        self._suspects.append(entry)
        self._clear.clear()
        self._changed.set()

    def notice(self) -> None:
        """Something has ended: perhaps nothing runs any more."""
        self._changed.set()

    def open(self) -> None:
        """The engine stops and begins nothing more: who waits here is let go."""
        self._suspects.clear()
        self._clear.set()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Begin and start something ordinary inside this: it waits until there is no suspect."""
        await self._clear.wait()
        self._passing += 1
        try:
            yield
        finally:
            self._passing -= 1
            self._changed.set()

    async def run(self) -> None:
        """Serve suspects until cancelled."""
        while True:
            while not (self._suspects and not self._passing and self._is_empty()):
                self._changed.clear()
                try:
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()
                except TimeoutError:
                    await self._look_again()
            entry = self._suspects.popleft()
            _log.info("a request that may have ended an engine runs alone", entry=entry.entry_id.decode())
            await self._run_alone(entry)
            if not self._suspects:
                self._clear.set()

    async def _look_again(self) -> None:
        """Those who wait here may have been cancelled, or be past their deadline."""
        for _ in range(len(self._suspects)):
            entry = self._suspects.popleft()
            if isinstance(await self._take(entry), Postponed):
                self._suspects.append(entry)
        if not self._suspects:
            self._clear.set()
