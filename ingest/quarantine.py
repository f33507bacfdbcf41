"""Running what may have ended an engine by itself, so that the next death has one name on it.

`begin` says "suspect" of a request that had no token when its engine died. Once nothing runs any more suspects are
begun, one when the one before it has a token; nothing else is begun meanwhile. Those that have theirs go on beside the
next: if the engine dies again, only one request in it had none. So sixty-four that died together are soon back in one
batch, also where they are taken over a few at a time, and who came to the engine by itself is not drawn into another's
death. An old suspect, there at several deaths, waits until nothing runs at all, and one that had tokens at each of them
is alone until its end.
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
        self._old: deque[Entry] = deque()
        self._only_suspects = False  # whether whatever runs was begun here, and is no old suspect
        self._passing = 0
        self._clear = asyncio.Event()
        self._clear.set()
        self._changed = asyncio.Event()

    @property
    def is_clear(self) -> bool:
        """Whether there is no suspect, so that anything may be begun."""
        return self._clear.is_set()

    def add(self, entry: Entry, *, old: bool = False) -> None:
        """`old`: it was there at several deaths."""
        (self._old if old else self._suspects).append(entry)
        self._clear.clear()
        self._changed.set()

    def notice(self) -> None:
        """Something has ended: perhaps nothing runs any more."""
        self._changed.set()

    def open(self) -> None:
        """The engine stops and begins nothing more: who waits here is let go."""
        self._suspects.clear()
        self._old.clear()
        self._clear.set()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Begin and start something ordinary inside this: it waits until there is no suspect."""
        await self._clear.wait()
        self._only_suspects = False
        self._passing += 1
        try:
            yield
        finally:
            self._passing -= 1
            self._changed.set()

    async def run(self) -> None:
        """Serve suspects until cancelled."""
        while True:
            while not self._is_ready():
                self._changed.clear()
                try:
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()
                except TimeoutError:
                    await self._look_again()
            if self._is_empty():
                self._only_suspects = bool(self._suspects)
            entry = (self._suspects or self._old).popleft()
            _log.info(
                "a request that may have ended an engine runs alone", **entry.names, entry=entry.entry_id.decode()
            )
            await self._run_alone(entry)
            self._open_if_over()

    def _is_ready(self) -> bool:
        if self._passing or not (self._suspects or self._old):
            return False
        return self._is_empty() or (bool(self._suspects) and self._only_suspects)

    def _open_if_over(self) -> None:
        if not self._suspects and not self._old:
            self._clear.set()

    async def _look_again(self) -> None:
        """Those who wait here may have been cancelled, or be past their deadline."""
        for suspects in (self._suspects, self._old):
            for _ in range(len(suspects)):
                entry = suspects.popleft()
                if isinstance(await self._take(entry), Postponed):
                    suspects.append(entry)
        self._open_if_over()
