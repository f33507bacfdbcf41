"""Ctrl-C between the steps of an engine and not in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[None]:
    """Raise a `KeyboardInterrupt` that comes inside only at the end.

    One that comes in the middle of a step would leave blocks that nobody holds: the step had taken them and nothing
    has been told yet. A second one is raised at once, for whoever does not want to wait for a step. Only Python's own
    handler is replaced; other threads never get an interrupt.
    """
    handler = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not handler:
        yield
        return
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            handler(number, frame)
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        raise KeyboardInterrupt
