"""Moments at which all that an engine's process does again and again is done together.

What runs rarely beside an engine's kernels finds its code and data gone from the caches, so that a wake-up costs ten
times what is done in it. Timers that start when they are made wake the process one after the other, and with it the
server that each of them asks something. Those that agree on the moments wake both once.
"""

from __future__ import annotations

import asyncio
import math
import time
from functools import partial
from typing import Any

from pagemill.ingest import scripts
from pagemill.ingest.gathering import Gatherer
from pagemill.ingest.redis import Client

_EARLY = 1e-3  # of a period: a timer may go off a little before its moment, which is over all the same


class Rounds:
    """Moments of one process, counted from its own start: several do not all ask the server at once."""

    def __init__(self, client: Client) -> None:
        self._calls = Gatherer[scripts.Call](partial(scripts.run, client), size=lambda call: call.size)
        self._origin = time.monotonic()

    def left(self, period_s: float) -> float:
        """Seconds until the next multiple of a period."""
        past = (time.monotonic() - self._origin) / period_s
        return (math.floor(past + _EARLY) + 1 - past) * period_s

    async def wait(self, period_s: float) -> None:
        """Return at the next multiple of a period; one that has been missed is skipped."""
        await asyncio.sleep(self.left(period_s))

    async def ask(self, call: scripts.Call) -> Any:
        """Send a call with what others ask in this turn. Returns its raw reply, or raises what it failed with."""
        return await self._calls.ask(call)
