"""What the exit status of `pagemill` means."""

from __future__ import annotations

from pagemill.engine.errors import PagemillError

DONE, FAILED, USAGE, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 130


class UnreachableError(PagemillError):
    """The queue's server does not answer, or not as a queue's server should."""
