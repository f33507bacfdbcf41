"""What a step took and what of it was lost to others, told to the watchdog, whose advice the team follows.

One object for all steps: what runs once a step is as expensive as the pages of memory that it touches, and a generator
made into a context manager touches many.
"""

from __future__ import annotations

import time
from types import TracebackType

import structlog

from pagemill.kernels.cpu.team import Team
from pagemill.kernels.cpu.watchdog import Watchdog

_log = structlog.get_logger(__name__)


class StepClock:
    """`with` it round a step of `tokens` tokens. A step that fails says nothing."""

    __slots__ = ("_before", "_most", "_on_core", "_team", "_waited", "_watchdog", "tokens")

    def __init__(self, team: Team) -> None:
        self.tokens = 0
        self._team = team
        self._most = team.threads
        self._watchdog = Watchdog(team.threads)
        self._before = self._on_core = self._waited = 0.0

    def __enter__(self) -> None:
        if self._most > 1:
            self._before, self._on_core, self._waited = time.perf_counter(), time.thread_time(), self._team.waited_s

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None or self._most == 1:
            return
        watchdog, team, now = self._watchdog, self._team, time.perf_counter()
        seconds, settled = now - self._before, watchdog.settled
        off_core = seconds - (time.thread_time() - self._on_core)
        watchdog.observe(now, seconds, off_core + team.waited_s - self._waited, self.tokens)
        if watchdog.threads != team.threads:
            team.use(watchdog.threads)
        if watchdog.settled != settled:
            _log.info("threads in use", threads=watchdog.settled, of=watchdog.most)
