"""Names looked up by the system, on threads, so many at one time for each owner.

A look-up of a name whose name server is silent lasts longer than a try, and its thread cannot be stopped. An owner's
place is free again when the thread is, so that names of one owner can never take all threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

THREADS = 256  # started when they are needed


@dataclass(slots=True)
class _Owner:
    places: asyncio.Semaphore
    users: int = 0


class Lookups:
    """`per_owner`: look-ups of one owner at one time; None is no limit. Belongs to one event loop."""

    def __init__(self, per_owner: int | None) -> None:
        self._per_owner = per_owner or THREADS
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="webhook-lookup")
        self._owners: dict[str, _Owner] = {}
        self._closed = False

    async def begin(self, owner: str) -> None:
        """Wait for a place of the owner's. One call of `find` gives it back."""
        known = self._owners.setdefault(owner, _Owner(asyncio.Semaphore(self._per_owner)))
        known.users += 1
        try:
            await known.places.acquire()
        except BaseException:
            self._forget(owner, known)
            raise

    async def find(self, owner: str, host: str, port: int) -> Sequence[str]:
        """The addresses of a name, each once. Raises `OSError`."""
        loop, known = asyncio.get_running_loop(), self._owners[owner]

        def leave() -> None:
            known.places.release()
            self._forget(owner, known)

        def ended(_: Future[list[str]]) -> None:
            if not self._closed:
                with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                    loop.call_soon_threadsafe(leave)

        try:
            looking = self._pool.submit(_addresses, host, port)
        except BaseException:
            leave()
            raise
        looking.add_done_callback(ended)
        return await asyncio.wrap_future(looking)

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _forget(self, owner: str, known: _Owner) -> None:
        known.users -= 1
        if not known.users:
            self._owners.pop(owner, None)


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(place[0]) for *_, place in found))
