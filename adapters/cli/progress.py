"""What a long piece of work is doing: a bar on a terminal, a line now and then otherwise. On standard error."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pagemill.engine.loader import Progress

_LINE_EVERY_S = 2.0


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A callback `(what, share done)` for the time of the block. It may be called from another thread."""
    if sys.stderr.isatty():
        with _bar() as report:
            yield report
    else:
        yield _Lines().report


class _Lines:
    """A line for each new piece of work, and one every two seconds while it lasts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._what = ""
        self._printed_at = 0.0

    def report(self, what: str, share: float) -> None:
        with self._lock:
            now = time.monotonic()
            if what == self._what and now - self._printed_at < _LINE_EVERY_S:
                return
            done = "" if what != self._what or not 0 < share <= 1 else f" {share:.0%}"
            self._what, self._printed_at = what, now
            print(f"{what}{done}", file=sys.stderr, flush=True)


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, share: float) -> None:
            if what not in tasks:
                for earlier in tasks.values():
                    bars.update(earlier, visible=False)
                tasks[what] = bars.add_task(what, total=1.0)
            bars.update(tasks[what], completed=share)

        yield report


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show that something without a measure goes on: a clock on a terminal, one line otherwise."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress as Bars
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
            bars.add_task(what, total=None)
            yield
    else:
        print(what, file=sys.stderr, flush=True)
        yield
