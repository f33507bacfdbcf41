"""How many threads kernels get where nobody says."""

from __future__ import annotations

import os


def available_threads() -> int:
    """Cores that this process may run on (taskset, cpusets). An engine also heeds its CPU quota, and says so."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # no Linux; a sandbox that refuses the question
        return os.cpu_count() or 1
