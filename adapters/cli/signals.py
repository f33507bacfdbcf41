"""What SIGTERM and Ctrl-C do to a role, depending on how far it is. For event loops of the main thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagemill.ingest.worker import Worker

SHOW_CURSOR = "\x1b[?25h"  # the progress bar hides it


@contextlib.contextmanager
def at_signal(act: Callable[[int], object]) -> Iterator[None]:
    """Inside this each signal calls `act` with its number."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, act, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def exit_now(number: int) -> None:
    """While the model loads in its thread nothing has been taken yet, so there is nothing to wait for."""
    if sys.stderr.isatty():
        print(SHOW_CURSOR, end="", file=sys.stderr, flush=True)
    os._exit(128 + number)


@contextlib.contextmanager
def stopped_by_signal(worker: Worker, serving: asyncio.Task[None]) -> Iterator[None]:
    """A first signal stops the worker, a second one cancels its run `serving`: what runs is given back at once then."""
    signalled = False

    def stop(_: int) -> None:
        nonlocal signalled
        if signalled:
            serving.cancel()
        signalled = True
        worker.stop()

    with at_signal(stop):
        yield
